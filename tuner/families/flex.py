"""FlexAttention calls, compiled afresh for every config: shared by its families, forward and backward."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tuner.families import pattern_torch
from tuner.families.autograd import Backward, Joint
from tuner.families.base import Kernel
from tuner.workload import Workload

DEFAULT_BLOCK = 128  # FlexAttention's BLOCK_SIZE where none is given


def build(
    workload: Workload,
    device: str,
    block: tuple[int, int],
    options: Any = None,
    *,
    full_blocks: bool = True,
    mode: str | None = None,
) -> Kernel:
    """Return flex_attention under torch.compile for the pattern, with a BlockMask of ``block`` = (q, kv).

        Takes inputs of shape (batch, seqlen, heads, head_dim) and returns the output likewise, or for a
            backward workload dq, dk and dv; for both together all four. Raises PatternError if these are not all the
        gradients wanted. A call raises RuntimeError if torch.compile has given up on it. ``mode`` is
    torch.compile's.
    """
    score_mod = pattern_torch.score_mod(workload)
    block_mask = make_block_mask(workload, device, block, full_blocks=full_blocks)
    gqa = workload.heads_q != workload.heads_kv

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling():  # a constant where this is traced, so it costs nothing there
            raise RuntimeError("torch.compile fell back to Python, where FlexAttention runs unfused")
        return flex_attention(
            q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=gqa, kernel_options=options
        )

    compiled = torch.compile(_own_code(attend), dynamic=False, fullgraph=True, mode=mode)

    if workload.op != "fwd":
        pattern_torch.refuse_captured_gradients(score_mod)
        # A backward that may destroy what its forward saved cannot run twice on one graph.
        functorch_config.donated_buffer = False
        return (Backward if workload.op == "bwd" else Joint)(
            lambda q, k, v: compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        )

    def run(inputs: Any) -> torch.Tensor:
        out: torch.Tensor = compiled(inputs.q.transpose(1, 2), inputs.k.transpose(1, 2), inputs.v.transpose(1, 2))
        return out.transpose(1, 2)

    return run


def make_block_mask(
    workload: Workload, device: str, block: tuple[int, int], *, full_blocks: bool = True
) -> BlockMask | None:
    """Return the pattern's BlockMask, shared by batch and heads, or None if nothing is masked.

    Without ``full_blocks`` it lists blocks that nothing hides like those that are hidden in part: the
    kernel then has one loop, and asks the mask of every element.
    """
    keep = pattern_torch.mask_mod(workload, device)
    if keep is None:
        return None
    mask = create_block_mask(keep, None, None, workload.seqlen_q, workload.seqlen_k, device=device, BLOCK_SIZE=block)
    return mask if full_blocks else _in_one_list(mask)


def _in_one_list(mask: BlockMask) -> BlockMask:
    """Return the same mask without lists of full blocks."""
    # create_block_mask's own switch for it is younger than torch 2.11
    dense = mask.to_dense()
    indices = torch.argsort(dense, dim=-1, descending=True, stable=True)
    count = dense.sum(dim=-1)
    return BlockMask.from_kv_blocks(
        count.to(torch.int32),
        indices.to(torch.int32).contiguous(),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
    )


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a code object of its own.

    Dynamo keeps its compiled graphs on the code object and stops compiling after eight of them:
    FlexAttention then runs unfused, 200 times slower, with only a warning.
    """
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    return copy
