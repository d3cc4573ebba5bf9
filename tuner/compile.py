"""Compile many configs at once in supervised children, off the GPU's path.

``CompilePool`` holds as many children as asked; each compiles one config at a time and sees no
GPU. A child that aborts, hangs or eats memory takes only its own config with it. Rivals that can
only compile where a GPU is (FlexAttention) have a lane of their own.

    pool = CompilePool(target, cache_dir, workers=15)
    done = pool.submit(config, workload).result()
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.children import KILLS, Child, ChildFailure
from tuner.config import Config
from tuner.errors import MachineError
from tuner.families import load
from tuner.target import Target
from tuner.trial import Resources, TrialStatus
from tuner.workload import Workload

_RECYCLE_AFTER = 60  # configs; a child's memory grows with every kernel it compiled
_FAILURE_STATUS = {
    "crash": TrialStatus.COMPILE_CRASH,
    "killed": TrialStatus.COMPILE_CRASH,
    "memory": TrialStatus.COMPILE_CRASH,
    "timeout": TrialStatus.COMPILE_TIMEOUT,
}


@dataclass(frozen=True)
class Compiled:
    """What compiling one config gave; ``status`` is OK or one of the compile statuses.

    ``files`` are the objects that the config needs, as POSIX paths relative to the cache folder.
    """

    status: TrialStatus
    seconds: float = 0.0
    error: str = ""
    resources: Resources = field(default_factory=Resources)
    files: tuple[str, ...] = ()


@dataclass(order=True)
class _Job:
    priority: int
    number: int
    config: Config = field(compare=False)
    workload: Workload = field(compare=False)
    timeout_s: float = field(compare=False)
    future: Future[Compiled] = field(compare=False)


def child_env(target: Target, cache_dir: Path, visible_devices: str) -> dict[str, str]:
    """Return the environment that pins what is compiled for, and where compiled objects lie."""
    env = {
        "CUDA_VISIBLE_DEVICES": visible_devices,
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache_dir / "fa4" / "shipped"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / "inductor"),
        "TRITON_CACHE_DIR": str(cache_dir / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if target.is_gpu:
        env |= {
            "FLASH_ATTENTION_ARCH": target.arch.rstrip("a"),
            "CUTE_DSL_ARCH": target.arch,
            "FLASH_ATTENTION_NUM_SMS": str(target.num_sms),
        }
    return env


class CompilePool:
    """Children that compile, fed by priority. Close it, or use it in a with-block."""

    def __init__(
        self,
        target: Target,
        cache_dir: Path,
        *,
        workers: int,
        memory_bytes: int = 8 << 30,
        script: str = "",
        visible_devices: str = "",
    ) -> None:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        cache_dir.chmod(0o700)  # what lies here is loaded as native code
        self._target, self._cache_dir, self._script = target, cache_dir, script
        self._memory_bytes = memory_bytes
        self.workers = workers
        self._numbers = itertools.count()
        self._futures: dict[tuple[str, str], Future[Compiled]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._lanes: dict[str, queue.PriorityQueue[_Job]] = {
            "cpu": queue.PriorityQueue(),
            "device": queue.PriorityQueue(),
        }
        self._threads: list[threading.Thread] = []
        self._children: list[Child] = []
        for i in range(workers):
            self._start_lane("cpu", i, "")
        if target.is_gpu:
            self._start_lane("device", 0, visible_devices)

    def submit(
        self, config: Config, workload: Workload, *, timeout_s: float = 180.0, priority: int = 0
    ) -> Future[Compiled]:
        """Ask for one config; the same config asked for twice is compiled once. Lower priority goes first."""
        family = load(config.family)
        if family.compile_in == "nowhere" or (family.compile_in == "device" and not self._target.is_gpu):
            done: Future[Compiled] = Future()
            done.set_result(Compiled(TrialStatus.OK))
            return done
        with self._lock:
            key = (config.key, workload.key)
            future = self._futures.get(key)
            if future is None or future.cancelled():
                future = self._futures[key] = Future()
                job = _Job(priority, next(self._numbers), config, workload, timeout_s, future)
                self._lanes[family.compile_in].put(job)
            return future

    def drop(self, config: Config, workload: Workload) -> None:
        """Forget the outcome of one config; asked for again, it is compiled again."""
        with self._lock:
            self._futures.pop((config.key, workload.key), None)

    def forget(self, workload: Workload) -> None:
        """Drop what is queued or kept for a workload that nobody asks about any more."""
        with self._lock:
            for key in [k for k in self._futures if k[1] == workload.key]:
                self._futures.pop(key).cancel()

    def close(self) -> None:
        """Kill the children and cancel what is queued."""
        self._closing = True
        with self._lock:
            for future in self._futures.values():
                future.cancel()
        for child in self._children:
            child.kill()
        stop = _Job(-(1 << 30), -1, Config("", 0), _NO_WORKLOAD, 0, Future())
        for lane, threads in itertools.groupby(self._threads, key=lambda t: t.name.split("-")[1]):
            for _ in threads:
                self._lanes[lane].put(stop)
        for thread in self._threads:
            thread.join(timeout=10)
        for child in self._children:
            child.kill()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_lane(self, lane: str, number: int, visible_devices: str) -> None:
        log = self._cache_dir / "logs" / f"compile-{lane}-{number}.log"
        child = Child("_compile_child.py", child_env(self._target, self._cache_dir, visible_devices), log)
        thread = threading.Thread(target=self._work, args=(lane, child), name=f"compile-{lane}-{number}", daemon=True)
        self._children.append(child)
        self._threads.append(thread)
        thread.start()

    def _work(self, lane: str, child: Child) -> None:
        served = 0
        while not self._closing:
            job = self._lanes[lane].get()
            if self._closing or job.number < 0:
                break
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                job.future.set_result(self._compile(child, job))
            except BaseException as e:
                job.future.set_exception(e)
            served += 1
            if served % _RECYCLE_AFTER == 0:
                child.kill()
        child.kill()

    def _compile(self, child: Child, job: _Job) -> Compiled:
        request: Mapping[str, Any] = {
            "config": job.config.to_dict(),
            "workload": job.workload.to_dict(),
            "target": self._target.to_dict(),
            "cache_dir": str(self._cache_dir),
            "script": self._script,
        }
        for kill in range(1, KILLS + 1):
            try:
                answer = child.request(request, timeout_s=job.timeout_s, memory_bytes=self._memory_bytes)
                break
            except ChildFailure as e:
                if self._closing:
                    raise MachineError("compiling was stopped") from None
                if e.kind != "killed" or kill == KILLS:
                    return Compiled(_FAILURE_STATUS[e.kind], job.timeout_s if e.kind == "timeout" else 0.0, str(e))
        if not answer["ok"]:
            return Compiled(TrialStatus.COMPILE_ERROR, answer["seconds"], answer["error"])
        resources, files = Resources(**answer["resources"]), tuple(answer["files"])
        return Compiled(TrialStatus.OK, answer["seconds"], "", resources, files)


_NO_WORKLOAD = Workload(batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_k=1, head_dim=8)
