"""The dispatcher's look at everything, every few seconds: bind, plan, take back, ring.

It holds nothing: two of them do no harm, and none for an hour loses nothing. Whatever a message
would have said is read from the database again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from db.jobs import KEEP_KEYS
from db.planning import WaitingItem
from db.store import Store
from db.values import WorkerInfo
from tuner.errors import FlashtuneError, InputError, Unavailable
from tuner.spec import StudySpec, policy_for
from tuner.study import spec_for
from workers.identity import arch_of
from workers.planner import Planner

_STUDIES_A_WORKER = 4  # under way at once for each measuring worker: enough to measure while others compile

Ring = Callable[[str], None]

log = logging.getLogger("flashtune.dispatch")


class Dispatcher:
    """One dispatcher. ``ring`` is called with the name of each queue that has something to do."""

    def __init__(self, store: Store, ring: Ring = lambda queue: None) -> None:
        self._store, self._ring = store, ring
        self._planner = Planner(store)

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
            except FlashtuneError as e:  # one study that cannot be planned here holds up no other
                log.error("study %s: %s", study.id, e)
        self._relay()
        self._store.planning.forget(datetime.now(UTC) - KEEP_KEYS)

    def _take_back(self) -> None:
        for lost in self._store.work.reap():
            what = lost.config.label if lost.config else lost.kind
            log.warning("study %s: %s was lost with its worker (%d deaths)", lost.study_id, what, lost.deaths)

    def _bind(self, alive: list[WorkerInfo], measuring: Counter[str]) -> None:
        """Begin studies for waiting workloads, up to a number for each class of GPU."""
        classes = _classes(alive, measuring)
        active = Counter(s.class_key for s in self._store.planning.progress())

        def free() -> list[WorkerInfo]:
            return [w for w in classes if active[w.class_key] < _STUDIES_A_WORKER * measuring[w.class_key]]

        for item in self._store.planning.waiting(archs=[arch_of(w.class_key) for w in free()]) if free() else ():
            chosen = self._choose(item, classes, free())
            if chosen is None:
                continue
            worker, spec = chosen
            study_id = self._store.planning.bind(item.id, spec, worker.class_key, worker.compile_key)
            if study_id is not None:
                active[worker.class_key] += 1
                log.info("job %s: %s is study %s on %s", item.job_id, item.name, study_id, worker.class_key)

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

    def _relay(self) -> None:
        """Send what waits in the outbox, and ring for everything that is ready."""
        bells = self._store.outbox.pending()
        for queue in sorted({b.queue for b in bells} - {"control"}):  # control is where we are
            self._ring(queue)
        self._store.outbox.sent([b.id for b in bells])
        for stage, key in self._store.work.ready():
            self._ring(f"{stage}.{arch_of(key)}")


def _classes(alive: list[WorkerInfo], measuring: Counter[str]) -> list[WorkerInfo]:
    """Return one worker for each class, the class with the most workers first."""
    by_class = {w.class_key: w for w in sorted(alive, key=lambda w: w.id) if "measure" in w.roles}
    return sorted(by_class.values(), key=lambda w: (-measuring[w.class_key], w.class_key))
