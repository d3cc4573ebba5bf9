"""The three tasks, and the one thing that a pool child is: an engine that works while bells ring.

A task takes no arguments. ``flashtune.compile`` and ``flashtune.measure`` work for some seconds, and
ring again if there is more; ``flashtune.tick`` looks at everything once. The engine is made with the
child and lives as long: its measuring child, its open workloads and its searches stay between tasks.
"""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Any

from celery import Celery, current_app, shared_task, signals
from celery.exceptions import SoftTimeLimitExceeded

from tuner.errors import FlashtuneError
from workers.celery_app import SOFT_LIMIT_S, TASKS, Bells, log_to_stderr
from workers.member import Member

if TYPE_CHECKING:
    from db.store import Store
    from workers.dispatch import Dispatcher
    from workers.engine import Engine

SLICE_S = 20.0

log = logging.getLogger("flashtune.worker")


class PoolChild:
    """This process as a member of the fleet. Whatever is away when it begins, the next bell tries again."""

    def __init__(self, app: Celery) -> None:
        self.member = Member(**app.conf.flashtune_member)
        self._settings = self.member.settings()
        self._bells = Bells(app)
        self._store: Store | None = None
        self._engine: Engine | None = None
        self._dispatcher: Dispatcher | None = None
        self._open = False
        self._stopping = False

    def stop_soon(self) -> None:
        """Begin nothing more. Called by a signal handler."""
        self._stopping = True

    def open(self) -> bool:
        """Sign on, unless that is done. False, and a line in the log, if something is in the way."""
        if self._open:
            return True
        try:
            self._begin().__enter__()
        except FlashtuneError as e:  # the database away, the device in use
            log.error("%s", e)
            return False
        self._open = True
        return True

    def bell(self) -> None:
        """Do what there is to do, for some seconds."""
        if self._stopping or not self.open():
            return
        try:
            if self._dispatcher is not None:
                self._dispatcher.tick()
            else:
                self._slice()
        except FlashtuneError as e:
            log.error("%s", e)
        except SoftTimeLimitExceeded:
            log.error("no end after %d s; this worker begins anew", SOFT_LIMIT_S)
            self.close()

    def close(self) -> None:
        """Give everything back and sign off."""
        if self._open and self._engine is not None:
            self._open = False
            self._engine.__exit__()

    def _begin(self) -> Engine:
        """Return the engine, the same one every time: a worker that tries again is no other worker."""
        # here, since the pool's parent imports the tasks too and needs none of it: that is 50 MB
        from db.store import Store
        from workers.dispatch import Dispatcher
        from workers.engine import Engine

        if self._store is None:
            self._store = Store.open(self._settings.database_url, lease_s=self._settings.lease_s)
        if self._engine is None:
            member = self.member
            where = {"device": member.device} if member.role == "measure" else {"arch": member.arch or "cpu"}
            self._engine = Engine(self._settings, self._store, (member.role,), ring=self._bells.ring, **where)
            if member.role == "control":
                self._dispatcher = Dispatcher(self._store, self._bells.ring, self._settings.keep)
        return self._engine

    def _slice(self) -> None:
        assert self._engine is not None
        self._ring_if_ready()  # at once, so that idle workers wake each other
        self._engine.work(SLICE_S, lambda: self._stopping)
        if not self._stopping:
            self._ring_if_ready()

    def _ring_if_ready(self) -> None:
        assert self._store is not None
        if (self.member.role, self.member.key) in self._store.work.ready():
            self._bells.ring(self.member.queue)


_child: PoolChild | None = None


def _bell() -> None:
    assert _child is not None, "tasks run in a worker's pool child"
    _child.bell()


def _process_begins(**_: object) -> None:
    global _child
    _child = child = PoolChild(current_app)
    log_to_stderr(child.member.name)
    signal.signal(signal.SIGUSR2, lambda *_: child.stop_soon())  # from our parent, when it is to end
    child.open()


def _process_ends(**_: object) -> None:
    if _child is not None:
        _child.close()


compile_configs: Any = shared_task(name=TASKS["compile"])(_bell)
measure: Any = shared_task(name=TASKS["measure"])(_bell)
tick: Any = shared_task(name=TASKS["control"])(_bell)
signals.worker_process_init.connect(_process_begins, weak=False)
signals.worker_process_shutdown.connect(_process_ends, weak=False)
