"""The dispatcher's look at everything, every few seconds: bind, plan, take back, ring, forget.

It holds nothing that counts: two of them do no harm, and none for an hour loses nothing. Whatever a message
would have said is read from the database again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from db.planning import WaitingItem
from db.store import Store
from db.values import Keep, WorkerInfo
from tuner.errors import FlashtuneError, InputError, Unavailable, Unreadable
from tuner.spec import StudySpec, policy_for
from tuner.study import spec_for
from workers.identity import arch_of
from workers.planner import Planner

_FORGET_EVERY_S = 600.0  # at once again while there is more: each call forgets a little
_STUDIES_A_WORKER = 4  # under way at once for each measuring worker: enough to measure while others compile

Ring = Callable[[str], None]

log = logging.getLogger("flashtune.dispatch")


class Dispatcher:
    """One dispatcher. ``ring`` is called with the name of each queue that has something to do.

    ``keep`` says how long what has ended is remembered.
    """

    def __init__(self, store: Store, ring: Ring = lambda queue: None, keep: Keep | None = None) -> None:
        self._store, self._ring, self._keep = store, ring, keep or Keep()
        self._planner = Planner(store)
        self._forget_at = 0.0

    def tick(self) -> None:
        """Look at everything once."""
        alive = self._store.fleet.workers(alive_only=True)
        measuring = Counter(w.class_key for w in alive if "measure" in w.roles)
        self._take_back()
        self._store.planning.settle()
        self._bind(alive, measuring)
        self._store.planning.account()
        under_way = self._store.planning.progress()
        self._planner.forget_all_but([s.id for s in under_way])
        for study in under_way:
            try:
                self._planner.advance(study.id, measuring[study.class_key])
            except Unavailable:
                raise
            except Unreadable as e:
                log.error("study %s: %s", study.id, e)
                self._store.planning.fail_study(study.id, str(e))
            except FlashtuneError as e:  # one study that cannot be planned here holds up no other
                log.error("study %s: %s", study.id, e)
        for stage, key in self._store.work.ready():
            self._ring(f"{stage}.{arch_of(key)}")
        self._forget()

    def _forget(self) -> None:
        if time.monotonic() >= self._forget_at:
            gone = self._store.prune(self._keep)
            if gone:
                log.info("forgot %s", ", ".join(f"{count} {table}" for table, count in gone.items()))
            else:
                self._forget_at = time.monotonic() + _FORGET_EVERY_S

    def _take_back(self) -> None:
        for lost in self._store.work.reap():
            what = lost.config.label if lost.config else lost.kind
            then = "given up" if lost.quarantined else "taken back"
            log.warning("study %s: %s of a lost worker is %s (deaths: %d)", lost.study_id, what, then, lost.deaths)

    def _bind(self, alive: list[WorkerInfo], measuring: Counter[str]) -> None:
        """Begin studies for waiting workloads, up to a number for each class of GPU."""
        classes = _classes(alive, measuring)
        active = Counter(s.class_key for s in self._store.planning.progress())

        def free() -> list[WorkerInfo]:
            return [w for w in classes if active[w.class_key] < _STUDIES_A_WORKER * measuring[w.class_key]]

        if not free():
            return
        unreadable: dict[int, str] = {}
        for item in self._store.planning.waiting(archs=[arch_of(w.class_key) for w in free()], aside=unreadable):
            chosen = self._choose(item, classes, free())
            if chosen is None:
                continue
            worker, spec = chosen
            try:
                study_id = self._store.planning.bind(item.id, spec, worker.class_key, worker.compile_key)
            except Unreadable as e:
                unreadable[item.id] = str(e)
                continue
            if study_id is not None:
                active[worker.class_key] += 1
                log.info("job %s: %s is study %s on %s", item.job_id, item.name, study_id, worker.class_key)
        for item_id, error in unreadable.items():  # it would be in the way of the others, look after look
            log.error("workload %d: %s", item_id, error)
            self._store.planning.reject(item_id, error)

    def _choose(
        self, item: WaitingItem, classes: list[WorkerInfo], free: list[WorkerInfo]
    ) -> tuple[WorkerInfo, StudySpec] | None:
        """Return the free class that an item goes to, and its study there; None to wait for one.

        An item that no class of its architecture can do is rejected, with each one's reason.
        """
        able, reasons = [], []
        for worker in classes:
            if item.arch in ("auto", arch_of(worker.class_key)) and worker.target is not None:
                try:
                    policy = policy_for(item.policy, worker.target)
                    spec = spec_for(item.workload, worker.target, worker.toolchain, policy, item.families)
                    able.append((worker, spec))
                except InputError as e:
                    reasons.append(str(e))
        if reasons and not able:
            self._store.planning.reject(item.id, "; ".join(reasons))
        return next(((worker, spec) for worker, spec in able if worker in free), None)


def _classes(alive: list[WorkerInfo], measuring: Counter[str]) -> list[WorkerInfo]:
    """Return one worker for each class, the class with the most workers first."""
    by_class = {w.class_key: w for w in sorted(alive, key=lambda w: w.id) if "measure" in w.roles}
    return sorted(by_class.values(), key=lambda w: (-measuring[w.class_key], w.class_key))
