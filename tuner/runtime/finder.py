"""Which entry of a snapshot answers a workload, on one machine: indexed once, remembered after.

Owns the index. The rules are those of ``tuner.lookup``, which chooses among the few entries that can
win. A question asked before is one dictionary lookup.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence

from tuner import lookup
from tuner.errors import SnapshotError
from tuner.lookup import Match, MatchKind
from tuner.runtime.snapshot import Line, Snapshot
from tuner.target import Target, Toolchain
from tuner.workload import Workload

REMEMBERED = 65_536  # answers: a bound for who asks with ever new sizes
log = logging.getLogger("tuner.runtime")


class Answer:
    """A match, and how often it was given.

    ``times`` is added to without a lock: two threads that add at the same moment may count one. A
    lock would cost more than the whole lookup, and the counts are for people and for ranking.
    """

    __slots__ = ("match", "times", "workload")

    def __init__(self, match: Match, workload: Workload) -> None:
        self.match = match
        self.workload = workload
        self.times = 0


class Finder:
    """Answers from one snapshot for one target, toolchain and policy. Any thread may ask it."""

    def __init__(self, snapshot: Snapshot, target: Target, toolchain: Toolchain, policy: str) -> None:
        self.snapshot, self.target, self.toolchain, self.policy = snapshot, target, toolchain, policy
        self.answers: dict[str | tuple[object, ...], Answer] = {}  # by key, and by plain arguments
        mine: defaultdict[str, list[Line]] = defaultdict(list)
        other: defaultdict[str, list[Line]] = defaultdict(list)
        usable = 0
        for line in snapshot.lines:
            if line.arch == target.arch:
                usable += 1
                index = mine if line.policy == policy else other
                # these never collide: a workload's key begins with its version, and a bucket's text is the longer one
                index[line.key].append(line)
                index[line.bucket].append(line)
                index[line.alike].append(line)
        self._indexes = (dict(mine), dict(other))
        self._archs = sorted({line.arch for line in snapshot.lines})
        self.usable = usable

    @property
    def mismatch(self) -> str:
        """Say so if the whole snapshot is for other architectures; empty if it is not."""
        if self.usable or not self._archs:
            return ""
        return f"everything tuned is for {', '.join(self._archs)}, this is {self.target.arch}"

    def answer(self, workload: Workload) -> Answer:
        """Look up and remember."""
        found = self.answers.get(workload.key)
        if found is None:
            if len(self.answers) >= REMEMBERED:
                self.answers.clear()
            # setdefault: of two threads that look the same up, both go on with one answer
            found = self.answers.setdefault(workload.key, Answer(self._match(workload), workload))
        return found

    def _match(self, workload: Workload) -> Match:
        alike, bucket = lookup.group_keys(workload)
        for index in self._indexes:
            for key in (workload.key, bucket, alike):
                match = self._among(index.get(key, ()), workload)
                if match is not None:
                    return match
        return self._default()

    def _among(self, lines: Sequence[Line], workload: Workload) -> Match | None:
        entries = []
        for line in lines:
            try:
                entries.append(line.entry)
            except SnapshotError as e:
                log.warning("snapshot %s: %s", self.snapshot.digest[:12], e)
        match = lookup.find(workload, self.target, self.toolchain, self.policy, entries) if entries else None
        return match if match and match.entry else None

    def _default(self) -> Match:
        warnings = (self.mismatch,) if self.mismatch else ()
        why = self.mismatch or f"of {self.usable} configs for {self.target.arch} none is near"
        return Match(MatchKind.DEFAULT, None, math.inf, warnings, f"nothing tuned fits: use the stock kernel ({why})")
