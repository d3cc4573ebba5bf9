"""The reference gradients against torch's autograd in float64, for every pattern, grouped heads and masked rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.test_reference import DOCUMENTS, MASKS, SCORES, make, visible
from tuner import reference
from tuner.errors import PatternError
from tuner.families import pattern_torch
from tuner.workload import Workload

SOME_SCORES = (SCORES[0], SCORES[3])
WORKLOADS = [
    *(make(m + s) for m, s in itertools.product(MASKS, SCORES)),
    *(make(f"{d} & {m}{s}" if m != "full" else d + s) for d, m, s in itertools.product(DOCUMENTS, MASKS, SOME_SCORES)),
    *(make(m + s, seqlen_q=5) for m, s in itertools.product(MASKS, SOME_SCORES)),  # keys that no query sees
    *(make(m + s, seqlen_q=1) for m, s in itertools.product(MASKS, SOME_SCORES)),
    *(make(m + s, seqlen_k=6) for m, s in itertools.product(("full", "prefix_lm(4)"), SOME_SCORES)),
    *(make("causal + softcap(2)", heads_q=6, heads_kv=kv) for kv in (1, 2, 3, 6)),
    make("causal", head_dim=24, head_dim_v=8),
]


def draw(workload: Workload) -> list[torch.Tensor]:
    w, rng = workload, np.random.default_rng(1)
    shapes = (
        (w.batch, w.seqlen_q, w.heads_q, w.head_dim),
        (w.batch, w.seqlen_k, w.heads_kv, w.head_dim),
        (w.batch, w.seqlen_k, w.heads_kv, w.head_dim_v),
        (w.batch, w.seqlen_q, w.heads_q, w.head_dim_v),
    )
    return [torch.from_numpy(2 * rng.standard_normal(s)) for s in shapes]


def seen(workload: Workload) -> torch.Tensor:
    w, shift = workload, workload.seqlen_k - workload.seqlen_q
    return torch.tensor([[visible(w, i + shift, j) for j in range(w.seqlen_k)] for i in range(w.seqlen_q)])


def scores(q: torch.Tensor, k: torch.Tensor, workload: Workload) -> torch.Tensor:
    """The modified scores, (batch, heads_q, seqlen_q, seqlen_k), by the table of tuner.pattern."""
    w, shift = workload, workload.seqlen_k - workload.seqlen_q
    keys = k.repeat_interleave(w.heads_q // w.heads_kv, dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q, keys) / w.head_dim**0.5
    if cap := w.pattern.score("softcap"):
        s = float(cap["cap"]) * torch.tanh(s / float(cap["cap"]))  # type: ignore[arg-type]
    if w.pattern.score("alibi"):
        i, j = torch.arange(w.seqlen_q)[:, None] + shift, torch.arange(w.seqlen_k)
        slopes = torch.tensor([2 ** (-8 * (h + 1) / w.heads_q) for h in range(w.heads_q)], dtype=torch.float64)
        s = s - slopes[:, None, None] * (i - j).abs()
    return s


def by_autograd(inputs: list[torch.Tensor], workload: Workload, keep: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of sum(out * dout), all scores at once; rows that see nothing are left out of the sum."""
    *qkv, dout = inputs
    q, k, v = (t.clone().requires_grad_() for t in qkv)
    rows = keep.any(-1)
    p = torch.softmax(scores(q, k, workload)[:, :, rows].masked_fill(~keep[rows], float("-inf")), dim=-1)
    values = v.repeat_interleave(workload.heads_q // workload.heads_kv, dim=2)
    out = torch.einsum("bhij,bjhd->bihd", p, values)
    return torch.autograd.grad((out * dout[:, rows]).sum(), (q, k, v))


def check(found: dict[str, torch.Tensor], expected: tuple[torch.Tensor, ...]) -> None:
    assert list(found) == ["dq", "dk", "dv"]
    for gradient, right in zip(found.values(), expected, strict=True):
        assert gradient.dtype == torch.float64
        np.testing.assert_allclose(gradient.numpy(), right.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: f"{w.label} {w.head_dim_v}")
def test_the_gradients_are_those_of_autograd(workload: Workload) -> None:
    inputs = draw(workload)
    found = reference.gradients(*inputs, workload)
    assert [t.shape for t in found.values()] == [t.shape for t in inputs[:3]]
    check(found, by_autograd(inputs, workload, seen(workload)))


@pytest.mark.parametrize("workload", WORKLOADS[::5], ids=lambda w: f"{w.label} {w.head_dim_v}")
def test_the_log_sum_exp_is_the_definition(workload: Workload) -> None:
    q, k, v, _ = draw(workload)
    expected = scores(q, k, workload).masked_fill(~seen(workload), float("-inf")).logsumexp(-1)
    np.testing.assert_allclose(reference.log_sum_exp(q, k, v, workload).numpy(), expected.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pattern", ["full", "full + softcap(2) + alibi"])
def test_rows_that_see_nothing_and_keys_that_nobody_sees_have_zero_gradients(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pattern masks a whole row by itself; own masks may."""
    workload = make(pattern)
    inputs = draw(workload)
    monkeypatch.setattr(
        pattern_torch, "mask_mod", lambda w, device: lambda b, h, q, kv: (q % 3 != 1) & (kv <= q) & (kv != 2)
    )
    i, j = torch.arange(9)[:, None], torch.arange(9)
    keep = (i % 3 != 1) & (j <= i) & (j != 2)
    found = reference.gradients(*inputs, workload)
    check(found, by_autograd(inputs, workload, keep))
    assert not found["dq"][:, 1::3].any()
    assert not found["dk"][:, 2].any()
    assert not found["dv"][:, 2].any()
    assert torch.isneginf(reference.log_sum_exp(*inputs[:3], workload)[:, :, 1::3]).all()


@pytest.mark.parametrize("score_bytes", [1, 500, 1000])
def test_the_size_of_a_chunk_does_not_matter(score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make("causal & document(mean=3) + softcap(2) + alibi")
    inputs = draw(workload)
    whole = reference.gradients(*inputs, workload)
    monkeypatch.setattr(reference, "_SCORE_BYTES", 6 * score_bytes)  # rows of 1, 3 and 6 of 9
    for name, chunked in reference.gradients(*inputs, workload).items():
        np.testing.assert_allclose(chunked.numpy(), whole[name].numpy(), rtol=1e-12, atol=1e-14)


def test_a_score_modification_that_captures_a_wish_for_a_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bias = torch.zeros(9, requires_grad=True)

    def modify(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return score + bias[kv]

    monkeypatch.setattr(pattern_torch, "score_mod", lambda w: modify)
    workload = make("full")
    words = r"captures bias, a tensor of shape \(9,\) that requires a gradient; only dq, dk and dv.*detach"
    with pytest.raises(PatternError, match=words):
        reference.gradients(*draw(workload), workload)
    bias = bias.detach() + 1  # the closure sees the new one
    plain = by_autograd(draw(workload), workload, torch.ones(9, 9, dtype=torch.bool))
    check(reference.gradients(*draw(workload), workload), plain)  # the same for every key: no change
