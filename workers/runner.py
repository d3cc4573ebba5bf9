"""Tune a list of workloads on this machine, without a broker: the same steps that workers take.

One compile pool and one measuring child serve all studies. On a GPU several studies are under way
at once, so that the device measures one while the others compile.

    with Runner(settings, store, Place.find(settings)) as runner:
        for outcome in runner.tune(workloads, StudySettings()):
            ...
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import Any

from db.store import Store
from db.study import StudyHandle
from tuner.compile import CompilePool
from tuner.errors import DefaultError, InputError
from tuner.sandbox import Sandbox
from tuner.spec import StudySettings, StudySpec, policy_for
from tuner.study import Event, Study, spec_for
from tuner.target import Target, Toolchain, probe, toolchain
from tuner.trial import TunedConfig
from tuner.utilization import Utilization
from tuner.workload_file import NamedWorkload
from workers.device_lock import lock_device
from workers.settings import Settings

_ACTIVE_STUDIES = 4  # on a GPU, at once: enough to measure while others compile
_WAIT_S = 1.0

Say = Callable[[NamedWorkload, Event], None]


@dataclass(frozen=True)
class Outcome:
    """What one workload came to: a TunedConfig, measured now or known, or an error."""

    named: NamedWorkload
    study_id: str = ""
    tuned: TunedConfig | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)
    from_database: bool = False
    error: str = ""


@dataclass(frozen=True)
class Place:
    """Where and how to tune: the device found, its toolchain, the policy, and which families compete."""

    target: Target
    toolchain: Toolchain
    policy: str
    only: tuple[str, ...] = ()  # families; empty means all
    script: str = ""  # the fake family's

    @classmethod
    def find(
        cls,
        settings: Settings,
        *,
        device: str = "auto",
        policy: str = "auto",
        only: Sequence[str] = (),
        script: str = "",
    ) -> Place:
        """Find the device.

        Raises:
            InputError: for a policy that the device does not have.
            TargetError: if the device does not exist.
        """
        target = probe("fake" if script and device == "auto" else device, settings.visible_devices)
        return cls(target, toolchain(), policy_for(policy, target), tuple(only), script)

    def spec(self, named: NamedWorkload) -> StudySpec:
        """Return the study of a workload here, by its own policy if it has one.

        Raises:
            InputError: if nothing here computes it, or the device does not have its policy.
        """
        policy = policy_for(named.policy, self.target) if named.policy else self.policy
        return spec_for(named.workload, self.target, self.toolchain, policy, self.only)


class Runner:
    """The embedded tuner of one device. Use it in a with-block: it holds processes and a lock."""

    def __init__(self, settings: Settings, store: Store, place: Place) -> None:
        self._settings, self._store, self._place = settings, store, place
        self.target = place.target
        self.trials = 0  # measured by this runner, with the time it took and the device's share of it
        self.wall_s = self.busy_s = 0.0
        self.gpu_utilization: float | None = None
        self._lock: int | None = None
        self._pool: CompilePool | None = None
        self._sandbox: Sandbox | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the children and let the device go."""
        if self._pool:
            self._pool.close()
        if self._sandbox:
            self._sandbox.close()
        if self._lock is not None:
            os.close(self._lock)  # closing lets the flock go
        self._pool = self._sandbox = self._lock = None

    def tune(
        self,
        workloads: Sequence[NamedWorkload],
        study_settings: StudySettings,
        *,
        force: bool = False,
        say: Say = lambda named, event: None,
    ) -> Iterator[Outcome]:
        """Yield one outcome a workload, as they come; answers from the database come first.

        A workload whose default does not work here yields an error, and the next goes on.

        Raises:
            InputError: if a workload cannot be computed here by anything, before any is tuned.
        """
        specs = [self._place.spec(n) for n in workloads]
        handles = [self._store.begin_study(spec, study_settings, force=force) for spec in specs]
        todo: list[_Todo] = []
        for named, spec, handle in zip(workloads, specs, handles, strict=True):
            if handle.done and study_settings.asks_more_than(handle.settings):
                handle.reopen(study_settings)  # a larger budget than it had: go on from its trials
            known = handle.tuned() if handle.done else None
            if known is not None:
                yield Outcome(named, handle.id, known, handle.stats(), from_database=True)
            else:
                todo.append(_Todo(named, spec, handle))
        if todo:
            self.children(study_settings)
            start, busy = time.monotonic(), self._sandbox_busy_s()
            with Utilization(self.target) as utilization:
                for outcome in self._measure(todo, study_settings, say):
                    self.trials += int(outcome.stats.get("trials_new", 0))
                    yield outcome
            self.wall_s = time.monotonic() - start
            self.busy_s = self._sandbox_busy_s() - busy
            self.gpu_utilization = utilization.share

    def _measure(self, todo: list[_Todo], study_settings: StudySettings, say: Say) -> Iterator[Outcome]:
        """Run several studies at once on the one device: while one compiles, another measures."""
        assert self._sandbox is not None
        waiting, active = deque(todo), deque[tuple[_Todo, Study]]()
        try:
            while waiting or active:
                while len(active) < (_ACTIVE_STUDIES if self.target.overlaps else 1):
                    job = _next(waiting, [job for job, _ in active])
                    if job is None:
                        break
                    waiting.remove(job)
                    study = self._study(job, study_settings, say)
                    active.append((job, study))
                    study.begin()
                ready = next((pair for pair in active if pair[1].ready), None)
                if ready is None:
                    if not (self.target.overlaps and any(study.refine() for _, study in active)):
                        futures = [f for _, study in active for f in study.waiting]
                        wait(futures, timeout=_WAIT_S, return_when=FIRST_COMPLETED)
                    continue
                job, study = ready
                outcome = _step(job, study)
                if outcome is not None:
                    active.remove(ready)
                    study.close()
                    yield outcome
        finally:
            if active:  # something was raised: the child may be amid a request that nobody waits for any more
                self._sandbox.close()
            for _, study in active:
                study.close()

    def _sandbox_busy_s(self) -> float:
        return self._sandbox.busy_s if self._sandbox else 0.0

    def _study(self, job: _Todo, study_settings: StudySettings, say: Say) -> Study:
        assert self._pool is not None and self._sandbox is not None
        return Study(
            job.spec,
            study_settings,
            job.handle,
            self._pool,
            self._sandbox,
            incumbent=job.handle.incumbent(),
            priors=self._store.neighbours(job.spec),
            lookahead=max(4, 2 * self._pool.workers // _ACTIVE_STUDIES)
            if self.target.overlaps
            else 2 * self._pool.workers,
            say=lambda event: say(job.named, event),
        )

    def children(self, study_settings: StudySettings) -> tuple[CompilePool, Sandbox]:
        """Return the compile pool and the measuring child, started when first asked for.

        Raises:
            InputError: if the cache folder cannot be used, or another process measures on the device.
        """
        if self._pool is not None and self._sandbox is not None:
            return self._pool, self._sandbox
        cache_dir = self._settings.cache_dir
        try:
            cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = lock_device(cache_dir, self.target)
        except OSError as e:
            raise InputError(
                f"cannot use the folder {cache_dir}: {e.strerror}; set FLASHTUNE_CACHE_DIR to another"
            ) from e
        visible = self.target.uuid or (str(self.target.device_index) if self.target.is_gpu else "")
        self._pool = CompilePool(
            self.target,
            cache_dir,
            workers=self._settings.compile_workers,
            memory_bytes=study_settings.compile_memory_bytes,
            script=self._place.script,
            visible_devices=visible,
        )
        self._sandbox = Sandbox(
            self.target,
            cache_dir,
            run_timeout_s=study_settings.run_timeout_s,
            script=self._place.script,
            visible_devices=visible,
        )
        self._sandbox.start()
        return self._pool, self._sandbox


@dataclass(frozen=True)
class _Todo:
    """A workload that the database has no answer for yet."""

    named: NamedWorkload
    spec: StudySpec
    handle: StudyHandle


def _next(waiting: deque[_Todo], active: Sequence[_Todo]) -> _Todo | None:
    """Return the first that may begin: two policies of one workload would drop each other's compiles."""
    busy = {job.spec.workload.key for job in active}
    return next((job for job in waiting if job.spec.workload.key not in busy), None)


def _step(job: _Todo, study: Study) -> Outcome | None:
    """Take one step; return the outcome if it was the last."""
    try:
        study.step()
    except DefaultError as e:
        return Outcome(job.named, job.handle.id, error=str(e))
    if study.tuned is None:
        return None
    return Outcome(job.named, job.handle.id, study.tuned, job.handle.stats())
