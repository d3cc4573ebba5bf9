"""The heartbeat of one worker: a thread that keeps its leases while the worker makes progress.

A worker that hangs must lose its work like one that died, so the heart stops beating when it holds
work and nobody has called ``alive`` for ``_STUCK_S``: longer than any single step may take. One that
waits for work lives.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime

from db.store import Store
from db.values import SILENT_AFTER, WorkerInfo
from tuner.errors import FlashtuneError

_STUCK_S = 1200.0  # opening a workload, a compile and the finals have deadlines below this

log = logging.getLogger("flashtune.worker")


class Heart:
    """Beats three times a lease, and often enough to count as alive. Use it in a with-block.

    ``hold`` and ``drop`` say which work to keep.
    """

    def __init__(self, store: Store, info: WorkerInfo, lease_s: float) -> None:
        self._store, self._info, self._every_s = store, info, min(lease_s, SILENT_AFTER.total_seconds()) / 3
        self._held: set[int] = set()
        self._doing = ""
        self._seen = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def alive(self, doing: str | None = None) -> None:
        """Say that the worker makes progress, and what it does now."""
        self._seen = time.monotonic()
        if doing is not None:
            self._doing = doing

    def hold(self, claim_id: int) -> None:
        self._seen = time.monotonic()
        with self._lock:
            self._held.add(claim_id)

    def drop(self, claim_id: int) -> None:
        with self._lock:
            self._held.discard(claim_id)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            with self._lock:
                held = tuple(self._held)
            if held and time.monotonic() - self._seen > _STUCK_S:
                log.error("no progress for %.0f s; this worker lets its work go", _STUCK_S)
                continue
            try:
                if not self._store.fleet.beat(self._info.id, self._doing, held):
                    self._store.fleet.register(replace(self._info, heartbeat_at=datetime.now(UTC)))
            except FlashtuneError as e:
                log.warning("heartbeat failed: %s", e)
