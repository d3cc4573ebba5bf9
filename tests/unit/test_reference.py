"""The reference against the pattern's definition, one element at a time, for every pattern there is."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tuner import reference
from tuner.families import pattern_torch
from tuner.pattern import document_lengths, parse
from tuner.workload import Workload

Array = npt.NDArray[np.float64]

MASKS = (
    "full",
    "causal",
    "sliding_window(1)",
    "sliding_window(3)",
    "prefix_lm(4)",
    "sliding_window(3) & prefix_lm(2)",
)
DOCUMENTS = ("document(lengths=[2,1,4,2])", "document(mean=3,seed=1)")
SCORES = ("", " + softcap(2.5)", " + alibi", " + softcap(1.5) + alibi")
SHAPE = {"batch": 2, "heads_q": 4, "heads_kv": 2, "head_dim": 8, "head_dim_v": 16, "dtype": "float32"}


def make(pattern: str, seqlen_q: int = 9, seqlen_k: int = 9, **changes: int) -> Workload:
    shape = {**SHAPE, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **changes}
    return Workload(**shape, pattern=parse(pattern))  # type: ignore[arg-type]


WORKLOADS = [
    *(make(m + s) for m, s in itertools.product(MASKS, SCORES)),
    *(make(f"{d} & {m}{s}" if m != "full" else d + s) for d, m, s in itertools.product(DOCUMENTS, MASKS, SCORES)),
    *(make(m + s, seqlen_q=5) for m, s in itertools.product(MASKS, SCORES)),  # fewer queries than keys
    *(make(m + s, seqlen_q=1) for m, s in itertools.product(MASKS, SCORES[2:])),  # decoding
    *(make(m + s, seqlen_k=6) for m, s in itertools.product(("full", "prefix_lm(4)"), SCORES)),  # more
    *(make("causal + alibi", heads_q=6, heads_kv=kv) for kv in (1, 2, 3, 6)),
    make("causal", head_dim=24, head_dim_v=8),
    make("causal", batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_k=1),
]


def visible(workload: Workload, i: int, j: int) -> bool:
    """Whether key j takes part for query i (already shifted), as the table of tuner.pattern has it."""
    for part in workload.pattern.masks:
        match part.name:
            case "causal":
                seen = j <= i
            case "sliding_window":
                seen = j <= i and i - j < int(part["window"])  # type: ignore[arg-type]
            case "prefix_lm":
                seen = j <= i or j < int(part["prefix"])  # type: ignore[arg-type]
            case "document":
                ends = list(itertools.accumulate(document_lengths(part, workload.seqlen_k)))
                seen = sum(end <= i for end in ends) == sum(end <= j for end in ends)
            case other:
                raise AssertionError(f"no definition of {other} here")
        if not seen:
            return False
    return True


def modified(workload: Workload, score: float, head: int, i: int, j: int) -> float:
    if cap := workload.pattern.score("softcap"):
        score = float(cap["cap"]) * math.tanh(score / float(cap["cap"]))  # type: ignore[arg-type]
    if workload.pattern.score("alibi"):
        score -= 2 ** (-8 * (head + 1) / workload.heads_q) * abs(i - j)
    return score


def attend(q: Array, k: Array, v: Array, workload: Workload) -> Array:
    """Attention with one loop for each index."""
    w, shift = workload, workload.seqlen_k - workload.seqlen_q
    out = np.zeros((w.batch, w.seqlen_q, w.heads_q, w.head_dim_v))
    for b, row, h in itertools.product(range(w.batch), range(w.seqlen_q), range(w.heads_q)):
        kv_head, i = h // (w.heads_q // w.heads_kv), row + shift
        seen = [j for j in range(w.seqlen_k) if visible(w, i, j)]
        scores = [float(q[b, row, h] @ k[b, j, kv_head]) / math.sqrt(w.head_dim) for j in seen]
        weights = [math.exp(modified(w, s, h, i, j)) for s, j in zip(scores, seen, strict=True)]
        for weight, j in zip(weights, seen, strict=True):
            out[b, row, h] += weight / sum(weights) * v[b, j, kv_head]
    return out


def draw(workload: Workload) -> list[torch.Tensor]:
    w, rng = workload, np.random.default_rng(0)
    shapes = (
        (w.batch, w.seqlen_q, w.heads_q, w.head_dim),
        (w.batch, w.seqlen_k, w.heads_kv, w.head_dim),
        (w.batch, w.seqlen_k, w.heads_kv, w.head_dim_v),
    )
    return [torch.from_numpy(2 * rng.standard_normal(s)) for s in shapes]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: f"{w.label} {w.head_dim_v}")
def test_the_reference_is_the_definition(workload: Workload) -> None:
    q, k, v = draw(workload)
    expected = attend(q.numpy(), k.numpy(), v.numpy(), workload)
    found = reference.attention(q, k, v, workload)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: f"{w.label} {w.head_dim_v}")
def test_the_mask_and_the_scores_are_the_definition(workload: Workload) -> None:
    w, shift = workload, workload.seqlen_k - workload.seqlen_q
    keep, modify = pattern_torch.mask_mod(w, "cpu"), pattern_torch.score_mod(w)
    assert (keep is None) == (not w.pattern.masks)
    assert (modify is None) == (not w.pattern.scores)
    for row, j, h in itertools.product(range(w.seqlen_q), range(w.seqlen_k), range(w.heads_q)):
        b, head, qi, kj = (torch.tensor(x) for x in (0, h, row, j))
        if keep is not None:
            assert bool(keep(b, head, qi, kj)) is visible(w, row + shift, j)
        if modify is not None:
            score = torch.tensor(1.75, dtype=torch.float64)
            expected = modified(w, 1.75, h, row + shift, j)
            assert float(modify(score, b, head, qi, kj)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("score_bytes", [1, 500, 1000])
def test_the_size_of_a_chunk_does_not_matter(score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make("causal & document(mean=3) + alibi")
    q, k, v = draw(workload)
    whole = reference.attention(q, k, v, workload)
    monkeypatch.setattr(reference, "_SCORE_BYTES", score_bytes)  # rows of 1, 3 and 6 of 9
    np.testing.assert_allclose(reference.attention(q, k, v, workload).numpy(), whole.numpy(), rtol=1e-12)


def test_half_precision_inputs_are_computed_in_double() -> None:
    workload = make("causal", seqlen_q=40, seqlen_k=40)
    q, k, v = (t.bfloat16() for t in draw(workload))
    expected = reference.attention(q.double(), k.double(), v.double(), workload)
    assert torch.equal(reference.attention(q, k, v, workload), expected)


def test_documents_are_numbered_by_position() -> None:
    ids = pattern_torch.document_ids(make("document(lengths=[2,1,4,2])"), "cpu")
    assert ids is not None
    assert ids.tolist() == [0, 0, 1, 2, 2, 2, 2, 3, 3]
    assert pattern_torch.document_ids(make("causal"), "cpu") is None
