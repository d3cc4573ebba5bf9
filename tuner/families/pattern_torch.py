"""Patterns as torch functions of indices: for FlexAttention and for the reference.

Index tensors may have any shapes that broadcast. ``heads_q`` fixes the ALiBi slopes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuner.errors import PatternError
from tuner.pattern import document_lengths
from tuner.workload import Workload

Tensor = torch.Tensor
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def document_ids(workload: Workload, device: Any) -> Tensor | None:
    """Return the document number of every position, int32 of shape (seqlen_k,), or None."""
    part = workload.pattern.mask("document")
    if part is None:
        return None
    lengths = torch.tensor(document_lengths(part, workload.seqlen_k), device=device)
    numbers = torch.arange(len(lengths), device=device, dtype=torch.int32)
    return torch.repeat_interleave(numbers, lengths, output_size=workload.seqlen_k)


def mask_mod(workload: Workload, device: Any) -> MaskMod | None:
    """Return mask_mod(b, h, q_idx, kv_idx) -> bool for FlexAttention; None if nothing is masked."""
    pattern, shift = workload.pattern, workload.seqlen_k - workload.seqlen_q
    tests: list[Callable[[Tensor, Tensor], Tensor]] = []
    if pattern.mask("causal"):
        tests.append(lambda q, kv: kv <= q + shift)
    if part := pattern.mask("sliding_window"):
        window = int(part["window"])  # type: ignore[arg-type]
        tests.append(lambda q, kv: (kv <= q + shift) & (q + shift - kv < window))
    if part := pattern.mask("prefix_lm"):
        prefix = int(part["prefix"])  # type: ignore[arg-type]
        tests.append(lambda q, kv: (kv <= q + shift) | (kv < prefix))
    ids = document_ids(workload, device)
    if ids is not None:
        tests.append(lambda q, kv: ids[q] == ids[kv])
    if not tests:
        return None
    if len(tests) == 1:  # one closure the less for the compiler to trace
        only = tests[0]
        return lambda b, h, q, kv: only(q, kv)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        out = tests[0](q, kv)
        for test in tests[1:]:
            out = out & test(q, kv)
        return out

    return keep


def score_mod(workload: Workload) -> ScoreMod | None:
    """Return score_mod(score, b, h, q_idx, kv_idx) -> score for FlexAttention; None if there is none."""
    cap, alibi = softcap_of(workload), workload.pattern.score("alibi") is not None
    shift, heads = workload.seqlen_k - workload.seqlen_q, workload.heads_q
    if cap is None and not alibi:
        return None

    def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if alibi:
            slope = torch.exp2(-8.0 * (h + 1) / heads)
            score = score - slope * (q + shift - kv).abs()
        return score

    return modify


def softcap_of(workload: Workload) -> float | None:
    """Return the cap of the pattern's softcap, or None."""
    part = workload.pattern.score("softcap")
    return None if part is None else float(part["cap"])  # type: ignore[arg-type]


def refuse_captured_gradients(function: ScoreMod | None) -> ScoreMod | None:
    """Return a score modification as it is, unless it captures a tensor that wants a gradient.

    Raises:
        PatternError: naming the tensor. Backward kernels here give dq, dk and dv and nothing else.
    """
    for name, cell in zip(*_captures(function), strict=True):
        if isinstance(cell, Tensor) and cell.requires_grad:
            raise PatternError(
                f"the score modification captures {name}, a tensor of shape {tuple(cell.shape)} that requires a "
                "gradient; only dq, dk and dv are computed: detach it, or tune op fwd"
            )
    return function


def _captures(function: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    if function is None or function.__closure__ is None:
        return (), ()
    return function.__code__.co_freevars, tuple(cell.cell_contents for cell in function.__closure__)
