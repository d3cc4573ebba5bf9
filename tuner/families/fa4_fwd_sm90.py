"""FlashAttention-4's forward on Hopper: tiles, stages, register flags, native masks or a BlockMask.

Owns the tunables and their constraints. The kernels are in ``fa4_launch``.

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
from tuner.families.base import Kernel, Room, Space
from tuner.target import Target
from tuner.trial import Resources
from tuner.workload import Workload

# Shared memory one block can have on sm_90: 227 KiB (CUDA C++ programming guide, compute
# capabilities). FA4 b36 keeps barriers and alignment below one KiB of it.
SMEM_LIMIT_BYTES = 232_448
SMEM_OVERHEAD_BYTES = 1024

# Accumulator registers a thread can hold without spilling, by number of MMA warp groups. FA4 hands
# 256, 240 and 160 registers to a thread; addressing and softmax state take the rest (FA4's own
# enumeration uses 216 and 128).
ACCUMULATOR_REGISTERS = {1: 232, 2: 216, 3: 128}

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

_NATIVE_MASKS: tuple[set[str], ...] = ({"causal"}, {"sliding_window"}, set())


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
        if workload.layout != "dense":
            return f"has no {workload.layout} layout here yet"
        if max(workload.head_dim, workload.head_dim_v) > 256:
            return f"head_dim goes to 256, not {max(workload.head_dim, workload.head_dim_v)}"
        return ""

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        masks = [m for m in ("native", "block") if not _mask_refused(m, workload)]
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
                pack_gqa=workload.heads_q > workload.heads_kv and mask == "native",
            )
            for mask in self.space(workload)["mask"]
            for tile_m, tile_n, rs, overlap in _FIRST
        )

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        if config.is_stock:
            return ""
        native = config["mask"] == "native"
        if reason := _mask_refused(str(config["mask"]), workload):
            return reason
        if native and config["q_blocks"] != 1:
            return "q_blocks sizes a BlockMask, and mask=native has none"
        if config["pack_gqa"] and not native:
            return "pack_gqa folds heads into rows, which a per-row BlockMask does not follow"
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

    def compile(self, config: Config, workload: Workload, room: Room) -> Resources:
        from tuner.families import fa4_launch

        return fa4_launch.compile_fwd(config, workload, room)

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        from tuner.families import fa4_launch

        return fa4_launch.build_fwd(config, workload, room)


FAMILY = Fa4FwdSm90()


def _mask_refused(mask: str, workload: Workload) -> str:
    names = set(workload.pattern.mask_names)
    if mask == "native" and names not in _NATIVE_MASKS:
        return f"FA4 has no native argument for {workload.pattern}"
    if mask == "block" and not names:
        return f"{workload.pattern} masks nothing: there is no BlockMask to build"
    return ""


def uses_block_mask(config: Config, workload: Workload) -> bool:
    """Tell whether the call passes a mask_mod with a BlockMask; stock does so only where it must."""
    if config.is_stock:
        return bool(_mask_refused("native", workload))
    return config["mask"] == "block"


def block_size(config: Config) -> tuple[int, int]:
    """Return the (q, kv) block of the BlockMask: sm_90 wants kv == tile_n and q a multiple of tile_m."""
    if config.is_stock:
        return 128, 128  # FlexAttention's default, which FA4's heuristics then fit their tiles to
    return int(config["tile_m"]) * int(config["q_blocks"]), int(config["tile_n"])


def accumulator_registers(config: Config, workload: Workload) -> int:
    """Count the float32 accumulators of S and O, and the 16-bit P where it must live beside S.

    A 64-row wgmma spreads over 128 threads, so n columns take n / 2 registers a thread. P (n / 4)
    is live beside the next S only if it stays in registers and the products overlap.
    """
    n, dv = int(config["tile_n"]), _padded(workload.head_dim_v)
    p_beside_s = bool(config["mma_pv_is_rs"]) and bool(config["intra_wg_overlap"])
    return n // 2 + dv // 2 + (n // 4 if p_beside_s else 0)


def smem_bytes(config: Config, workload: Workload) -> int:
    """Shared memory of one block: Q, the K and V stages, P unless in registers, and barriers."""
    m, n, stages = int(config["tile_m"]), int(config["tile_n"]), int(config["num_stages"])
    d, dv = _padded(workload.head_dim), _padded(workload.head_dim_v)
    elements = m * d + stages * n * (d + dv) + (0 if config["mma_pv_is_rs"] else m * n)
    return 2 * elements + SMEM_OVERHEAD_BYTES


def _padded(head_dim: int) -> int:
    return -(-head_dim // 16) * 16
