"""FlashAttention-4's backward on Hopper: tiles, stages, and how five products split over warp groups.

Owns the tunables and their constraints. What tiles take is in ``fa4_bwd_tiles``, the call in
``fa4_bwd_launch``. Causal and sliding windows go by FA4's own arguments, other masks by a mask_mod
with a BlockMask whose sizes follow the tiles.

==============================  ==============================================================
tunable                         meaning (FA4's own names)
==============================  ==============================================================
m_block_size, n_block_size      rows of Q and dO, and of K and V, that one step works on
num_stages_Q, num_stages_dO     depth of the pipelines of Q and dO
num_stages_PdS                  buffers of P and dS
SdP_swapAB, dKV_swapAB,         compute the product transposed: S and dP, dK and dV, dQ
dQ_swapAB
AtomLayoutMSdP, AtomLayoutNdKV, warp groups along the first axis of these products
AtomLayoutMdQ
num_wg                          MMA warp groups
dQ_single_wg                    the first warp group alone computes dQ
q_blocks                        BlockMask's Q block in units of m_block_size (1 without a BlockMask)
==============================  ==============================================================
"""

from __future__ import annotations

from typing import Any

from tuner.config import Config
from tuner.families.base import Built, Kernel, Room, Space, backward_refused
from tuner.families.fa4_bwd_tiles import (
    block_size,
    dq_groups,
    dq_padding_refused,
    padded,
    products_refused,
    registers_refused,
    smem_refused,
    stock_dq_refused,
    uses_block_mask,
)
from tuner.target import Target
from tuner.workload import Workload

_NAMES = (
    "m_block_size",
    "n_block_size",
    "num_stages_Q",
    "num_stages_dO",
    "num_stages_PdS",
    "SdP_swapAB",
    "dKV_swapAB",
    "dQ_swapAB",
    "AtomLayoutMSdP",
    "AtomLayoutNdKV",
    "AtomLayoutMdQ",
    "num_wg",
    "dQ_single_wg",
)

# To try first: FA4's own choices by head_dim, and the nearest of 18 sampled on an H200 (2026-12-01,
# head_dim 128, causal). In the order of _NAMES.
_FIRST: tuple[tuple[int | bool, ...], ...] = (
    (128, 128, 2, 2, 2, True, False, False, 1, 2, 2, 2, False),  # head_dim 64
    (64, 128, 2, 2, 2, True, False, False, 1, 2, 1, 2, True),  # 96
    (64, 128, 2, 2, 2, True, False, False, 1, 2, 1, 2, False),  # 128, causal
    (80, 128, 2, 2, 2, True, False, True, 1, 2, 1, 2, False),  # 128
    (64, 128, 2, 2, 1, False, False, False, 1, 2, 1, 2, False),
    (64, 96, 2, 2, 1, False, True, True, 1, 1, 1, 2, False),
    (64, 96, 2, 2, 1, False, True, False, 1, 2, 1, 2, False),  # 192 with head_dim_v 128
    (64, 96, 2, 1, 1, False, True, False, 1, 2, 1, 2, False),  # 192
    (64, 48, 2, 1, 1, False, True, False, 1, 1, 1, 2, False),  # 256
    (64, 64, 1, 1, 1, False, False, False, 1, 1, 1, 2, False),  # 256 with a BlockMask
)


