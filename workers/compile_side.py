"""The compiling half of a worker: claims configs, compiles them in children, hands the objects on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from db.store import Store
from db.values import Claim, WorkerInfo
from tuner.compile import Compiled, CompilePool
from tuner.errors import FlashtuneError, MachineError, StaleClaim
from tuner.target import Target
from tuner.trial import TrialStatus
from workers.artifacts import Artifacts
from workers.heart import Heart
from workers.identity import arch_of
from workers.patience import patiently
from workers.settings import Settings
from workers.studies import KnownStudy, Studies

log = logging.getLogger("flashtune.worker")


@dataclass(frozen=True)
class _Held:
    claim: Claim
    study: KnownStudy


class CompileSide:
    """Compiles for one architecture. ``step`` until it returns False; then there is nothing to do now.

    Work that was lost with a worker before is compiled alone, so that if it kills this one too, nothing
    else is blamed.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        info: WorkerInfo,
        heart: Heart,
        artifacts: Artifacts,
        ring: Callable[[str], None],
    ) -> None:
        self._settings, self._store, self._info = settings, store, info
        self._heart, self._artifacts, self._ring = heart, artifacts, ring
        self._script = settings.fake_script.read_text() if settings.fake_script else ""
        self._studies = Studies(store)
        self._pools: dict[tuple[str, int], CompilePool] = {}
        self._running: dict[Future[Compiled], _Held] = {}
        self._suspects: list[_Held] = []

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def step(self) -> bool:
        """Hand on what is compiled, and claim more. False if neither was possible."""
        done = [f for f in self._running if f.done()]
        for future in done:
            self._finish(self._running.pop(future), future)
        return bool(self._fill()) or bool(done)

    def wait(self, timeout_s: float) -> None:
        """Wait until something is compiled."""
        wait(list(self._running), timeout=timeout_s, return_when=FIRST_COMPLETED)

    def give_back(self) -> None:
        """Return what was not begun; what compiles now is waited for by nobody, and stays in the cache."""
        for held in [*self._running.values(), *self._suspects]:
            self._heart.drop(held.claim.id)
            try:
                self._store.work.give_back(held.claim)
            except FlashtuneError as e:
                log.warning("%s", e)
        self._running.clear()
        self._suspects.clear()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _fill(self) -> int:
        if self._suspects:
            return self._run_suspect()
        free = 2 * self._settings.compile_workers - len(self._running)
        if free <= self._settings.compile_workers // 2:
            return 0
        claims = patiently(
            lambda: self._store.work.claim(self._info.id, stage="compile", keys=[self._info.compile_key], limit=free)
        )
        for claim in claims:
            self._heart.hold(claim.id)
            held = _Held(claim, self._studies.get(claim.study_id))
            if claim.attempts > 1:
                self._suspects.append(held)
            else:
                self._submit(held)
        self._heart.alive(f"compiling {len(self._running)} configs")
        return len(claims)

    def _run_suspect(self) -> int:
        if self._running:
            return 0
        held = self._suspects.pop()
        try:
            patiently(lambda: self._store.work.begin(held.claim))
        except StaleClaim as e:
            log.warning("%s", e)
            self._heart.drop(held.claim.id)
            return 1
        self._submit(held)
        return 1

    def _submit(self, held: _Held) -> None:
        assert held.claim.config is not None
        spec, limits = held.study.spec, held.study.settings
        pool = self._pool_for(spec.target, limits.compile_memory_bytes)
        future = pool.submit(
            held.claim.config, spec.workload, timeout_s=limits.compile_timeout_s, priority=held.claim.attempts
        )
        if future in self._running:  # the same config for another study: its turn comes again
            patiently(lambda: self._store.work.give_back(held.claim))
            self._heart.drop(held.claim.id)
            return
        self._running[future] = held

    def _finish(self, held: _Held, future: Future[Compiled]) -> None:
        claim, spec = held.claim, held.study.spec
        assert claim.config is not None
        self._pool_for(spec.target, held.study.settings.compile_memory_bytes).drop(claim.config, spec.workload)
        self._heart.alive()
        try:
            compiled = future.result()
            if compiled.status is TrialStatus.OK:
                published = patiently(lambda: self._artifacts.publish(self._settings.cache_dir, compiled.files))
            else:
                published = ()
            patiently(lambda: self._store.work.commit_compiled(claim, compiled, published))
            self._ring(f"measure.{arch_of(held.study.spec.target.arch)}")
        except StaleClaim as e:
            log.warning("%s", e)
        except MachineError as e:
            log.warning("compiling %s: %s", claim.config.label, e)
            self._release(claim, str(e))
        finally:
            self._heart.drop(claim.id)

    def _release(self, claim: Claim, error: str) -> None:
        try:
            patiently(lambda: self._store.work.release(claim, error))
        except StaleClaim as e:
            log.warning("%s", e)

    def _pool_for(self, target: Target, memory_bytes: int) -> CompilePool:
        """Return the pool for a target; GPUs of one architecture differ in what is pinned for them."""
        what = (target.arch, target.num_sms)
        if what not in self._pools:
            self._pools[what] = CompilePool(
                target,
                self._settings.cache_dir,
                workers=self._settings.compile_workers,
                memory_bytes=memory_bytes,
                script=self._script,
            )
        return self._pools[what]
