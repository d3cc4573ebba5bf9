"""Patterns as CuTe functions: what FA4 compiles into its kernels.

The functions are traced, not run: indices are ``TensorSSA`` values of Int32, scores of Float32.
A pattern's numbers (window, prefix, cap, the step of ALiBi's slopes) are inputs of the kernel: FA4's
``aux_scalars``, in the order of ``_numbers``. The lengths come with FA4's ``seqlen_info``. So each
function carries in ``__cute_hash__``, FA4's hook for its compile key, only the names of the pattern's
pieces: a new window or cap compiles nothing.
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


def with_scalars(arguments: dict[str, Any], workload: Workload) -> dict[str, Any]:
    """Return a call's arguments with what this module's functions among them read at run time."""
    if arguments.get("softcap"):  # FA4's own softcap takes no run-time scalars beside it
        return arguments | ({"mask_mod": mask_mod(workload, fixed=True)} if "mask_mod" in arguments else {})
    if arguments.get("mask_mod") is None and arguments.get("score_mod") is None:
        return arguments
    # FA4's compile key holds their types, and None where there are none
    scalars = tuple((cutlass.Int32 if type(n) is int else cutlass.Float32)(n) for n in _numbers(workload).values())
    return arguments | {"aux_scalars": scalars} if scalars else arguments


def mask_mod(workload: Workload, *, fixed: bool = False) -> Callable[..., Any]:
    """Return the mask_mod of the pattern's masks; a document mask reads aux_tensors[0], int32 (seqlen,).

    ``fixed`` compiles the pattern's numbers in, for a call that takes no ``aux_scalars``.
    """
    pattern, at, numbers = workload.pattern, _positions(workload), tuple(_numbers(workload).values())
    tests: list[Callable[[Any, Any, Any, Any], Any]] = []  # q is the query's place among the keys
    if pattern.mask("causal"):
        tests.append(lambda q, kv, aux, scalars: kv <= q)
    if pattern.mask("sliding_window"):
        tests.append(lambda q, kv, aux, scalars: (kv <= q) & (kv > q - _int(scalars[at["window"]])))
    if pattern.mask("prefix_lm"):
        tests.append(lambda q, kv, aux, scalars: (kv <= q) | (kv < _int(scalars[at["prefix"]])))
    if pattern.mask("document"):
        tests.append(lambda q, kv, aux, scalars: _int(aux[0][q[0]]) == _int(aux[0][kv[0]]))
    aligned = pattern.mask("document") is not None  # a workload's documents hold as many queries as keys

    def keep(b: Any, h: Any, q: Any, kv: Any, seqlen_info: Any, aux_tensors: Any, aux_scalars: Any = None) -> Any:
        scalars, place = numbers if fixed else aux_scalars, q if aligned else q + _shift(seqlen_info)
        return reduce(lambda x, y: x & y, (test(place, kv, aux_tensors, scalars) for test in tests))

    return _hashed(keep, f"mask fixed {pattern}" if fixed else "mask", workload)


def score_mod(workload: Workload) -> Callable[..., Any] | None:
    """Return the score_mod of the pattern's score modifications, or None."""
    softcap, alibi = softcap_of(workload) is not None, workload.pattern.score("alibi") is not None
    at = _positions(workload)
    if not softcap and not alibi:
        return None

    def modify(
        score: Any, b: Any, h: Any, *, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any, aux_scalars: Any
    ) -> Any:
        if softcap:
            # FA4's own softcap divides; the reciprocal saves a division an element
            score = cute.math.tanh(score * aux_scalars[at["1/cap"]], fastmath=True) * aux_scalars[at["cap"]]
        if alibi:
            slope = cute.math.exp2((h + 1).to(cutlass.Float32) * aux_scalars[at["slope_step"]], fastmath=True)
            distance = (q_idx + _shift(seqlen_info) - kv_idx).to(cutlass.Float32)
            # max(x, -x): the absolute value without leaving TensorSSA
            score = score - slope * cute.where(distance < 0.0, -distance, distance)
        return score

    modify.__vec_size__ = 2  # type: ignore[attr-defined]  # sm_90's widest; FA4 falls to 1 beside aux tensors
    return _hashed(modify, "score", workload)


def score_mod_bwd(workload: Workload) -> Callable[..., Any] | None:
    """Return what turns the gradient of the modified score into that of the score, or None.

    It gets the scaled score from before the modification: d(cap tanh(s / cap)) / ds = 1 - tanh(s / cap)^2,
    and ALiBi adds a constant.
    """
    softcap, at = softcap_of(workload) is not None, _positions(workload)
    if not workload.pattern.scores:
        return None

    def backward(grad: Any, score: Any, b: Any, h: Any, *, aux_scalars: Any, **others: Any) -> Any:
        if not softcap:
            return grad
        t = cute.math.tanh(score * aux_scalars[at["1/cap"]], fastmath=True)
        return grad * (1.0 - t * t)

    return _hashed(backward, "score_bwd", workload)


def _numbers(workload: Workload) -> dict[str, int | float]:
    """Return a pattern's numbers by name; which there are and their order follow from its pieces' names."""
    pattern, numbers = workload.pattern, dict[str, int | float]()
    for mask, key in (("sliding_window", "window"), ("prefix_lm", "prefix")):
        if part := pattern.mask(mask):
            numbers[key] = int(part[key])  # type: ignore[arg-type]
    if (cap := softcap_of(workload)) is not None:
        numbers |= {"cap": cap, "1/cap": 1.0 / cap}
    if pattern.score("alibi"):
        numbers["slope_step"] = -8.0 / workload.heads_q
    return numbers


def _positions(workload: Workload) -> dict[str, int]:
    return {name: i for i, name in enumerate(_numbers(workload))}


def _shift(seqlen_info: Any) -> Any:
    """Return how far the first query stands behind the first key: bottom-right aligned, also of a packed sequence."""
    return _int(seqlen_info.seqlen_k - seqlen_info.seqlen_q)


def _int(value: Any) -> Any:
    return utils.scalar_to_ssa(value, cutlass.Int32)


def _hashed(function: Callable[..., Any], kind: str, workload: Workload) -> Callable[..., Any]:
    pattern = workload.pattern
    names = f"{'&'.join(p.name for p in pattern.masks)}|{'+'.join(p.name for p in pattern.scores)}"
    digest = hashlib.sha256(f"{_SOURCE}|{kind}|{names}".encode()).hexdigest()
    function.__cute_hash__ = digest  # type: ignore[attr-defined]
    return function
