"""FlashAttention-4's forward on Hopper: tiles, stages, register flags, native masks or a BlockMask.

Owns the tunables and their constraints. What tiles take is in ``fa4_tiles``, the call in ``fa4_launch``.

==================  ======================================================================
tunable             meaning (FA4's own names where it has one)
==================  ======================================================================
mask                ``native``: FA4's causal and window arguments; ``block``: a mask_mod with
                    a BlockMask, whose sizes follow the tiles
tile_m, tile_n      rows of Q and of K/V that one thread block works on
mma_pv_is_rs        keep P in registers for the second product instead of shared memory
intra_wg_overlap    overlap the next QK product with this softmax
num_stages          depth of the K/V pipeline (2 in FA4, a literal)
q_blocks            BlockMask's Q block in units of tile_m (``block`` only)
pack_gqa            fold the query heads of one K/V head into the rows of a tile
==================  ======================================================================
"""

from __future__ import annotations

from typing import Any

from tuner.config import Config
from tuner.families.base import Built, Kernel, Room, Space
from tuner.families.fa4_tiles import (
    ACCUMULATOR_REGISTERS,
    SMEM_LIMIT_BYTES,
    accumulator_registers,
    block_size,
    mask_refused,
    smem_bytes,
    uses_block_mask,
)
from tuner.target import Target
from tuner.workload import Workload

# Tiles to try first: FA4's own choices for its head dims, and the winners of an exhaustive sweep on
# an H200 (2026-12-01, head_dim 64 to 256): (tile_m, tile_n, mma_pv_is_rs, intra_wg_overlap).
_FIRST = (
    (128, 128, True, True),
    (192, 128, True, True),
    (192, 96, True, False),
    (128, 176, True, True),
    (128, 96, True, True),
    (128, 80, True, True),
)


class Fa4FwdSm90:
    """FA4 forward on sm_90a."""

    name = "fa4_fwd_sm90"
    version = 1
    compile_in = "cpu"
    lab = "tuner.lab_torch:TorchLab"

    def refuses(self, workload: Workload, target: Target) -> str:
        if target.arch != "sm_90a":
            return f"needs sm_90a, the target is {target.arch}"
        if workload.op != "fwd":
            return f"computes fwd, not {workload.op}"
        if workload.dtype not in ("bfloat16", "float16"):
            return f"computes bfloat16 and float16, not {workload.dtype}"
        if max(workload.head_dim, workload.head_dim_v) > 256:
            return f"head_dim goes to 256, not {max(workload.head_dim, workload.head_dim_v)}"
        return ""

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        masks = [m for m in ("native", "block") if not mask_refused(m, workload)]
        block = "block" in masks
        return {
            "mask": tuple(masks),
            "tile_m": (64, 128, 192),
            "tile_n": tuple(range(64, 257, 16)),
            "mma_pv_is_rs": (True, False),
            "intra_wg_overlap": (True, False),
            "num_stages": (1, 2, 3),
            "q_blocks": (1, 2) if block else (1,),
            "pack_gqa": (True, False) if workload.heads_q > workload.heads_kv else (False,),
        }

    def first(self, workload: Workload) -> tuple[Config, ...]:
        return tuple(
            Config.make(
                self.name,
                self.version,
                mask=mask,
                tile_m=tile_m,
                tile_n=tile_n,
                mma_pv_is_rs=rs,
                intra_wg_overlap=overlap,
                num_stages=2,
                q_blocks=1,
                pack_gqa=workload.heads_q > workload.heads_kv,
            )
            for mask in self.space(workload)["mask"]
            for tile_m, tile_n, rs, overlap in _FIRST
        )

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        if config.is_stock:
            return ""
        native = config["mask"] == "native"
        if reason := mask_refused(str(config["mask"]), workload):
            return reason
        if native and config["q_blocks"] != 1:
            return "q_blocks sizes a BlockMask, and mask=native has none"
        if config["pack_gqa"] and workload.heads_q == workload.heads_kv:
            return "pack_gqa needs more query heads than K/V heads"
        groups, tile_n = int(config["tile_m"]) // 64, int(config["tile_n"])
        registers = accumulator_registers(config, workload)
        if registers > ACCUMULATOR_REGISTERS[groups]:
            return (
                f"accumulators take {registers} registers a thread and {ACCUMULATOR_REGISTERS[groups]} fit "
                f"with {groups} MMA warp group(s): the kernel would spill"
            )
        if tile_n > 256 or tile_n % 16:
            return f"tile_n {tile_n} is not a multiple of 16 up to 256, the widths of a wgmma"
        smem = smem_bytes(config, workload)
        if smem > SMEM_LIMIT_BYTES:
            return f"takes {smem} bytes of shared memory and {SMEM_LIMIT_BYTES} exist: the launch would fail"
        return ""

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        if not uses_block_mask(config, workload):
            return {}
        return {"block_size": list(block_size(config))}

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        from tuner.families import fa4_launch

        return fa4_launch.compile_fwd(config, workload, room)

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        from tuner.families import fa4_launch

        return fa4_launch.build_fwd(config, workload, room)


FAMILY = Fa4FwdSm90()
