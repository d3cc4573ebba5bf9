"""Published answers in memory, to look configs up without the database.

``Winners`` keeps a frozen ``Snapshot``, replaced when something new is published. The bytes of an
answer live in the snapshot that gave it, so nothing stale outlives it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from api.http.problems import etag, json_bytes
from db.store import Published, Store
from tuner.lookup import Match, find
from tuner.target import Target, Toolchain
from tuner.workload import Workload

REMEMBERED = 4096  # answers of one snapshot
SHORT_QUERY = 2000  # bytes; longer ones are not remembered
_TOOLS = tuple(f.name for f in fields(Toolchain))


@dataclass(frozen=True)
class Question:
    """A workload, and where it runs; figures and versions that are empty are not known to the asker."""

    workload: Workload
    target: Target
    toolchain: Toolchain
    policy: str

    def unsaid(self) -> frozenset[str]:
        """Return what the asker does not know: no reason for a warning."""
        tools = {name for name in _TOOLS if not getattr(self.toolchain, name)}
        return frozenset(tools | ({"model"} if not self.target.model else set()))


@dataclass(frozen=True)
class Answered:
    """An answer as it is sent."""

    body: bytes
    etag: str
    kind: str


class Snapshot:
    """Everything published at one moment. Any thread may ask it."""

    def __init__(self, entries: Sequence[Published]) -> None:
        self._entries = tuple(entries)
        self._exact: defaultdict[tuple[str, str, str], list[Published]] = defaultdict(list)
        self._alike: defaultdict[tuple[Any, ...], list[Published]] = defaultdict(list)
        for entry in entries:
            self._exact[entry.target.arch, entry.policy, entry.workload.key].append(entry)
            self._alike[_kind_of(entry.target, entry.workload)].append(entry)
        self._answers: OrderedDict[bytes, Answered] = OrderedDict()
        self._lock = threading.Lock()

    def remembered(self, query: bytes) -> Answered | None:
        """Return the answer that this very query string got from this snapshot before."""
        return self._answers.get(query)

    def answer(self, question: Question, query: bytes) -> Answered:
        """Look up, and remember the answer for ``query`` unless that is long."""
        match = self.match(question)
        body = json_bytes(match.to_dict())
        answered = Answered(body, etag(body), str(match.kind))
        if len(query) > SHORT_QUERY:
            return answered
        with self._lock:
            self._answers[query] = answered
            if len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        return answered

    def match(self, q: Question) -> Match:
        """Return what ``tuner.lookup.find`` gives among all entries, from as few as decide it."""
        unsaid = q.unsaid()
        exact = self._exact.get((q.target.arch, q.policy, q.workload.key))
        if exact:  # for the right policy it is before all others
            return self._find(q, [_without(e, unsaid) for e in exact])
        alike = self._alike.get(_kind_of(q.target, q.workload))
        if alike:
            match = self._find(q, [_without(e, unsaid) for e in alike])
            if match.entry is not None:  # no other entry could match
                return match
        return self._find(q, self._entries)  # none: all are looked at to say why

    def _find(self, q: Question, entries: Sequence[Published]) -> Match:
        return find(q.workload, q.target, q.toolchain, q.policy, entries)


class Winners:
    """The newest snapshot of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.snapshot: Snapshot | None = None
        self._mark: tuple[int, int] | None = None

    def load(self) -> Snapshot:
        """Ask the store; keep the old snapshot if nothing changed. Blocks.

        Raises:
            StorageError: if the database does not answer.
        """
        mark = self._store.published_mark()  # before the entries: one that comes between is read again
        if self.snapshot is None or mark != self._mark:
            self.snapshot = Snapshot(self._store.published())
            self._mark = mark
        return self.snapshot


def _kind_of(target: Target, w: Workload) -> tuple[Any, ...]:
    """Return what is equal for all entries that can match a workload, by ``tuner.lookup``'s invariants."""
    names = tuple(part.name for part in w.pattern.masks + w.pattern.scores)
    return target.arch, w.op, w.dtype, w.head_dim, w.head_dim_v, names


def _without(entry: Published, names: frozenset[str]) -> Published:
    """Forget of an entry what the asker does not know of himself, so that it makes no difference."""
    target = replace(entry.target, model="") if "model" in names else entry.target
    tools = replace(entry.toolchain, **{name: "" for name in names if name != "model"})
    return replace(entry, target=target, toolchain=tools)
