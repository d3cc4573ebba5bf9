"""Do the GPUs of a class agree? Each measures the same default kernel beside every config that it tries.

A GPU that is throttled, shared or damaged is slow on the default too, and shows in no ratio: so the
absolute times of the default are compared, within one study and between nodes.

    >>> found = deviations([Reading("s", "a", 100.0), Reading("s", "b", 100.0), Reading("s", "c", 110.0)])
    >>> round(found["c"].share, 3), found["c"].suspicious
    (0.1, True)
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

SUSPICIOUS = 0.03  # absolute times of H200s of one kind differ by 1 to 2% from run to run


@dataclass(frozen=True)
class Reading:
    """One trial's median time of the default, in microseconds, on one node: a host and its GPU."""

    study_id: str
    node: str
    default_us: float


@dataclass(frozen=True)
class Deviation:
    """How a node's times differ from its class's: 0.05 is five percent slower than the median node."""

    share: float
    studies: int
    suspicious: bool


def deviations(readings: Iterable[Reading]) -> dict[str, Deviation]:
    """Compare nodes that took part in the same studies; those that shared none are left out.

    A node's time in a study is the median of its readings. It is held against the median of all nodes'
    times, itself included, so with two nodes each deviates by half of their difference.
    """
    by_study: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in readings:
        by_study[r.study_id][r.node].append(r.default_us)
    logs: dict[str, list[float]] = defaultdict(list)
    for nodes in by_study.values():
        if len(nodes) > 1:
            times = {w: math.log(statistics.median(us)) for w, us in nodes.items()}
            middle = statistics.median(times.values())
            for node, time in times.items():
                logs[node].append(time - middle)
    found = {w: (math.expm1(statistics.median(offsets)), len(offsets)) for w, offsets in logs.items()}
    return {w: Deviation(share, n, abs(share) > SUSPICIOUS) for w, (share, n) in found.items()}
