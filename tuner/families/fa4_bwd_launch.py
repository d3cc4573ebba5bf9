"""FA4's backward call, the same for compiling on fake tensors and for running on real ones.

One call runs three kinds of kernels: one before (LSE, rowsum(dO * O), a zero dq), the backward itself,
and one after for each gradient that was summed in float32. All are compiled ahead and travel together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from flash_attn.cute import interface, utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from torch._subclasses.fake_tensor import FakeTensorMode

from tuner.config import Config
from tuner.families import cubin, fa4_cache, pattern_cute, pattern_torch
from tuner.families.base import Built, Kernel, Room
from tuner.families.fa4_bwd_tiles import block_size, smem_bytes, uses_block_mask
from tuner.families.fa4_launch import fake_packing, mask_arguments, packing, tensors
from tuner.trial import Resources
from tuner.workload import Workload


class Seam:
    """A with-block in which FA4 builds its backward by a config's tunables; stock stays as it is.

    FA4 asks a function of its module for tiles, stages and layouts. Its compile key has all of them but
    num_stages_PdS, so each number of these has a cache of its own; the keys of the kernels before and
    after are complete, and all configs share theirs. Entered for every call that is timed: keep it quick.
    """

    def __init__(self, config: Config, room: Room, load: bool) -> None:
        folders = {
            name: fa4_cache.shipped(room.cache_dir, name) for name in ("bwd", "bwd_pre", "bwd_post", "tile_cumsum")
        }
        self._choose = interface._tile_size_bwd_sm90
        if not config.is_stock:
            folders["bwd"] = fa4_cache.own(room.cache_dir, f"bwd-pds{config['num_stages_PdS']}")
            chosen = interface.BwdConfig(**{k: v for k, v in config.params if k != "q_blocks"})
            self._choose = lambda *args, **kwargs: chosen
        self.caches = {name: fa4_cache.cache(path, load) for name, path in folders.items()}
        self._before: tuple[Any, dict[str, Any]] = (None, {})

    def __enter__(self) -> Seam:
        holders = fa4_cache.HOLDERS
        self._before = interface._tile_size_bwd_sm90, {name: holders[name].compile_cache for name in self.caches}
        interface._tile_size_bwd_sm90 = self._choose
        for name, cache in self.caches.items():
            holders[name].compile_cache = cache
        return self

    def __exit__(self, *_: object) -> None:
        interface._tile_size_bwd_sm90, caches = self._before
        for name, cache in caches.items():
            fa4_cache.HOLDERS[name].compile_cache = cache


def compile_bwd(config: Config, workload: Workload, room: Room) -> Built:
    """Compile one config's kernels into the room's cache without a GPU; figures are of the backward itself."""
    with FakeTensorMode(), _fake_semaphores(), Seam(config, room, load=False) as seam:
        for cache in seam.caches.values():
            cache.asked.clear()

        q, k, v, out, lse = tensors(workload)
        dq, dk, dv, dout = (torch.empty_like(t) for t in (q, k, v, out))
        arguments = _arguments(config, workload, _fake_block_sparsity(config, workload)) | fake_packing(workload)
        interface._flash_attn_bwd(q, k, v, out, dout, lse, dq=dq, dk=dk, dv=dv, **arguments)
    main = seam.caches["bwd"].asked[-1]
    found = cubin.resources(main)
    smem = None if config.is_stock else smem_bytes(dict(config.params), workload)
    files = tuple(dict.fromkeys(path for cache in seam.caches.values() for path in cache.asked))
    return Built(Resources(found.registers, found.spill_bytes, smem, found.code_bytes), files)


@contextmanager
def _fake_semaphores() -> Iterator[None]:
    """Let FA4 describe the semaphores of a deterministic backward without a GPU.

    It hands all tensors to the compiler by TVM's DLPack but these, and torch's own asks a fake tensor's device.
    """
    original = utils.from_dlpack
    utils.from_dlpack = partial(original, enable_tvm_ffi=True)
    try:
        yield
    finally:
        utils.from_dlpack = original


def build_bwd(config: Config, workload: Workload, room: Room) -> Kernel:
    """Return the kernel on this process's GPU, loaded from the room's cache; it returns (dq, dk, dv)."""
    pattern_torch.refuse_captured_gradients(pattern_torch.score_mod(workload))
    arguments = _arguments(config, workload, _real_block_sparsity(config, workload))

    def run(inputs: Any) -> tuple[torch.Tensor, ...]:
        i, more = inputs, {}
        if i.packed is not None:
            more = packing(workload, i.packed.cu_seqlens_q, i.packed.cu_seqlens_k)
        interface._flash_attn_bwd(i.q, i.k, i.v, i.out, i.dout, i.lse, dq=i.dq, dk=i.dk, dv=i.dv, **arguments, **more)
        return i.dq, i.dk, i.dv

    if config.is_stock:
        return run  # the very call of a user who tunes nothing
    seam = Seam(config, room, load=True)

    def run_tuned(inputs: Any) -> tuple[torch.Tensor, ...]:
        with seam:
            return run(inputs)

    return run_tuned


def _arguments(config: Config, workload: Workload, sparsity: BlockSparseTensorsTorch | None) -> dict[str, Any]:
    """Return FA4's keyword arguments for a config; the same for fake and for real tensors."""
    arguments = mask_arguments(workload, sparsity)
    arguments["deterministic"] = workload.deterministic
    if workload.pattern.score("alibi") or not config.is_stock:
        arguments["score_mod"] = pattern_cute.score_mod(workload)
        arguments["score_mod_bwd"] = pattern_cute.score_mod_bwd(workload)
    else:
        arguments["softcap"] = pattern_torch.softcap_of(workload) or 0.0
    return pattern_cute.with_scalars(arguments, workload)


def _fake_block_sparsity(config: Config, workload: Workload) -> BlockSparseTensorsTorch | None:
    """Return block lists of the right shapes and strides, for compiling: blocks of queries by block of keys."""
    if not uses_block_mask(workload):
        return None
    bq, bkv = block_size(config, workload)
    rows, columns = -(-workload.seqlen_q // bq), -(-workload.seqlen_k // bkv)
    count = torch.empty(1, 1, columns, dtype=torch.int32, device="cuda")
    index = torch.empty(1, 1, columns, rows, dtype=torch.int32, device="cuda")
    return BlockSparseTensorsTorch(count, index, count, index, block_size=(bq, bkv))


def _real_block_sparsity(config: Config, workload: Workload) -> BlockSparseTensorsTorch | None:
    """Return the block lists of the pattern, from FlexAttention's BlockMask."""
    if not uses_block_mask(workload):
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    size = block_size(config, workload)
    keep = pattern_torch.mask_mod(workload, "cuda")
    assert keep is not None
    mask = create_block_mask(keep, None, None, workload.seqlen_q, workload.seqlen_k, device="cuda", BLOCK_SIZE=size)
    return BlockSparseTensorsTorch(
        mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices, block_size=size
    )
