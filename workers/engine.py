"""One worker: who it is, its heartbeat, and its compiling and measuring halves.

The same steps serve a Celery task, which takes them for some seconds, and ``flashtune up``, which
takes them until it is stopped.

    with Engine(settings, store, ("measure",), ring=ring) as engine:
        engine.work(for_s=20)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from db.store import Store
from tuner.errors import FlashtuneError, InputError
from tuner.target import named, probe, toolchain
from workers.artifacts import open_artifacts
from workers.compile_side import CompileSide
from workers.heart import Heart
from workers.identity import ROLES, identify, is_dead_here
from workers.measure_side import MeasureSide
from workers.settings import Settings

_LINGER_S = 2.0  # without anything to do before a slice ends: work may be ready the next moment
_IDLE_S = 0.1

log = logging.getLogger("flashtune.worker")


class Engine:
    """A registered worker with the halves that its roles name. Use it in a with-block."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        roles: Sequence[str],
        *,
        device: str = "auto",
        arch: str = "",
        ring: Callable[[str], None] = lambda queue: None,
    ) -> None:
        """``device`` is what it measures on; a worker that only compiles may name an ``arch`` instead.

        Raises:
            InputError: for an unknown role, a device that is not there, or one that another process uses.
        """
        unknown = [r for r in roles if r not in ROLES]
        if unknown or not roles:
            raise InputError(f"role {unknown[0] if unknown else ''!r} does not exist; give {', '.join(ROLES)}")
        if settings.fake_script and device == "auto" and not arch:
            device = "fake"
        self.target = named(arch) if arch and "measure" not in roles else probe(device, settings.visible_devices)
        self.info = identify(roles, self.target, toolchain())
        self._settings, self._store, self._ring = settings, store, ring
        self._stack = ExitStack()

    def __enter__(self) -> Engine:
        with ExitStack() as stack:
            self._bury_the_dead()
            self._store.fleet.register(self.info)
            stack.callback(self._sign_off)
            self._heart = stack.enter_context(Heart(self._store, self.info, self._settings.lease_s))
            parts = (self._settings, self._store, self.info, self._heart)
            artifacts = open_artifacts(self._settings, self._store)
            begun = threading.Lock()  # one half's, so that a death is blamed on one piece of work
            self._compile = self._measure = None
            if "compile" in self.info.roles:
                self._compile = CompileSide(*parts, artifacts, self._ring, begun)
                stack.callback(self._compile.close)
            if "measure" in self.info.roles:
                self._measure = MeasureSide(*parts, artifacts, self._ring, begun)
                stack.callback(self._measure.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def work(self, for_s: float, stop: Callable[[], bool] = lambda: False) -> int:
        """Take steps for some seconds, or until nothing has been there for a while; return how many.

        What was claimed and not begun is given back at the end.
        """
        steps, start = 0, time.monotonic()
        last = start
        try:
            while not stop() and time.monotonic() - start < for_s and time.monotonic() - last < _LINGER_S:
                if self._step():
                    steps, last = steps + 1, time.monotonic()
                else:
                    time.sleep(_IDLE_S)
        finally:
            self._give_back()
        return steps

    def run(self, stop: threading.Event) -> None:
        """Take steps until ``stop`` is set; a device that compiling would not disturb does both at once."""
        halves: list[Callable[[], bool]] = [half.step for half in (self._compile, self._measure) if half is not None]
        if len(halves) == 2 and not self.target.overlaps:
            halves = [self._step]
        threads = [threading.Thread(target=self._loop, args=(half, stop), daemon=True) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._give_back()

    def _step(self) -> bool:
        """Compile all there is, then measure: a CPU that compiles is no place to measure."""
        did = self._compile is not None and self._compile.step()
        if self._compile is not None and self._compile.busy:
            self._compile.wait(0.2)
            if not self.target.overlaps or self._measure is None:
                return True
        return (self._measure is not None and self._measure.step()) or did

    def _loop(self, step: Callable[[], bool], stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                if not step():
                    stop.wait(_IDLE_S)
            except FlashtuneError as e:  # the database has been away for long: go on when it is back
                log.error("%s", e)
                stop.wait(5.0)
            except Exception:
                log.exception("a fault of flashtune itself; the work at hand will be taken back and done again")
                stop.wait(5.0)

    def _give_back(self) -> None:
        for half in (self._compile, self._measure):
            if half is not None:
                half.give_back()

    def _bury_the_dead(self) -> None:
        """Take back at once what a killed predecessor on this machine held, instead of waiting for its lease."""
        for worker in self._store.fleet.workers(alive_only=True):
            if is_dead_here(worker):
                self._store.fleet.bury(worker.id)
                for lost in self._store.work.reap(worker.id):
                    log.warning("took back %s of a dead worker", lost.config.label if lost.config else lost.kind)

    def _sign_off(self) -> None:
        try:
            self._store.fleet.stop(self.info.id)
        except FlashtuneError as e:
            log.warning("could not sign off: %s", e)
