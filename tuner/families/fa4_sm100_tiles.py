"""What FA4's tiles take on Blackwell: tensor memory, shared memory, registers, and the BlockMask that fits.

Pure arithmetic on configs, shared by the constraints (``fa4_fwd_sm100``, ``fa4_bwd_sm100``) and the call
(``fa4_sm100_launch``). A thread block is 16 warps; its tile of Q has 128 rows, always.
"""

from __future__ import annotations

from tuner.config import Config
from tuner.workload import Workload

TILE_M = 128  # one row a lane of tensor memory, which has 128

# Columns of 32 bits in one SM's tensor memory (PTX ISA, tcgen05.alloc: up to 512).
TMEM_COLUMNS = 512

# Shared memory one block can have on sm_100: 227 KiB (CUDA C++ programming guide, compute capabilities).
# FA4 b36 gives 224 KiB of it to Q, O, K and V; barriers and row statistics live in the rest.
SMEM_LIMIT_BYTES = 232_448
SMEM_TILES_BYTES = 224 << 10
_PING_PONG_FROM = {64: 16, 128: 64}  # K/V tiles of a split, by head_dim; FA4 has no such number for 256
_MOST_KV_STAGES = 32  # FA4's cap, so that barriers stay small at narrow heads

# setmaxnreg moves registers between warp groups in eights, from 24 to 256 each (PTX ISA). The launch
# gives 65536 / 512 threads to every thread; four warp groups share four times that.
LAUNCH_REGISTERS = 128
FEWEST_REGISTERS = 24
REGISTERS_OF_FOUR_GROUPS = 512


def padded(head_dim: int, multiple: int = 16) -> int:
    """Return the head dimension as the kernel pads it: to 16 in the forward, to 32 in the backward."""
    return -(-head_dim // multiple) * multiple


def packed_rows(workload: Workload, pack_gqa: bool) -> int:
    """Return the query rows of one sequence and one head of the grid, grouped heads folded in if packed."""
    return workload.seqlen_q * (workload.heads_q // workload.heads_kv if pack_gqa else 1)


def tmem_columns(config: Config, workload: Workload) -> int:
    """Count the columns of two score tiles, float32, and of one output tile for each Q tile."""
    return 2 * int(config["tile_n"]) + int(config["q_stage"]) * padded(workload.head_dim_v)


def kv_stages_that_fit(config: Config, workload: Workload) -> int:
    """Count the K/V stages beside Q and O: K and V tiles take turns in one ring of equal slots.

    With 2-CTA instructions each of the two blocks holds half of every K and V tile.
    """
    room = SMEM_TILES_BYTES - _q_o_bytes(config, workload)
    return min(room // _slot_bytes(config, workload), _MOST_KV_STAGES)


def kv_stage_of(config: Config, workload: Workload) -> int:
    """Return the depth of the K/V ring that a config gets: what it names, or as many as fit."""
    return int(config["kv_stage"]) or kv_stages_that_fit(config, workload)


def smem_bytes(config: Config, workload: Workload) -> int:
    """Shared memory of one block: Q and O, the K/V ring, row statistics and barriers.

    A tile in flight has two statistics of 4 bytes for each of its rows, 1 KiB; barriers and the alignment of
    what follows them take another.
    """
    tiles = _q_o_bytes(config, workload)
    if uneven_ring(config, workload):
        v = int(config["tile_n"]) * padded(workload.head_dim_v) * 2 // _blocks(config)
        tiles += 2 * _slot_bytes(config, workload) + v
    else:
        tiles += kv_stage_of(config, workload) * _slot_bytes(config, workload)
    in_flight = 2 if s_ping_pong(config, workload) else int(config["q_stage"])
    return tiles + 1024 * (in_flight + 1)


def s_ping_pong(config: Config, workload: Workload) -> bool:
    """Tell whether FA4 keeps two score tiles of one Q tile in flight; it decides so by itself."""
    plain = config["mask"] == "native" and not workload.pattern.scores
    same = workload.head_dim == workload.head_dim_v and workload.head_dim in (64, 128, 256)
    if not plain or not same or config["q_stage"] != 1 or config["tile_n"] != 128:
        return False
    if config["num_splits"] == 1:
        return True
    window = workload.pattern.mask("sliding_window")
    keys = workload.seqlen_k
    if window is not None:
        keys = min(keys, int(window["window"]) + TILE_M)  # type: ignore[arg-type]
    in_all = -(-keys // 128)
    return -(-in_all // int(config["num_splits"])) >= _PING_PONG_FROM.get(workload.head_dim, keys)


def uneven_ring(config: Config, workload: Workload) -> bool:
    """Tell whether FA4 puts a V of its own size between two Ks: three stages of head_dim 192 over 128."""
    wide = (padded(workload.head_dim), padded(workload.head_dim_v)) == (192, 128)
    return wide and not config["kv_stage"] and kv_stages_that_fit(config, workload) in (2, 3)


def forward_registers(config: Config) -> tuple[int, int, int]:
    """Return the registers of a softmax, a correction and any other thread of the forward.

    ``num_regs`` names the first two; the other warp groups share what is left, and cannot have more than
    they were launched with.
    """
    softmax, correction = split_of(config)
    q_stage = int(config["q_stage"])
    left = (REGISTERS_OF_FOUR_GROUPS - softmax * q_stage - correction) // (3 - q_stage)
    return softmax, correction, min(left // 8 * 8, LAUNCH_REGISTERS)


def backward_registers(config: Config) -> tuple[int, int, int]:
    """Return the registers of a reducing, a computing and a loading thread of the backward.

    ``num_regs`` names the first two; there are two computing warp groups, and one that loads and issues MMAs.
    """
    reduce, compute = split_of(config)
    return reduce, compute, min((REGISTERS_OF_FOUR_GROUPS - reduce - 2 * compute) // 8 * 8, LAUNCH_REGISTERS)


def split_of(config: Config) -> tuple[int, int]:
    """Return the two numbers of ``num_regs``, as ``192-72``."""
    first, _, second = str(config["num_regs"]).partition("-")
    return int(first), int(second)


def block_size(config: Config) -> tuple[int, int]:
    """Return the (q, kv) block of the BlockMask: whole thread-block tiles of Q, whole tiles of K/V.

    Stock gets FlexAttention's default but for the Q block, which must hold the two Q tiles of a block.
    """
    if config.is_stock:
        return 2 * TILE_M, 128
    q_stage = int(config.get("q_stage", 1))  # the backward has one
    return TILE_M * q_stage * int(config["q_blocks"]), int(config["tile_n"]) * int(config["kv_blocks"])


def _q_o_bytes(config: Config, workload: Workload) -> int:
    """Bytes of Q and O. O reuses Q's room for wide heads, and is float32 where splits are combined later."""
    split = int(config["num_splits"]) > 1
    d, dv = padded(workload.head_dim), padded(workload.head_dim_v)
    rows = int(config["q_stage"]) * TILE_M
    o_columns = 128 if split and dv == 256 else dv  # FA4 stores a split's 256 columns in two halves
    q, o = rows * d * 2, rows * o_columns * (4 if split else 2)
    shares = (d == 192 and dv >= 64) or d == 256 or (dv >= 128 and split)
    return max(q, o) if shares else q + o


def _slot_bytes(config: Config, workload: Workload) -> int:
    widest = max(padded(workload.head_dim), padded(workload.head_dim_v))
    return int(config["tile_n"]) * widest * 2 // _blocks(config)


def _blocks(config: Config) -> int:
    return 2 if config["two_cta"] else 1
