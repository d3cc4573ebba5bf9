"""What studies of neighbouring workloads say about a new one: how alike two are, and whom to ask.

Pure values, no I/O: ``db`` finds stored trials, ``tuner.surrogate`` draws conclusions from them. Goes
further than ``tuner.lookup``, which must answer with one config and so keeps within three doublings
and one pattern: here a remote neighbour only counts for less.

    >>> w = Workload(batch=2, heads_q=16, heads_kv=16, seqlen_q=8192, seqlen_k=8192, head_dim=128)
    >>> h200 = named("sm_90a")
    >>> round(likeness(w, h200, w.with_(seqlen_q=4096, seqlen_k=4096), h200), 3)  # two doublings
    0.905
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuner.config import Config
from tuner.lookup import distance
from tuner.pattern import Pattern
from tuner.target import Target
from tuner.trial import Measurement, Trial, TrialStatus
from tuner.workload import JOINT_OP, Workload

Join = Callable[[Config, Config, Workload], Config | None]

# What each difference costs: likeness is exp(-sum). Ordered by what moves the ranking of tiles most: the
# head dim decides what fits, the pattern which tiles are skipped, sizes only how many waves there are.
# Set by hand before a table was replayed, and not fitted since; halved or doubled, each gives the same
# regret within 0.001 on the sweep (benchmarks/replay.py --sensitivity).
_PER_DOUBLING = 0.05  # of batch * heads, of each sequence length, of a pattern's parameter
_PER_HEAD_DIM = 0.6  # a doubling of head_dim; half of it for head_dim_v
_PER_NAME = 0.3  # a mask or score modification that only one of the two has
_PER_GROUP = 0.3  # a doubling of heads_q / heads_kv
_PER_DTYPE = 0.3
_PER_MODEL = 0.3  # another GPU of the architecture
_PER_POWER = 0.05  # the same GPU under another power cap

MIN_LIKENESS = 0.15
MAX_NEIGHBOURS = 12
MAX_EVIDENCE = 500  # trials of neighbours: the surrogate inverts a matrix of this size
MAX_OF_A_DIRECTION = 16  # of the fastest configs of each direction, in every pair


@dataclass(frozen=True)
class Neighbour:
    """A study of another workload, or of the same one elsewhere: where it was done, and its trials."""

    workload: Workload
    target: Target
    trials: tuple[Trial, ...]


def likeness(a: Workload, on: Target, b: Workload, there: Target) -> float:
    """Return how much one study's ranking of configs says about another's: 1 for the same, 0 for nothing.

    0 for another op, layout, architecture, or if only one of the two asks for deterministic kernels.
    Symmetric, and a product of exponentials of distances, so that it can be a covariance.
    """
    if (a.op, a.layout, a.deterministic, on.arch) != (b.op, b.layout, b.deterministic, there.arch):
        return 0.0
    names, others = _names(a.pattern), _names(b.pattern)
    if names != others:  # parameters of different patterns cannot be compared
        a, b = a.with_(pattern=Pattern()), b.with_(pattern=Pattern())
    caps = (on.power_cap_w, there.power_cap_w)
    cost = (
        _PER_DOUBLING * distance(a, b)
        + _PER_HEAD_DIM * _doublings(a.head_dim, b.head_dim)
        + _PER_HEAD_DIM / 2 * _doublings(a.head_dim_v, b.head_dim_v)
        + _PER_NAME * len(names ^ others)
        + _PER_GROUP * _doublings(a.heads_q // a.heads_kv, b.heads_q // b.heads_kv)
        + _PER_DTYPE * (a.dtype != b.dtype)
        + _PER_MODEL * (on.model != there.model)
        + _PER_POWER * (None not in caps and caps[0] != caps[1])  # an unknown figure is no difference
    )
    return math.exp(-cost)


def nearest(workload: Workload, target: Target, found: Sequence[Neighbour]) -> list[Neighbour]:
    """Return whom to ask, the most alike first: at most MAX_NEIGHBOURS, none below MIN_LIKENESS.

    Ties are broken by the workload's and the target's key, so that the order of ``found`` never decides.
    """
    ranked = sorted((-likeness(workload, target, n.workload, n.target), n.workload.key, n.target.key, i)
                    for i, n in enumerate(found))  # fmt: skip
    return [found[i] for minus, _, _, i in ranked[:MAX_NEIGHBOURS] if -minus >= MIN_LIKENESS]


def added(forward: Neighbour, backward: Neighbour, join: Join) -> Neighbour:
    """Return what a study of both directions would have found, by adding the times of one study of each.

    Every pair of the fastest that ``join`` lets share a BlockMask, the stock pair among them; what failed in one
    direction fails with the other's fastest. Only a belief to begin with: a block that was made to fit both
    was not measured, and a kernel right behind another finds a warmer cache.
    """
    workload = forward.workload.with_(op=JOINT_OP)
    ours, theirs = _fastest(forward.trials), _fastest(backward.trials)
    trials: dict[str, Trial] = {}

    def take(mine: Trial, other: Trial) -> bool:
        config = join(mine.config, other.config, workload)
        if config is not None and config.key not in trials:
            trials[config.key] = _sum(config, mine, other)
        return config is not None

    for mine, other in ((a, b) for a in ours for b in theirs):
        take(mine, other)
    for failed in (t for t in forward.trials if log_ratio(t) is None):
        any(take(failed, other) for other in theirs)  # the first that fits is enough
    for failed in (t for t in backward.trials if log_ratio(t) is None):
        any(take(mine, failed) for mine in ours)
    return Neighbour(workload, forward.target, tuple(trials.values()))


def log_gains(trials: Sequence[Trial], family: str, version: int) -> list[tuple[Trial, float | None]]:
    """Return a family's tuned trials with log(time of its stock config / time); None where it failed.

    Relative to the family's own stock config where that was measured beside them: the default of a
    study may be another family's, and by how much that one is faster differs from workload to workload.
    """
    mine = [t for t in trials if (t.config.family, t.config.version) == (family, version)]
    stock = next((log for t in mine if t.config.is_stock and (log := log_ratio(t)) is not None), 0.0)
    logs = [(t, log_ratio(t)) for t in mine if not t.config.is_stock]
    return [(t, None if log is None else log - stock) for t, log in logs]


def log_ratio(trial: Trial) -> float | None:
    """Return the log of default / time; None for what failed, or whose ratio is no number above 0."""
    ratio = trial.ratio if trial.status is TrialStatus.OK else None
    return math.log(ratio) if ratio is not None and math.isfinite(ratio) and ratio > 0 else None


def _fastest(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that were measured, fastest first; of tuned ones the best few."""
    measured = sorted((t for t in trials if log_ratio(t) is not None), key=lambda t: (-(t.ratio or 0.0), t.config.key))
    tuned = [t for t in measured if not t.config.is_stock][:MAX_OF_A_DIRECTION]
    return [t for t in measured if t.config.is_stock or t in tuned]


def _sum(config: Config, a: Trial, b: Trial) -> Trial:
    """Return the trial of a config whose directions were tried apart."""
    one, other = a.measurement, b.measurement
    if one is None or other is None:
        failed = a if one is None else b
        return Trial(config, failed.status, failed.error)
    time = one.median_us + other.median_us
    default = statistics.median(one.default_us) + statistics.median(other.default_us)
    return Trial(config, TrialStatus.OK, measurement=Measurement(one.policy, (time,), (default,), default / time, time))


def _names(pattern: Pattern) -> frozenset[str]:
    return frozenset(p.name for p in pattern.masks + pattern.scores)


def _doublings(a: int, b: int) -> float:
    return abs(math.log2(a) - math.log2(b))
