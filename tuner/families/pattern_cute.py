"""Patterns as CuTe functions: what FA4 compiles into its kernels.

The functions are traced, not run: indices are ``TensorSSA`` values of Int32, scores of Float32.
Each function carries ``__cute_hash__``, FA4's hook for its compile key: the canonical text of the
pattern, so that equal patterns share a compiled kernel in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils

from tuner.families.pattern_torch import softcap_of
from tuner.workload import Workload

# Of this file: a change here must not find kernels that the old text compiled.
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def mask_mod(workload: Workload) -> Callable[..., Any]:
    """Return the mask_mod of the pattern's masks; a document mask reads aux_tensors[0], int32 (seqlen,)."""
    pattern, shift = workload.pattern, workload.seqlen_k - workload.seqlen_q
    tests: list[Callable[[Any, Any, Any], Any]] = []
    if pattern.mask("causal"):
        tests.append(lambda q, kv, aux: kv <= q + _int(shift))
    if part := pattern.mask("sliding_window"):
        window = int(part["window"])  # type: ignore[arg-type]
        tests.append(lambda q, kv, aux: (kv <= q + _int(shift)) & (kv > q + _int(shift - window)))
    if part := pattern.mask("prefix_lm"):
        prefix = int(part["prefix"])  # type: ignore[arg-type]
        tests.append(lambda q, kv, aux: (kv <= q + _int(shift)) | (kv < _int(prefix)))
    if pattern.mask("document"):
        tests.append(lambda q, kv, aux: _int(aux[0][q[0]]) == _int(aux[0][kv[0]]))

    def keep(b: Any, h: Any, q: Any, kv: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return reduce(lambda x, y: x & y, (test(q, kv, aux_tensors) for test in tests))

    return _hashed(keep, f"mask|{shift}|{' & '.join(map(str, pattern.masks))}")


def score_mod(workload: Workload) -> Callable[..., Any] | None:
    """Return the score_mod of the pattern's score modifications, or None."""
    cap, alibi = softcap_of(workload), workload.pattern.score("alibi") is not None
    shift, heads = workload.seqlen_k - workload.seqlen_q, workload.heads_q
    varlen = workload.layout == "varlen"  # there indices count within a sequence, and each has a shift of its own
    if cap is None and not alibi:
        return None

    def modify(score: Any, b: Any, h: Any, *, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        if cap is not None:
            # FA4's own softcap divides; the reciprocal saves a division an element
            score = cute.math.tanh(score * (1.0 / cap), fastmath=True) * cap
        if alibi:
            slope = cute.math.exp2((h + 1).to(cutlass.Float32) * (-8.0 / heads), fastmath=True)
            ends_apart = _int(seqlen_info.seqlen_k - seqlen_info.seqlen_q) if varlen else shift
            distance = (q_idx + ends_apart - kv_idx).to(cutlass.Float32)
            # max(x, -x): the absolute value without leaving TensorSSA
            score = score - slope * cute.where(distance < 0.0, -distance, distance)
        return score

    modify.__vec_size__ = 2  # type: ignore[attr-defined]  # sm_90's widest; FA4 falls to 1 beside aux tensors
    where = "varlen" if varlen else str(shift)
    return _hashed(modify, f"score|{where}|{heads if alibi else 0}|{' + '.join(map(str, workload.pattern.scores))}")


def score_mod_bwd(workload: Workload) -> Callable[..., Any] | None:
    """Return what turns the gradient of the modified score into that of the score, or None.

    It gets the scaled score from before the modification: d(cap tanh(s / cap)) / ds = 1 - tanh(s / cap)^2,
    and ALiBi adds a constant.
    """
    cap = softcap_of(workload)
    if not workload.pattern.scores:
        return None

    def backward(
        grad: Any, score: Any, b: Any, h: Any, *, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
    ) -> Any:
        if cap is None:
            return grad
        t = cute.math.tanh(score * (1.0 / cap), fastmath=True)
        return grad * (1.0 - t * t)

    return _hashed(backward, f"score_bwd|{' + '.join(map(str, workload.pattern.scores))}")


def _int(value: Any) -> Any:
    return utils.scalar_to_ssa(value, cutlass.Int32)


def _hashed(function: Callable[..., Any], text: str) -> Callable[..., Any]:
    digest = hashlib.sha256(f"{_SOURCE}|{text}".encode()).hexdigest()
    function.__cute_hash__ = digest  # type: ignore[attr-defined]
    return function
