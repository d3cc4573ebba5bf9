"""FA4's forward call, the same for compiling on fake tensors and for running on real ones.

Both must pass exactly the same arguments, since FA4's compile key holds every one of them: a call
that differs compiles again, silently, in the measuring process. So there is one function here that
makes the arguments, and a cache (``fa4_cache``) that tells when it compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from flash_attn.cute import interface
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from torch._subclasses.fake_tensor import FakeTensorMode

from tuner.config import Config
from tuner.families import cubin, fa4_cache, pattern_cute, pattern_torch
from tuner.families.base import Built, Kernel, Room
from tuner.families.fa4_seam import Swapped
from tuner.families.fa4_tiles import block_size, smem_bytes, uses_block_mask
from tuner.trial import Resources
from tuner.workload import Workload


def _stages(config: Config, room: Room, load: bool) -> tuple[Swapped, fa4_cache.Cache]:
    """Return a with-block in which FA4 builds with the config's number of K/V stages, and its cache.

    The number is a literal at FA4's call and not in its compile key, so the class is wrapped and
    each number has a cache of its own. Stock stays as it is.
    """
    holder, original = fa4_cache.HOLDERS["fwd"], interface.FlashAttentionForwardSm90
    if config.is_stock:
        cache = fa4_cache.cache(fa4_cache.shipped(room.cache_dir, "fwd"), load)
        return Swapped((holder, "compile_cache", cache)), cache
    stages = int(config["num_stages"])
    cache = fa4_cache.cache(fa4_cache.own(room.cache_dir, f"stages{stages}"), load)

    def wrapped(*args: Any, **kw: Any) -> Any:
        return original(*args, **{**kw, "num_stages": stages})

    return Swapped((holder, "compile_cache", cache), (interface, "FlashAttentionForwardSm90", wrapped)), cache


def compile_fwd(config: Config, workload: Workload, room: Room) -> Built:
    """Compile one config into the room's cache without a GPU, and read its figures from the cubin."""
    stages, cache = _stages(config, room, load=False)
    with FakeTensorMode(), stages, fa4_cache.scheduling_objects(room.cache_dir) as scheduling:
        q, k, v, out, lse = tensors(workload)
        arguments = _arguments(config, workload, _block_lists(config, workload, fake=True))
        interface._flash_attn_fwd(q, k, v, out=out, lse=lse, **arguments, **fake_packing(workload))
    made = cache.asked[-1]
    found = cubin.resources(made)
    smem = None if config.is_stock else smem_bytes(config, workload)
    return Built(Resources(found.registers, found.spill_bytes, smem, found.code_bytes), (made, *scheduling))


def build_fwd(config: Config, workload: Workload, room: Room) -> Kernel:
    """Return the kernel on this process's GPU, loaded from the room's cache."""
    arguments = _arguments(config, workload, _block_lists(config, workload, fake=False))
    stages, _ = _stages(config, room, load=True)
    return kernel(config, workload, arguments, stages)


def kernel(config: Config, workload: Workload, arguments: dict[str, Any], seam: Swapped) -> Kernel:
    """Return FA4's forward call with ``arguments``; a tuned config's is made inside the ``seam``."""
    w = workload
    spare = torch.empty(w.batch, w.heads_q, w.seqlen_q, dtype=torch.float32, device="cuda")

    def run(inputs: Any) -> torch.Tensor:
        lse = getattr(inputs, "lse", spare)  # a backward that follows reads it there
        interface._flash_attn_fwd(inputs.q, inputs.k, inputs.v, out=inputs.out, lse=lse, **arguments)
        out: torch.Tensor = inputs.out
        return out

    def run_packed(inputs: Any) -> torch.Tensor:
        rows = inputs.q.shape[0]  # other inputs may have fewer, never more
        its = lse.as_strided((w.heads_q, rows), (rows, 1))
        more = packing(workload, inputs.packed.cu_seqlens_q, inputs.packed.cu_seqlens_k)
        interface._flash_attn_fwd(inputs.q, inputs.k, inputs.v, out=inputs.out, lse=its, **arguments, **more)
        out: torch.Tensor = inputs.out
        return out

    if w.layout == "varlen":
        lse, run = torch.empty(w.heads_q, w.total_q, dtype=torch.float32, device="cuda"), run_packed

    if config.is_stock:
        return run  # the very call of a user who tunes nothing

    def run_tuned(inputs: Any) -> torch.Tensor:
        with seam:
            return run(inputs)

    return run_tuned


