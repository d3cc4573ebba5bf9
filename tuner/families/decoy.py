"""The stock kernel under other names, with planted slowdowns: does the tuner tell the truth?

An instrument for honesty checks on a real GPU. Every variant is FA4's stock forward followed by a
spinning kernel; the script gives each a share of the stock kernel's time to spin:

    {"slower": {"stock": 0.03, "default": 0.03, "7": 0.0}, "breaks": {"4": "assert"}}

``stock`` is the default config, ``default`` every variant not named. All zero: nothing to find.
``breaks`` makes a variant fail for real: ``assert`` (a device-side assertion, which loses the CUDA
context), ``hang`` (spins for hours), ``nan``, ``wrong`` (one query row of a batch entry scaled) or ``unwritten``.

``decoy_bwd`` is a CPU's stock backward likewise, alone or behind its forward, with defects and no slowdowns:
``wrong_dk`` (one key's dk halved), ``nan`` (one row of dv), ``swapped`` (dk and dv), ``unwritten``, ``unrepeatable``
(a few last bits of dq), and behind a forward ``wrong`` (one query's output half as large again).
"""

from __future__ import annotations

import json
from typing import Any

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.base import Built, Kernel, Room, Space
from tuner.families.fa4_fwd_sm90 import FAMILY as FA4
from tuner.families.sdpa import CPU as SDPA
from tuner.target import Target
from tuner.workload import Workload

_BASE_SPIN_US = 2.0  # everyone spins this much, so that all launch the same kernels
_VARIANTS = 12
_SHARE_CHANGED = 0.01  # of dq, by its last bit
_FORWARD = ("assert", "hang", "nan", "wrong", "unwritten")
_BACKWARD = ("wrong_dk", "nan", "swapped", "unwritten", "unrepeatable", "wrong")


class _Variants:
    """What the instruments have in common: variants that differ in name alone."""

    name: str
    version = 1
    lab = "tuner.lab_torch:TorchLab"

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        return {"variant": tuple(range(_VARIANTS))}

    def first(self, workload: Workload) -> tuple[Config, ...]:
        return ()

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        return ""

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        return {}


class Decoy(_Variants):
    """FA4's stock forward, times a planted factor."""

    name = "decoy"
    compile_in = "cpu"

    def refuses(self, workload: Workload, target: Target) -> str:
        return FA4.refuses(workload, target)

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        return FA4.compile(FA4.stock(workload), workload, room)

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        import torch

        kernel = FA4.build(FA4.stock(workload), workload, room)
        script = json.loads(room.script or "{}")
        slower = script.get("slower", {})
        name = "stock" if config.is_stock else str(config["variant"])
        if how := _defect(script, name, _FORWARD):
            return _broken(kernel, how)
        share = float(slower.get(name, slower.get("default", 0.0) if name != "stock" else 0.0))
        cycles = _spin_cycles(kernel, workload, share)

        def run(inputs: Any) -> torch.Tensor:
            out: torch.Tensor = kernel(inputs)
            torch.cuda._sleep(cycles)
            return out

        return run


class DecoyBackward(_Variants):
    """SDPA's backward on a CPU, times a planted defect."""

    name = "decoy_bwd"
    compile_in = "nowhere"

    def refuses(self, workload: Workload, target: Target) -> str:
        return "computes bwd and fwd+bwd, not fwd" if workload.op == "fwd" else SDPA.refuses(workload, target)

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        return Built()

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        kernel = SDPA.build(SDPA.stock(workload), workload, room)
        how = _defect(json.loads(room.script or "{}"), str(config.get("variant", "stock")), _BACKWARD)
        return _broken_backward(kernel, how) if how else kernel


FAMILY = Decoy()
BACKWARD = DecoyBackward()


def _defect(script: dict[str, Any], name: str, known: tuple[str, ...]) -> str:
    """Return how a variant is to be broken; empty if it is not. Raises ConfigError for what is no defect here."""
    breaks = script.get("breaks", {})
    unknown = [how for how in breaks.values() if how not in known]
    if unknown:
        raise ConfigError(f"the script breaks a variant by {unknown[0]!r}; write one of {', '.join(known)}")
    return str(breaks.get(name, ""))


def _broken(kernel: Kernel, how: str) -> Kernel:
    """Return the kernel with a real defect."""
    import torch

    def run(inputs: Any) -> torch.Tensor:
        if how == "unwritten":
            unwritten: torch.Tensor = inputs.out
            return unwritten
        out: torch.Tensor = kernel(inputs)
        if how == "assert":
            out.view(-1)[torch.tensor([1 << 40], device="cuda")] = 0
        elif how == "hang":
            for _ in range(10_000):
                torch.cuda._sleep(1 << 40)
        elif how == "nan":
            out[..., -1, 0, 0] = float("nan")
        elif how == "wrong":
            out[..., out.shape[-3] // 2, 0, :] *= 1.5
        return out

    return run


def _broken_backward(kernel: Kernel, how: str) -> Kernel:
    """Return a backward with a real defect."""
    import torch

    def run(inputs: Any) -> tuple[torch.Tensor, ...]:
        *before, dq, dk, dv = kernel(inputs)
        if how == "unwritten":
            dv = inputs.dv
        elif how == "swapped":
            dk, dv = dv, dk
        elif how == "wrong_dk":
            dk[..., dk.shape[-3] // 2, 0, :] *= 0.5
        elif how == "nan":
            dv[..., -1, 0, 0] = float("nan")
        elif how == "unrepeatable":
            ulp = 1 + torch.finfo(dq.dtype).eps
            dq = torch.where(torch.rand(dq.shape) < _SHARE_CHANGED, dq * ulp, dq)
        elif how == "wrong":
            before[0][0, before[0].shape[1] // 2] *= 1.5
        return *before, dq, dk, dv

    return run


_stock_us: dict[str, float] = {}
_cycles_per_us: list[float] = []


def _spin_cycles(kernel: Kernel, workload: Workload, share: float) -> int:
    """Return the clock cycles to spin: the base, and ``share`` of the kernel's time measured once here."""
    import torch

    from tuner.lab_torch import make_inputs
    from tuner.measure import timer

    if not _cycles_per_us:
        spin_us = timer(lambda inputs: torch.cuda._sleep(2_000_000), [None], "graph", "cuda")()
        _cycles_per_us.append(2_000_000 / spin_us)
    if workload.key not in _stock_us:
        sample = timer(kernel, [make_inputs(workload, "cuda", 0)], "graph", "cuda")
        _stock_us[workload.key] = sorted(sample() for _ in range(50))[25]
    return int(_cycles_per_us[0] * (_BASE_SPIN_US + share * _stock_us[workload.key]))
