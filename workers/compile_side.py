"""The compiling half of a worker: claims configs, compiles them in children, hands the objects on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from db.store import Store
from db.values import Claim, WorkerInfo
from db.work import DEATHS
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

_TURN_S = 1.0
_ALONE_FROM = DEATHS - 1

log = logging.getLogger("flashtune.worker")


@dataclass(frozen=True)
class _Held:
    claim: Claim
    study: KnownStudy


class CompileSide:
    """Compiles for one architecture. ``step`` until it returns False; then there is nothing to do now.

    When a worker dies, all that it compiled is under suspicion. What would be quarantined next time is
    compiled alone, so that nothing else is blamed for its doing, nor it for another's: ``begun`` is held meanwhile,
    and by the measuring half while that has begun something.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        info: WorkerInfo,
        heart: Heart,
        artifacts: Artifacts,
        ring: Callable[[str], None],
        begun: threading.Lock,
    ) -> None:
        self._settings, self._store, self._info, self._begun = settings, store, info, begun
        self._heart, self._artifacts, self._ring = heart, artifacts, ring
        self._script = settings.fake_script.read_text() if settings.fake_script else ""
        self._studies = Studies(store)
        self._pools: dict[tuple[str, int], CompilePool] = {}
        self._running: dict[Future[Compiled], _Held] = {}
        self._suspects: list[_Held] = []
        self._alone = False  # a suspect compiles

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def step(self) -> bool:
        """Hand on what is compiled, and claim more. False if neither was possible."""
        done = [f for f in self._running if f.done()]
        for future in done:
            self._finish(self._running.pop(future), future)
            self._leave_alone()
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
        self._leave_alone()

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
            lambda: self._store.work.claim(
                self._info.id,
                stage="compile",
                keys=[self._info.compile_key],
                limit=free,
                begin=True,
                alone_from=_ALONE_FROM,
            )
        )
        for claim in claims:
            self._heart.hold(claim.id)
            try:
                self._take(claim)
            except FlashtuneError as e:  # as a family that another version of flashtune knows
                log.warning("study %s: %s", claim.study_id, e)
                self._heart.drop(claim.id)
                self._release(claim, str(e))
            except BaseException:
                self._heart.drop(claim.id)  # or its lease would be kept for ever, and nobody would do it
                raise
        self._heart.alive(f"compiling {len(self._running)} configs")
        return len(claims)

    def _take(self, claim: Claim) -> None:
        held = _Held(claim, self._studies.get(claim.study_id))
        if claim.deaths >= _ALONE_FROM:
            self._suspects.append(held)
        else:
            self._submit(held)

    def _run_suspect(self) -> int:
        # waiting, since whoever measures lets go for a moment only
        if self._running or not self._begun.acquire(timeout=_TURN_S):
            return 0
        self._alone = True
        held = self._suspects.pop()
        try:
            patiently(lambda: self._store.work.begin(held.claim))
            self._submit(held)
        except FlashtuneError as e:  # stale, or the database has been away for long
            log.warning("%s", e)
            self._heart.drop(held.claim.id)
            self._leave_alone()
        return 1

    def _leave_alone(self) -> None:
        if self._alone:
            self._alone = False
            self._begun.release()

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
