"""A family with scripted outcomes and a virtual clock, for tests and for honesty benchmarks.

Its children really abort, hang, fault and eat memory; only the time is made up. The script is JSON:

    {"base_us": 100, "seed": 1,
     "noise": {"sigma": 0.006, "ar": 0.5, "drift": 0.02, "outliers": 0.02},
     "outcomes": {"3": {"speedup": 1.03}, "5": {"does": "nan"}, "stock": {"speedup": 1.0}}}

``does`` is one of ok, compile_error, compile_abort, compile_hang, compile_memory, compile_kill_worker,
run_error, fault, hang, exit, nan, wrong, wrong_row, unwritten, unrepeatable, kill_worker; the two
that kill a worker kill the process that started the child, as what takes a machine down does. Noise
is lognormal: ``sigma`` a sample, ``ar`` its correlation from one sample to the next, ``drift`` the
amplitude of a slow wave that all configs share, ``outliers`` the share of samples that read 1.2 to 2
times slow. ``compile_s`` and ``sample_s`` really take that long; a kernel with ``faults_after`` faults
in its n-th sample and the later ones of one timer: beyond 15, that is in the finals. With
``"objects": true`` compiling leaves a file, without which there is nothing to build: as real code does
that must travel between machines.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.config import Config
from tuner.families.base import Built, Kernel, Room, Space
from tuner.lab import Timer
from tuner.target import Target
from tuner.trial import Resources
from tuner.workload import JOINT_OP, Workload

_ROWS, _COLUMNS = 64, 8
_DRIFT_PERIOD = 300  # samples


class Fake:
    """Variants 0, 1, ... that do what the script says; as many as the workload has query heads."""

    name = "fake"
    version = 1
    compile_in = "cpu"
    lab = "tuner.families.fake:FakeLab"

    def refuses(self, workload: Workload, target: Target) -> str:
        return "" if target.device == "fake" else f"runs on the target fake, not on {target.arch}"

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        return {"variant": tuple(range(workload.heads_q))}  # a test sets the size of the space here

    def first(self, workload: Workload) -> tuple[Config, ...]:
        return ()

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        if not config.is_stock and int(config["variant"]) % 1000 == 999:
            return "every thousandth variant is infeasible, by decree"
        return ""

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        return {}

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        outcome = _outcome(config, room)
        time.sleep(float(outcome.get("compile_s", 0)))
        match outcome.get("does", "ok"):
            case "compile_error":
                raise ValueError("unable to partition input (scripted)")
            case "compile_abort":
                os.abort()
            case "compile_hang":
                time.sleep(1e6)
            case "compile_memory":
                _eat_memory()
            case "compile_kill_worker":
                _kill_parent()
        resources = Resources(registers=168, spill_bytes=0, smem_bytes=1024, code_bytes=4096)
        return Built(resources, _write_object(config, workload, room) if _has_objects(room) else ())

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        if _outcome(config, room).get("does") == "run_error":
            raise RuntimeError("invalid argument at launch (scripted)")
        if _has_objects(room):
            _check_object(config, workload, room)
        return FakeKernel(config, _outcome(config, room), both=workload.op == JOINT_OP)


FAMILY = Fake()


@dataclass(frozen=True)
class FakeKernel:
    """A scripted kernel; calling it returns the inputs' output, right or not."""

    config: Config
    outcome: Mapping[str, Any]
    both: bool = False  # a forward with its backward, which take 2 and 5 of 7 parts of the time
    share: float = 1.0

    @property
    def parts(self) -> Mapping[str, FakeKernel]:
        shares = {"fwd": 2 / 7, "bwd": 5 / 7} if self.both else {}
        return {name: replace(self, both=False, share=share) for name, share in shares.items()}

    @property
    def does(self) -> str:
        return str(self.outcome.get("does", "ok"))

    def __call__(self, inputs: Any) -> Any:
        match self.does:
            case "fault":
                ctypes.string_at(0)  # SIGSEGV, as a kernel's host code can do
            case "hang":
                time.sleep(1e6)
            case "exit":
                os._exit(3)
            case "kill_worker":
                _kill_parent()
            case "unwritten":
                return inputs["out"]
        out = inputs["x"] * (1 + inputs["rounding"])
        if self.does == "nan":
            out[_ROWS // 2, 3] = math.nan
        elif self.does == "wrong":
            out = out * 1.05
        elif self.does == "wrong_row":
            out[_ROWS // 3] = -out[_ROWS // 3]
        elif self.does == "unrepeatable":
            out = out * (1 + 1e-6 * random.random())
        inputs["out"][:] = out
        return inputs["out"]


class FakeLab:
    """A device that exists only as a clock with noise."""

    def __init__(self, workload: Workload, room: Room, policy: str) -> None:
        self._workload, self._room = workload, room
        script = _script(room)
        self._base_us = float(script.get("base_us", 100.0))
        self._noise: dict[str, float] = script.get("noise", {})
        self._rng = random.Random(f"{script.get('seed', 0)}-{script.get('run', 0)}")
        self._state, self._count = 0.0, 0

    def draw(self, seed: int) -> Any:
        import numpy as np

        rng = np.random.default_rng(seed)
        x = rng.standard_normal((_ROWS, _COLUMNS))
        rounding = rng.uniform(-(2**-9), 2**-9, x.shape)  # what bfloat16 does to an output
        return {"x": x, "rounding": rounding, "out": np.full_like(x, math.nan)}

    def reference(self, inputs: Any) -> Any:
        return inputs["x"]

    def build(self, config: Config) -> Kernel:
        return FAMILY.build(config, self._workload, self._room)

    def run(self, kernel: Kernel, inputs: Any) -> Any:
        inputs["out"][:] = math.nan
        return kernel(inputs)

    def timer(self, kernel: Kernel) -> Timer:
        assert isinstance(kernel, FakeKernel)
        true_us = self._base_us * kernel.share / float(kernel.outcome.get("speedup", 1.0))
        sleep_s = float(kernel.outcome.get("sample_s", 0))
        left = int(kernel.outcome.get("faults_after", 1 << 60))

        def sample() -> float:
            nonlocal left
            left -= 1
            if left < 0:
                ctypes.string_at(0)
            time.sleep(sleep_s)
            return true_us * self._disturbance()

        return sample

    def conditions(self) -> Mapping[str, Any]:
        return {"throttled": False, "sm_mhz": None}

    def healthy(self) -> bool:
        return True

    def faults(self) -> list[str]:
        return []

    def _disturbance(self) -> float:
        n, rng = self._noise, self._rng
        ar, self._count = n.get("ar", 0.0), self._count + 1
        self._state = ar * self._state + rng.gauss(0, n.get("sigma", 0.0)) * math.sqrt(1 - ar * ar)
        drift = n.get("drift", 0.0) * math.sin(2 * math.pi * self._count / _DRIFT_PERIOD)
        outlier = rng.uniform(1.2, 2.0) if rng.random() < n.get("outliers", 0.0) else 1.0
        return math.exp(self._state + drift) * outlier


def _script(room: Room) -> dict[str, Any]:
    script: dict[str, Any] = json.loads(room.script or "{}")
    return script


def _outcome(config: Config, room: Room) -> dict[str, Any]:
    script = _script(room)
    name = "stock" if config.is_stock else str(config["variant"])
    outcome: dict[str, Any] = script.get("outcomes", {}).get(name, {})
    return outcome


def _has_objects(room: Room) -> bool:
    return bool(_script(room).get("objects", False))


def _object(config: Config, workload: Workload, room: Room) -> tuple[Path, bytes]:
    """Return where a config's object lies for a workload, and what is in it."""
    key = f"{config.key} {workload.key}"
    path = room.cache_dir / "fake" / f"{hashlib.sha256(key.encode()).hexdigest()}.o"
    return path, f"code of {key}\n".encode()


def _write_object(config: Config, workload: Workload, room: Room) -> tuple[Path]:
    path, content = _object(config, workload, room)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}.tmp")
    half.write_bytes(content)
    half.replace(path)
    return (path,)


def _check_object(config: Config, workload: Workload, room: Room) -> None:
    path, content = _object(config, workload, room)
    if not path.exists():
        raise RuntimeError(f"no compiled object {path}")
    if path.read_bytes() != content:
        raise RuntimeError(f"no compiled object {path}: it holds something else")


def _kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1e6)  # until we are killed with it: whoever is our parent then must not be next


def _eat_memory() -> None:
    """Take memory in steps that a supervisor can see, and stop at 4 GiB in case none does."""
    held = []
    for _ in range(64):
        held.append(b"\x01" * (64 << 20))
        time.sleep(0.02)
