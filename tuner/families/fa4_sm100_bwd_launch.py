"""FA4's backward call on Blackwell, with the seams that its tunables are reached through.

The backward is three kernels or more: one before (sums of out * dout, the LSE in base 2), the main one, and
conversions of float32 sums after it. Their compile keys name no architecture, so the folder does.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from flash_attn.cute import interface, utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from torch._subclasses.fake_tensor import FakeTensorMode

from tuner.config import Config
from tuner.families import fa4_launch, flex, pattern_cute, pattern_torch
from tuner.families import fa4_sm100_tiles as tiles
from tuner.families.base import Built, Kernel, Room
from tuner.families.fa4_bwd_sm100 import block_size, dq_stages, smem_bytes, tmem_columns
from tuner.families.fa4_seam import Swapped
from tuner.families.fa4_sm100_launch import Seam, built
from tuner.families.fa4_tiles import uses_block_mask
from tuner.workload import Workload


def _backward(config: Config, room: Room, load: bool) -> Seam:
    """Return the with-block in which FA4's backward builds and finds a config's kernels."""
    if config.is_stock:
        return Seam(room, load, {"bwd": "", "bwd_pre": "", "bwd_post": ""})
    two_cta, generic = bool(config["two_cta"]), bool(config["hd256_generic"])
    tile_n = 64 if config["tile_n"] == 64 and not generic else None
    columns = int(config["dQ_reduce_ncol"])
    stages = dq_stages(config) if columns else 0
    kernel = _backward_kernel(columns, stages, *tiles.backward_registers(config))
    variant = f"bwd_dq{columns}_{config['num_regs']}"
    return Seam(
        room,
        load,
        {"bwd": variant, "bwd_pre": "bwd_pre", "bwd_post": "bwd_post"},
        (utils, "_get_disable_2cta_default", lambda is_fwd=False: not two_cta),
        (utils, "_get_hd256_generic_bwd", lambda: generic),
        (utils, "_get_bwd_tile_n_override", lambda: tile_n),
        (interface, "FlashAttentionBackwardSm100", kernel),
    )


@cache
def _backward_kernel(columns: int, stages: int, reduce: int, compute: int, load: int) -> type:
    """Return FA4's backward kernel with what its constructor decides by itself decided here."""

    class Tuned(interface.FlashAttentionBackwardSm100):  # type: ignore[misc]
        def __init__(self, *args: Any, **kw: Any) -> None:
            super().__init__(*args, **kw)
            self.num_regs_reduce, self.num_regs_compute = reduce, compute
            self.num_regs_load = self.num_regs_mma = load

        def _setup_attributes(self) -> None:
            super()._setup_attributes()
            if columns:
                self.dQ_reduce_ncol, self.sdQaccum_stage = columns, stages
                self.dQaccum_reduce_stage = self.tile_hdim // columns
                if not self.use_2cta_instrs:  # one block reads as many columns as it sends
                    self.dQ_reduce_ncol_t2r = columns
                    self.dQaccum_reduce_stage_t2r = self.dQaccum_reduce_stage
                self._check_accum_tile_orders()

    return Tuned


def compile_bwd(config: Config, workload: Workload, room: Room) -> Built:
    """Compile one config's kernels into the room's cache without a GPU; the figures are the main kernel's."""
    # FA4 hands all tensors to the compiler by TVM's DLPack but the semaphores of a deterministic backward, and
    # torch's own asks a fake tensor's device
    semaphores = Swapped((utils, "from_dlpack", partial(utils.from_dlpack, enable_tvm_ffi=True)))
    seam = _backward(config, room, load=False)
    with FakeTensorMode(), semaphores, seam:
        q, k, v, out, lse = fa4_launch.tensors(workload)
        gradients = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
        arguments = _arguments(config, workload, _block_lists(config, workload, fake=True))
        interface._flash_attn_bwd(q, k, v, out, torch.empty_like(out), lse, **gradients, **arguments)
    if config.is_stock:
        return built(seam.caches)
    return built(seam.caches, smem_bytes(config, workload), tmem_columns(config, workload))


def build_bwd(config: Config, workload: Workload, room: Room) -> Kernel:
    """Return the backward on this process's GPU, loaded from the room's cache; it returns (dq, dk, dv)."""
    pattern_torch.refuse_captured_gradients(pattern_torch.score_mod(workload))
    arguments = _arguments(config, workload, _block_lists(config, workload, fake=False))

    def run(inputs: Any) -> tuple[torch.Tensor, ...]:
        i = inputs
        interface._flash_attn_bwd(i.q, i.k, i.v, i.out, i.dout, i.lse, dq=i.dq, dk=i.dk, dv=i.dv, **arguments)
        return i.dq, i.dk, i.dv

    if config.is_stock:
        return run  # the very call of a user who tunes nothing

    seam = _backward(config, room, load=True)

    def run_tuned(inputs: Any) -> tuple[torch.Tensor, ...]:
        with seam:
            return run(inputs)

    return run_tuned


def _arguments(config: Config, workload: Workload, sparsity: BlockSparseTensorsTorch | None) -> dict[str, Any]:
    """Return FA4's keyword arguments; the same for fake and for real tensors."""
    arguments = fa4_launch.mask_arguments(workload, sparsity) | {"deterministic": workload.deterministic}
    if workload.pattern.score("alibi") or not config.is_stock:
        arguments["score_mod"] = pattern_cute.score_mod(workload)
        arguments["score_mod_bwd"] = pattern_cute.score_mod_bwd(workload)
    else:
        arguments["softcap"] = pattern_torch.softcap_of(workload) or 0.0
    return pattern_cute.with_scalars(arguments, workload)


def _block_lists(config: Config, workload: Workload, *, fake: bool) -> BlockSparseTensorsTorch | None:
    """Return for every K/V block the Q blocks that see it: the BlockMask's lists the other way round."""
    if not uses_block_mask(config, workload):
        return None
    size, full = block_size(config, workload), config.get("mask") != "partial"
    if not fake:
        mask = flex.make_block_mask(workload, "cuda", size, full_blocks=full)
        assert mask is not None
        return BlockSparseTensorsTorch(
            mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices, block_size=size
        )
    columns, rows = -(-workload.seqlen_k // size[1]), -(-workload.seqlen_q // size[0])
    count = torch.empty(1, 1, columns, dtype=torch.int32, device="cuda")
    index = torch.empty(1, 1, columns, rows, dtype=torch.int32, device="cuda")
    return BlockSparseTensorsTorch(count, index, *((count, index) if full else (None, None)), block_size=size)
