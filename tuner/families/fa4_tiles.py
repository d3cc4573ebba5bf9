"""What FA4's tiles take on Hopper: registers, shared memory, and the BlockMask that fits them.

Pure arithmetic on configs, shared by the constraints (``fa4_fwd_sm90``) and the call (``fa4_launch``).
"""

from __future__ import annotations

from tuner.config import Config
from tuner.workload import Workload

# Shared memory one block can have on sm_90: 227 KiB (CUDA C++ programming guide, compute
# capabilities). FA4 b36 keeps barriers and alignment below one KiB of it.
SMEM_LIMIT_BYTES = 232_448
SMEM_OVERHEAD_BYTES = 1024

# Accumulator registers a thread can hold without spilling, by number of MMA warp groups. FA4 hands
# 256, 240 and 160 registers to a thread; addressing and softmax state take the rest (FA4's own
# enumeration uses 216 and 128).
ACCUMULATOR_REGISTERS = {1: 232, 2: 216, 3: 128}

_NATIVE_MASKS: tuple[set[str], ...] = ({"causal"}, {"sliding_window"}, set())


def mask_refused(mask: str, workload: Workload) -> str:
    """Return why a workload cannot use ``mask``: native, block or partial; empty if it can."""
    names = set(workload.pattern.mask_names)
    if mask == "native" and names not in _NATIVE_MASKS:
        return f"FA4 has no native argument for {workload.pattern}"
    if mask != "native" and workload.layout == "varlen":
        return "packed sequences take FA4's native masks here: a BlockMask is of sequences of one length"
    if mask != "native" and not names:
        return f"{workload.pattern} masks nothing: there is no BlockMask to build"
    return ""


def uses_block_mask(config: Config, workload: Workload) -> bool:
    """Tell whether the call passes a mask_mod with a BlockMask; stock does so only where it must."""
    if config.is_stock:
        return bool(mask_refused("native", workload))
    return config["mask"] != "native"


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
