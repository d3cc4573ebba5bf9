"""FlashAttention-4's backward on Blackwell: 2-CTA MMAs, the K/V tile, dQ's stages, and registers.

Owns the tunables and their constraints; the call is in ``fa4_sm100_bwd_launch``. Compiled and checked
without a GPU; nothing here was measured on a Blackwell yet.

==================  ======================================================================
tunable             meaning (FA4's own names where it has one)
==================  ======================================================================
mask                ``native``: FA4's causal and window arguments; ``block``: a mask_mod with
                    a BlockMask of partial and full lists; ``partial``: of partial lists only
two_cta             two thread blocks share each MMA and hold half of K and V each
tile_n              rows of K/V of one thread block; those of Q are 128
hd256_generic       head_dim 256 in the general kernel instead of in its two dedicated ones
dQ_reduce_ncol      columns of dQ that leave in one bulk add; 0: FA4's own number
num_regs            registers of a reducing and of a computing thread, as ``136-144``
q_blocks            BlockMask's Q block in units of 128 (not ``native``)
kv_blocks           BlockMask's K/V block in units of tile_n (not ``native``)
==================  ======================================================================

The stages of Q and dO are not among them: FA4's barriers and buffers are written for the numbers it has.
"""

from __future__ import annotations

import math
from typing import Any

from tuner.config import Config
from tuner.families import fa4_sm100_tiles as tiles
from tuner.families.base import Built, Kernel, Room, Space, backward_refused
from tuner.families.fa4_fwd_sm100 import cannot_on_sm100
from tuner.families.fa4_tiles import mask_refused, uses_block_mask
from tuner.target import Target
from tuner.workload import Workload

# What FA4 gives 2-CTA kernels, causal ones, dense ones, and one more that moves registers from loading.
_NUM_REGS = ("136-136", "136-144", "152-136", "144-144")

# dQ leaves through shared memory in pieces; these many float32 columns of it are in flight.
_DQ_COLUMNS_IN_FLIGHT = {True: 32, False: 64}  # by two_cta


class Fa4BwdSm100:
    """FA4 backward on sm_100a and sm_103a."""

    name = "fa4_bwd_sm100"
    version = 1
    compile_in = "cpu"
    lab = "tuner.lab_torch:TorchLab"

    def refuses(self, workload: Workload, target: Target) -> str:
        if workload.op != "bwd":
            return f"computes bwd, not {workload.op}"
        if reason := cannot_on_sm100(workload, target):
            return reason
        lists = bool(mask_refused("native", workload))
        if workload.head_dim == 256 and (lists or workload.pattern.scores):
            return f"FA4's backward for head_dim 256 takes neither a BlockMask nor a softcap: not {workload.pattern}"
        if workload.deterministic and lists:
            return f"is deterministic under {workload.pattern} only with an order of writes that is not built here yet"
        return backward_refused(workload)

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        masks = [m for m in ("native", "block", "partial") if not mask_refused(m, workload)]
        masks = [m for m in masks if m == "native" or not (workload.deterministic or workload.head_dim == 256)]
        blocks = (1, 2) if "block" in masks else (1,)
        d = workload.head_dim
        return {
            "mask": tuple(masks),
            "two_cta": (False,) if d < 128 else (True, False) if d == 128 else (True,),
            "tile_n": (128, 64) if d in (128, 256) else (128,),
            "hd256_generic": (False, True) if d == 256 else (False,),
            "dQ_reduce_ncol": (0, 8, 16, 32) if d <= 128 else (0,),
            "num_regs": _NUM_REGS,
            "q_blocks": blocks,
            "kv_blocks": blocks,
        }

    def first(self, workload: Workload) -> tuple[Config, ...]:
        space = self.space(workload)
        default = {name: values[0] for name, values in space.items()}
        return tuple(
            Config.make(self.name, self.version, **default | {"mask": mask, "num_regs": regs, "two_cta": two_cta})
            for mask in space["mask"]
            for two_cta in space["two_cta"]
            for regs in _NUM_REGS
        )

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        if config.is_stock:
            return ""
        return (
            mask_refused(str(config["mask"]), workload)
            or _tile_refused(config, workload)
            or (_lists_refused(config, workload) if config["mask"] != "native" else _sized_for_nothing(config))
            or _reduce_refused(config, workload)
        )

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        if not uses_block_mask(config, workload):
            return {}
        extras: dict[str, Any] = {"block_size": list(block_size(config, workload))}
        return extras if config.get("mask") != "partial" else {**extras, "full_blocks": False}

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        from tuner.families import fa4_sm100_bwd_launch

        return fa4_sm100_bwd_launch.compile_bwd(config, workload, room)

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        from tuner.families import fa4_sm100_bwd_launch

        return fa4_sm100_bwd_launch.build_bwd(config, workload, room)


FAMILY = Fa4BwdSm100()


