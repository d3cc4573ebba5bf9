"""What FA4's backward takes on Hopper: shapes of its five products, registers, shared memory.

Pure arithmetic on configs, shared by the constraints (``fa4_bwd_sm90``) and the call
(``fa4_bwd_launch``). The backward of one block of keys walks over blocks of queries:

    S = Q K.T, dP = dO V.T      (m x n)   AtomLayoutMSdP warp groups along m, the rest along n
    dV += P.T dO, dK += dS.T Q  (n x d)   AtomLayoutNdKV along n
    dQ = dS K                   (m x d)   AtomLayoutMdQ along m; added to memory by a bulk reduction
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.config import Config
from tuner.families.fa4_tiles import SMEM_LIMIT_BYTES, mask_refused
from tuner.workload import Workload

# Registers for accumulators, by number of MMA warp groups: FA4 hands a thread 240 or 160 and about a
# tenth of an SM's file goes to addresses, statistics and the 16-bit P and dS (FA4's own enumeration
# has the same two numbers).
_ACCUMULATOR_REGISTERS = {2: 216, 3: 128}
_BUFFER_ALIGN = 1024  # of every tile in shared memory, for the swizzled layouts of TMA and wgmma


@dataclass(frozen=True)
class _Product:
    """One matrix product: its result's rows and columns, and the warp groups along the rows and in all."""

    name: str
    rows: int
    columns: int
    groups_rows: int
    groups: int
    swapped: bool  # computed transposed: columns on the axis that a wgmma cuts into 64

    def refused(self) -> str:
        """Return why the product does not split into wgmmas of 64 rows and up to 256 columns."""
        rows, columns, along, name = self.rows, self.columns, self.groups_rows, self.name
        across = self.groups // along
        if self.swapped:
            rows, columns, along, across = columns, rows, across, along
        if rows % (64 * along):
            return f"{name} puts {rows} on the axis of 64 rows a wgmma, which {along} warp group(s) cannot share"
        # Not refused: 40 or 56 columns of S a warp group, which gave wrong gradients in four recorded cases
        # of four. FA4 itself ships 24 of them for head_dim 256; the verification tells these apart.
        if columns % (8 * across) or columns // across > 256:
            return f"{name} leaves {columns} columns to {across} warp group(s), not multiples of 8 up to 256 each"
        return ""


def uses_block_mask(workload: Workload) -> bool:
    """Tell whether the call passes a mask_mod with a BlockMask: where FA4 has no argument for the masks."""
    return bool(mask_refused("native", workload))


def block_size(config: Config, workload: Workload) -> tuple[int, int]:
    """Return the (q, kv) block of the BlockMask: sm_90 wants kv == n_block_size, q a multiple of m_block_size."""
    if config.is_stock:
        # FlexAttention's default, and where FA4's own n_block_size is less, the most that it takes
        d = workload.head_dim
        return 128, 128 if d <= 128 else 96 if d <= 192 else 64
    return int(config["m_block_size"]) * int(config["q_blocks"]), int(config["n_block_size"])


