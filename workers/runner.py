"""Tune a list of workloads on this machine, without a broker: the same steps that workers take.

One compile pool and one measuring child serve all studies in turn, and on a GPU the next studies
compile while this one is measured.

    with Runner(settings, store, device="auto") as runner:
        for outcome in runner.tune(workloads, StudySettings()):
            ...
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from db.store import Store
from db.study import StudyHandle
from tuner.compile import CompilePool
from tuner.errors import DefaultError, InputError
from tuner.sandbox import Sandbox
from tuner.spec import StudySettings
from tuner.study import Event, Study, spec_for
from tuner.target import Target, Toolchain, probe, toolchain
from tuner.trial import TunedConfig
from tuner.workload_file import NamedWorkload
from workers.settings import Settings

_PREFETCH_STUDIES = 2  # how many studies ahead are compiled for

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


class Runner:
    """The embedded tuner of one device. Use it in a with-block: it holds processes and a lock."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        *,
        device: str = "auto",
        policy: str = "auto",
        only: Sequence[str] = (),
        script: str = "",
    ) -> None:
        """Find the device.

        Raises:
            InputError: for a policy that the device does not have.
            TargetError: if the device does not exist.
        """
        self._settings, self._store, self._script = settings, store, script
        self._only = tuple(only)
        if script and device == "auto":
            device = "fake"
        elif device == "auto" and settings.visible_devices == "":
            device = "cpu"  # CUDA's own way to say that no GPU is to be used
        self.target: Target = probe(device)
        self.toolchain: Toolchain = toolchain()
        self.policy = _policy(policy, self.target)
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
        """Yield one outcome a workload, in order; answers from the database cost nothing.

        A workload whose default does not work here yields an error, and the next goes on.

        Raises:
            InputError: if a workload cannot be computed here by anything, before any is tuned.
        """
        specs = [spec_for(n.workload, self.target, self.toolchain, self.policy, self._only) for n in workloads]
        handles = [self._store.begin_study(spec, study_settings, force=force) for spec in specs]
        for handle in handles:
            if handle.done and study_settings.max_trials > int(handle.settings.get("max_trials", 0)):
                handle.reopen(study_settings)  # a larger budget than it had: go on from its trials
        studies: dict[int, Study] = {}
        for i, (named, handle) in enumerate(zip(workloads, handles, strict=True)):
            known = handle.tuned() if handle.done else None
            if known is not None:
                yield Outcome(named, handle.id, known, handle.stats(), from_database=True)
                continue
            self._ensure_children(study_settings)
            ahead = [j for j in range(i, len(handles)) if not handles[j].done][: 1 + _PREFETCH_STUDIES]
            for j in ahead:
                if j not in studies:
                    studies[j] = self._study(workloads[j], specs[j], handles[j], study_settings, say)
                    if j != i and self.target.is_gpu:
                        studies[j].prefetch()
            yield self._run(named, handle, studies.pop(i))

    def _run(self, named: NamedWorkload, handle: StudyHandle, study: Study) -> Outcome:
        assert self._pool is not None
        try:
            tuned = study.run()
        except DefaultError as e:
            return Outcome(named, handle.id, error=str(e))
        finally:
            self._pool.forget(named.workload)
        return Outcome(named, handle.id, tuned, handle.stats())

    def _study(
        self, named: NamedWorkload, spec: Any, handle: StudyHandle, study_settings: StudySettings, say: Say
    ) -> Study:
        assert self._pool is not None and self._sandbox is not None
        return Study(
            spec,
            study_settings,
            handle,
            self._pool,
            self._sandbox,
            incumbent=handle.incumbent(),
            say=lambda event: say(named, event),
        )

    def _ensure_children(self, study_settings: StudySettings) -> None:
        if self._pool is not None:
            return
        cache_dir = self._settings.cache_dir
        try:
            cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock_device(cache_dir, self.target)
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
            script=self._script,
            visible_devices=visible,
        )
        self._sandbox = Sandbox(
            self.target,
            cache_dir,
            run_timeout_s=study_settings.run_timeout_s,
            script=self._script,
            visible_devices=visible,
        )


def _policy(policy: str, target: Target) -> str:
    if policy == "auto":
        return "eager" if target.device == "cpu" else "graph"
    if policy == "graph" and target.device == "cpu":
        raise InputError("policy graph replays CUDA graphs, and the target is a CPU; use eager")
    if policy not in ("graph", "eager"):
        raise InputError(f"policy is {policy!r}; it must be auto, graph or eager")
    return policy


def _lock_device(folder: Path, target: Target) -> int | None:
    """Hold the device against another flashtune of this folder: two that measure at once measure each other."""
    if target.device == "fake":
        return None
    path = folder / f"device-{target.uuid or target.device}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode().strip()
        os.close(fd)
        raise InputError(
            f"process {holder} is measuring on {target.model}; wait for it, or use another device"
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, str(os.getpid()).encode())
    return fd