def block_size(config: Config, workload: Workload) -> tuple[int, int]:
    """Return the (q, kv) block of the BlockMask.

    Stock gets what the forward takes; wider heads run in pairs of blocks, which one K/V block must hold.
    """
    if config.is_stock:
        return 2 * tiles.TILE_M, 128 if workload.head_dim <= 128 else 256
    return tiles.block_size(config)


def tmem_columns(config: Config, workload: Workload) -> int | None:
    """Count the columns of S, dP, dK and dV; None for the dedicated kernels, which are two.

    dQ takes the place of what was read by then. With 64 rows of K/V in each of two blocks, every lane holds
    half a row, so that all widths halve. Narrow heads have columns left for P and dS beside S and dP.
    """
    d, dv = (tiles.padded(x, 32) for x in (workload.head_dim, workload.head_dim_v))
    if d == 256 and not config["hd256_generic"]:
        return None
    if d > 128:
        return tiles.TMEM_COLUMNS  # dP and dQ are put at the very end
    halves = 2 if config["two_cta"] and config["tile_n"] == 64 else 1
    apart = tiles.TILE_M if (d, dv) == (64, 64) else 0
    return (2 * tiles.TILE_M + d + dv) // halves + apart


def smem_bytes(config: Config, workload: Workload) -> int | None:
    """Shared memory of one block: two Q, K, V, dO and dS, and dQ's pieces; None for 2-CTA kernels, which alias more.

    Grouped heads add up dK and dV in float32, which leave through the room of Q and dO in 32 columns at a time,
    two warp groups side by side. Statistics, barriers and alignment take 3 KiB.
    """
    if config["two_cta"]:
        return None
    d, dv = (tiles.padded(x, 32) for x in (workload.head_dim, workload.head_dim_v))
    rows = tiles.TILE_M
    leaving = 2 * rows * math.gcd(32, d // 2) * 4 if workload.heads_q > workload.heads_kv else 0
    q, do = max(2 * rows * d * 2, leaving), max(rows * dv * 2, leaving)
    return q + do + rows * (d + dv + rows) * 2 + rows * _DQ_COLUMNS_IN_FLIGHT[False] * 4 + 3072


def dq_stages(config: Config) -> int:
    """Return how many pieces of dQ are in flight, given dQ_reduce_ncol."""
    return _DQ_COLUMNS_IN_FLIGHT[bool(config["two_cta"])] // int(config["dQ_reduce_ncol"])


def _tile_refused(config: Config, workload: Workload) -> str:
    d, dv = workload.head_dim, workload.head_dim_v
    if d == 256:
        if config["hd256_generic"] != (config["tile_n"] == 64):
            return "the general kernel takes head_dim 256 with 64 rows of K/V, the dedicated ones with 128"
        if not config["hd256_generic"] and config["num_regs"] != _NUM_REGS[0]:
            return "the dedicated kernels for head_dim 256 share out their registers themselves"
        return ""
    if config["tile_n"] == 64 and not config["two_cta"]:
        return "64 rows of K/V make a tile only for two blocks together: an MMA has 128 rows"
    if config["tile_n"] == 64 and (config["mask"] != "native" or tiles.padded(dv, 32) % 64):
        return f"FA4 takes 64 rows of K/V without a BlockMask and with head dims of 64 or 128, not {d} over {dv}"
    return ""


def _lists_refused(config: Config, workload: Workload) -> str:
    if workload.deterministic:
        return "FA4 needs an order of writes to be deterministic under a BlockMask, and it is not built here yet"
    if config["two_cta"] and int(config["kv_blocks"]) % 2:
        return "two blocks share a K/V tile, so a BlockMask's K/V block must hold an even number of tile_n"
    return ""


def _sized_for_nothing(config: Config) -> str:
    if (config["q_blocks"], config["kv_blocks"]) != (1, 1):
        return "q_blocks and kv_blocks size a BlockMask, and mask=native has none"
    return ""


def _reduce_refused(config: Config, workload: Workload) -> str:
    columns, two_cta = int(config["dQ_reduce_ncol"]), bool(config["two_cta"])
    own = (16 if workload.deterministic else 8) if two_cta else 32
    if columns == own:
        return f"FA4 takes {own} columns of dQ at a time by itself: the same kernel as dQ_reduce_ncol=0"
    mine = tiles.padded(workload.head_dim, 32) // (2 if two_cta else 1)
    if columns and mine % columns:
        return f"dQ_reduce_ncol {columns} does not divide a block's {mine} columns of dQ"
    reduce, compute, load = tiles.backward_registers(config)
    if min(reduce, compute) < tiles.LAUNCH_REGISTERS or load < tiles.FEWEST_REGISTERS:
        return (
            f"num_regs {config['num_regs']} leaves {load} registers to a thread that loads; setmaxnreg raises the "
            f"others from {tiles.LAUNCH_REGISTERS}"
        )
    return ""
