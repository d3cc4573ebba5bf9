"""FlexAttention's C++ backend: the family that runs everywhere. Its BlockMask size is the tunable."""

from __future__ import annotations

from typing import Any

from tuner.config import Config
from tuner.families.base import Built, Kernel, Room, Space
from tuner.target import Target
from tuner.workload import Workload


class FlexCpu:
    """FlexAttention on a CPU: q_block and kv_block of the BlockMask, which are its tiles."""

    name = "flex_cpu"
    version = 1
    compile_in = "cpu"
    lab = "tuner.lab_torch:TorchLab"

    def refuses(self, workload: Workload, target: Target) -> str:
        if target.device != "cpu":
            return f"needs a CPU, the target is {target.arch}"
        if workload.op != "fwd":
            return f"computes fwd, not {workload.op}: FlexAttention has no backward on a CPU"
        if workload.layout != "dense":
            return f"has no {workload.layout} layout"
        return ""

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        if not workload.pattern.masks:
            return {}  # without a mask there is no BlockMask, and the tiles are not ours to set
        sizes = (16, 32, 64, 128, 256, 512)
        return {"q_block": sizes, "kv_block": sizes}

    def first(self, workload: Workload) -> tuple[Config, ...]:
        # What won on two cores for a window of 256 (2026-12-01), and the default's neighbours
        return tuple(
            Config.make(self.name, self.version, q_block=q, kv_block=kv)
            for q, kv in ((32, 32), (64, 64), (32, 64), (64, 32))
            if workload.pattern.masks
        )

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        if config.is_stock:
            return ""
        for name, seqlen in (("q_block", workload.seqlen_q), ("kv_block", workload.seqlen_k)):
            if int(config[name]) > seqlen:
                return f"{name} {config[name]} is longer than the sequence of {seqlen}"
        return ""

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        return {"block_size": list(_block(config))} if workload.pattern.masks else {}

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        from tuner.lab_torch import first_call

        first_call(self.build(config, workload, room), workload, "cpu")
        return Built()

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        from tuner.families import flex

        return flex.build(workload, "cpu", _block(config))


FAMILY = FlexCpu()


def _block(config: Config) -> tuple[int, int]:
    if config.is_stock:
        return 128, 128
    return int(config["q_block"]), int(config["kv_block"])