def tensors(workload: Workload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return unfilled q, k, v, out and LSE of a workload; under FakeTensorMode they take no memory."""
    w, dtype, varlen = workload, getattr(torch, workload.dtype), workload.layout == "varlen"
    rows_q, rows_k = ((w.total_q,), (w.total_k,)) if varlen else ((w.batch, w.seqlen_q), (w.batch, w.seqlen_k))
    q = torch.empty(*rows_q, w.heads_q, w.head_dim, dtype=dtype, device="cuda")
    k = torch.empty(*rows_k, w.heads_kv, w.head_dim, dtype=dtype, device="cuda")
    v = torch.empty(*rows_k, w.heads_kv, w.head_dim_v, dtype=dtype, device="cuda")
    out = torch.empty(*rows_q, w.heads_q, w.head_dim_v, dtype=dtype, device="cuda")
    lse_shape = (*rows_q[:-1], w.heads_q, rows_q[-1])
    return q, k, v, out, torch.empty(*lse_shape, dtype=torch.float32, device="cuda")


def packing(workload: Workload, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> dict[str, Any]:
    """Return FA4's arguments for packed sequences, as its flash_attn_varlen_func passes them."""
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return {**offsets, "max_seqlen_q": workload.seqlen_q, "max_seqlen_k": workload.seqlen_k}


def fake_packing(workload: Workload) -> dict[str, Any]:
    """Return the same on unfilled offsets, for compiling; nothing for a dense workload."""
    if workload.layout == "dense":
        return {}
    offsets = (torch.empty(workload.batch + 1, dtype=torch.int32, device="cuda") for _ in range(2))
    return packing(workload, *offsets)


def _arguments(config: Config, workload: Workload, sparsity: BlockSparseTensorsTorch | None) -> dict[str, Any]:
    """Return FA4's keyword arguments for a config; the same for fake and for real tensors."""
    arguments = pattern_arguments(config, workload, sparsity)
    if not config.is_stock:
        arguments["tile_mn"] = (config["tile_m"], config["tile_n"])
        arguments["mma_pv_is_rs"] = config["mma_pv_is_rs"]
        arguments["intra_wg_overlap"] = config["intra_wg_overlap"]
        arguments["pack_gqa"] = config["pack_gqa"]
    return arguments


def pattern_arguments(config: Config, workload: Workload, sparsity: BlockSparseTensorsTorch | None) -> dict[str, Any]:
    """Return the forward's arguments for a pattern; its scores are ours, unless stock has an argument for them."""
    arguments = mask_arguments(workload, sparsity)
    if workload.pattern.score("alibi") or not config.is_stock:
        arguments["score_mod"] = pattern_cute.score_mod(workload)
    else:
        arguments["softcap"] = pattern_torch.softcap_of(workload)
    return pattern_cute.with_scalars(arguments, workload)


def mask_arguments(workload: Workload, sparsity: BlockSparseTensorsTorch | None) -> dict[str, Any]:
    """Return FA4's arguments for a pattern's masks: block lists with a mask_mod, or its native ones."""
    pattern = workload.pattern
    if sparsity is not None:
        arguments: dict[str, Any] = {"mask_mod": pattern_cute.mask_mod(workload), "block_sparse_tensors": sparsity}
        if pattern.mask("document"):
            arguments["aux_tensors"] = [pattern_torch.document_ids(workload, "cuda")]
        return arguments
    if window := pattern.mask("sliding_window"):
        # FA4 counts the keys to the left of the query, so a window of w tokens is w - 1 of them
        return {"window_size_left": int(window["window"]) - 1, "window_size_right": 0}  # type: ignore[arg-type]
    return {"causal": pattern.mask("causal") is not None}


def _block_lists(config: Config, workload: Workload, *, fake: bool) -> BlockSparseTensorsTorch | None:
    if not uses_block_mask(config, workload):
        return None
    return (fake_lists if fake else real_lists)(workload, block_size(config))


def fake_lists(workload: Workload, size: tuple[int, int]) -> BlockSparseTensorsTorch:
    """Return block lists of the right shapes and strides, for compiling.

    With lists of full blocks, always: FA4 b36 cannot compile a forward without them.
    """
    rows, columns = -(-workload.seqlen_q // size[0]), -(-workload.seqlen_k // size[1])
    count = torch.empty(1, 1, rows, dtype=torch.int32, device="cuda")
    index = torch.empty(1, 1, rows, columns, dtype=torch.int32, device="cuda")
    return BlockSparseTensorsTorch(count, index, count, index, block_size=size)


def real_lists(workload: Workload, size: tuple[int, int]) -> BlockSparseTensorsTorch:
    """Return the block lists of the pattern, from FlexAttention's BlockMask."""
    from tuner.families import flex

    mask = flex.make_block_mask(workload, "cuda", size)
    assert mask is not None
    return BlockSparseTensorsTorch(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, block_size=size
    )