def padded(head_dim: int, config: Mapping[str, Any]) -> int:
    """Return the head dimension that the kernel works on: a swapped dK, dV has it on the axis of 64."""
    step = 64 if config["dKV_swapAB"] else 16
    return -(-head_dim // step) * step


def dq_padding_refused(tile: int) -> str:
    """Return why dq would be wrong for a padded head dimension; empty if it is right.

    FA4's kernel writes ``tile`` columns of float32 a row, and what makes dq of them reads multiples of 32
    (b36; flash-attention pull request 2896).
    """
    return f"pads head_dim to {tile}, no multiple of 32: FA4 then reads a wrong dq" if tile % 32 else ""


def stock_dq_refused(workload: Workload, block_mask: bool) -> str:
    """Return why FA4's own choices give a wrong dq for a workload; empty if they do not."""
    d = workload.head_dim
    swapped = d > 128 and not (block_mask and d > 192)
    return "" if swapped else dq_padding_refused(-(-d // 16) * 16)


def dq_groups(config: Mapping[str, Any]) -> int:
    """Return the number of warp groups that compute dQ."""
    return 1 if config["dQ_single_wg"] else int(config["num_wg"])


def products_refused(config: Mapping[str, Any], workload: Workload) -> str:
    """Return why the products do not split into wgmmas; empty if they do."""
    c = config
    m, n, groups = c["m_block_size"], c["n_block_size"], c["num_wg"]
    d, dv = padded(workload.head_dim, c), padded(workload.head_dim_v, c)
    for product in (
        _Product("S and dP", m, n, c["AtomLayoutMSdP"], groups, c["SdP_swapAB"]),
        _Product("dK", n, d, c["AtomLayoutNdKV"], groups, c["dKV_swapAB"]),
        _Product("dV", n, dv, c["AtomLayoutNdKV"], groups, c["dKV_swapAB"]),
        _Product("dQ", m, d, c["AtomLayoutMdQ"], dq_groups(c), c["dQ_swapAB"]),
    ):
        if reason := product.refused():
            return reason
    return ""


def registers_refused(config: Mapping[str, Any], workload: Workload) -> str:
    """Return why the float32 accumulators do not fit the registers; empty if they do.

    dK and dV live from the first block of queries to the last; beside them S with dP, and after these dQ.
    """
    c, threads = config, 128 * config["num_wg"]
    m, n = c["m_block_size"], c["n_block_size"]
    d, dv = padded(workload.head_dim, c), padded(workload.head_dim_v, c)
    registers = n * (d + dv) // threads + max(2 * m * n // threads, m * d // (128 * dq_groups(c)))
    limit = _ACCUMULATOR_REGISTERS[c["num_wg"]]
    if registers > limit:
        return (
            f"accumulators take {registers} registers a thread and {limit} fit with {c['num_wg']} MMA warp groups: "
            "the kernel would spill"
        )
    return ""


def p_in_registers(config: Mapping[str, Any]) -> bool:
    """Tell whether P and dS go to dV and dK in registers: each warp group then holds just its rows of P.T."""
    c = config
    alone = c["AtomLayoutMSdP"] == 1 and c["AtomLayoutNdKV"] == c["num_wg"]
    return bool(alone and c["SdP_swapAB"] and not c["dKV_swapAB"])


def smem_bytes(config: Mapping[str, Any], workload: Workload) -> int:
    """Shared memory of one block: stages of Q and dO, K, V, P unless in registers, dS, and dQ in float32.

    Before them lie the pipelines' barriers and, a float32 for each query of a stage, LSE and rowsum(dO * O).
    """
    c = config
    m, n = c["m_block_size"], c["n_block_size"]
    d, dv = padded(workload.head_dim, c), padded(workload.head_dim_v, c)
    stages_q, stages_do, stages_ds = c["num_stages_Q"], c["num_stages_dO"], c["num_stages_PdS"]
    size = _aligned(16 * (stages_q + stages_do), 128)
    size += 4 * _aligned(m, 64) * (stages_q + stages_do)
    p = 0 if p_in_registers(c) else 2 * m * n * stages_ds
    for tile in (2 * m * d * stages_q, 2 * n * dv, 2 * n * d, 2 * m * dv * stages_do, p, 2 * m * n * stages_ds):
        size = _aligned(size, _BUFFER_ALIGN) + tile
    return _aligned(_aligned(size, _BUFFER_ALIGN) + 4 * m * d, _BUFFER_ALIGN)


def smem_refused(config: Mapping[str, Any], workload: Workload) -> str:
    """Return why the launch would fail for shared memory; empty if it would not."""
    smem = smem_bytes(config, workload)
    if smem > SMEM_LIMIT_BYTES:
        return f"takes {smem} bytes of shared memory and {SMEM_LIMIT_BYTES} exist: the launch would fail"
    return ""


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step