class Fa4BwdSm90:
    """FA4 backward on sm_90a."""

    name = "fa4_bwd_sm90"
    version = 1
    compile_in = "cpu"
    lab = "tuner.lab_torch:TorchLab"

    def refuses(self, workload: Workload, target: Target) -> str:
        w = workload
        if target.arch != "sm_90a":
            return f"needs sm_90a, the target is {target.arch}"
        if w.op != "bwd":
            return f"computes bwd, not {w.op}"
        if w.dtype not in ("bfloat16", "float16"):
            return f"computes bfloat16 and float16, not {w.dtype}"
        if max(w.head_dim, w.head_dim_v) > 256:
            return f"head_dim goes to 256, not {max(w.head_dim, w.head_dim_v)}"
        if reason := stock_dq_refused(w, uses_block_mask(w)):
            return reason
        if w.heads_q != w.heads_kv and w.head_dim != w.head_dim_v:
            return f"sums over grouped heads only where head_dim_v equals head_dim, not {w.head_dim_v} and {w.head_dim}"
        if w.deterministic and uses_block_mask(w):
            return f"is not deterministic with a BlockMask on sm_90, and {w.pattern} needs one"
        return backward_refused(w)

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        large, w = max(workload.head_dim, workload.head_dim_v) > 128, workload
        # Three warp groups split an axis of 192 evenly; elsewhere they only multiply the space
        three = w.head_dim % 192 == 0 and w.heads_q == w.heads_kv
        atoms = (1, 2, 3) if three else (1, 2)
        return {
            "m_block_size": (64, 80) if large else (64, 80, 96, 112, 128),
            "n_block_size": (48, 64, 80, 96) if large else (64, 80, 96, 112, 128),
            "num_stages_Q": (1, 2) if large else (2,),  # one stage only where two do not fit
            "num_stages_dO": (1, 2),
            "num_stages_PdS": (1, 2),
            "SdP_swapAB": (True, False),
            "dKV_swapAB": (True, False),
            "dQ_swapAB": (True, False),
            "AtomLayoutMSdP": atoms,
            "AtomLayoutNdKV": atoms,
            "AtomLayoutMdQ": atoms,
            "num_wg": (2, 3) if three else (2,),
            "dQ_single_wg": (False, True),
            "q_blocks": (1, 2) if uses_block_mask(w) else (1,),
        }

    def first(self, workload: Workload) -> tuple[Config, ...]:
        space = self.space(workload)
        return tuple(
            Config.make(self.name, self.version, **dict(zip(_NAMES, values, strict=True)), q_blocks=1)
            for values in _FIRST
            if all(value in space[name] for name, value in zip(_NAMES, values, strict=True))
        )

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        if config.is_stock:
            return ""
        c: dict[str, Any] = dict(config.params)
        return (
            _stages_refused(c)
            or _groups_refused(c, workload)
            or products_refused(c, workload)
            or registers_refused(c, workload)
            or dq_padding_refused(padded(workload.head_dim, c))
            or _copies_refused(c, workload)
            or smem_refused(c, workload)
        )

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        return {"block_size": list(block_size(config, workload))} if uses_block_mask(workload) else {}

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        from tuner.families import fa4_bwd_launch

        return fa4_bwd_launch.compile_bwd(config, workload, room)

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        from tuner.families import fa4_bwd_launch

        return fa4_bwd_launch.build_bwd(config, workload, room)


FAMILY = Fa4BwdSm90()


def _stages_refused(c: dict[str, Any]) -> str:
    for name in ("num_stages_dO", "num_stages_PdS"):
        if c[name] not in (1, c["num_stages_Q"]):
            return f"{name} is {c[name]}: it must be 1 or num_stages_Q {c['num_stages_Q']}, whose index it uses"
    return ""


def _groups_refused(c: dict[str, Any], workload: Workload) -> str:
    if c["num_wg"] not in (2, 3):
        return f"num_wg is {c['num_wg']}: FA4 hands out registers for 2 or 3"
    if c["num_wg"] != 2 and c["dQ_single_wg"]:
        return "dQ_single_wg gives dQ to one of two warp groups, and num_wg is not 2"
    if c["num_wg"] != 2 and workload.heads_q != workload.heads_kv:
        return "the sum of dK and dV over grouped heads is written for num_wg 2"
    for name, groups in (
        ("AtomLayoutMSdP", c["num_wg"]),
        ("AtomLayoutNdKV", c["num_wg"]),
        ("AtomLayoutMdQ", dq_groups(c)),
    ):
        if groups % c[name]:
            return f"{name} {c[name]} does not divide the {groups} warp group(s) of its product"
    if c["q_blocks"] != 1 and not uses_block_mask(workload):
        return "q_blocks sizes a BlockMask, and this pattern needs none"
    return ""


def _copies_refused(c: dict[str, Any], workload: Workload) -> str:
    m, n, d = c["m_block_size"], c["n_block_size"], padded(workload.head_dim, c)
    if m % 16 or n % 16:
        return f"tile {m}x{n} has a side that is no multiple of 16, the depth of a wgmma"
    # dQ is copied 16 bytes a thread; so are dK and dV where they are summed over grouped heads
    if m * d % (512 * dq_groups(c)):
        return f"a dQ of {m}x{d} float32 does not split into 16 bytes a thread of {dq_groups(c)} warp group(s)"
    if workload.heads_q != workload.heads_kv and n * d % (512 * c["num_wg"]):
        return f"a dK of {n}x{d} float32 does not split into 16 bytes a thread of {c['num_wg']} warp groups"
    return ""
