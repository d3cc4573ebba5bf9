"""Packed sequences computed: the reference and the CPU's kernels against each sequence alone and autograd."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.test_gradients import by_autograd, seen
from tests.unit.test_reference import SHAPE, attend
from tuner import reference, verify
from tuner.families import load
from tuner.families.base import Room
from tuner.lab_torch import BackwardInputs, TorchLab, make_inputs
from tuner.target import named
from tuner.workload import Workload

CPU = named("cpu")
PAIRS = [(4, 9), (1, 1), (0, 3), (6, 6), (1, 7), (0, 0)]
PATTERNS = ["full", "causal", "sliding_window(3)", "causal + softcap(1.5) + alibi", "full + alibi"]


def packed(pattern: str, pairs: list[tuple[int, int]] = PAIRS, **changes: Any) -> Workload:
    sides = {"lengths_q": [q for q, _ in pairs], "lengths_k": [k for _, k in pairs]}
    shape = {k: v for k, v in SHAPE.items() if k != "batch"}
    return Workload.from_dict({**shape, **sides, "pattern": pattern, **changes})


def draw(w: Workload) -> list[torch.Tensor]:
    rng = np.random.default_rng(2)
    shapes = (
        (w.total_q, w.heads_q, w.head_dim),
        (w.total_k, w.heads_kv, w.head_dim),
        (w.total_k, w.heads_kv, w.head_dim_v),
        (w.total_q, w.heads_q, w.head_dim_v),
    )
    return [torch.from_numpy(2 * rng.standard_normal(s)) for s in shapes]


def alone(w: Workload) -> list[tuple[Workload, slice, slice]]:
    """Each sequence that has queries and keys as a dense workload, with its rows."""
    starts_q, starts_k = ([0, *accumulate(side)] for side in (w.lengths_q, w.lengths_k))
    return [
        (w.with_(layout="dense", batch=1, seqlen_q=q, seqlen_k=k), slice(a, a + q), slice(b, b + k))
        for (q, k), a, b in zip(w.sequences, starts_q, starts_k, strict=False)
        if q and k
    ]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_reference_is_that_of_each_sequence_alone(pattern: str) -> None:
    w = packed(pattern)
    q, k, v, _ = draw(w)
    found = reference.attention(q, k, v, w)
    assert found.dtype == torch.float64
    expected = np.zeros((w.total_q, w.heads_q, w.head_dim_v))
    for one, rows, keys in alone(w):
        expected[rows] = attend(*(t[None].numpy() for t in (q[rows], k[keys], v[keys])), one)[0]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_queries_without_keys_are_zero() -> None:
    w = packed("full", [(3, 0), (2, 5)])
    q, k, v, dout = draw(w)
    assert reference.attention(q, k, v, w)[:3].abs().max() == 0
    assert reference.log_sum_exp(q, k, v, w)[:, :3].max() == float("-inf")
    assert reference.gradients(q, k, v, dout, w)["dq"][:3].abs().max() == 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_are_those_of_autograd_on_each_sequence_alone(pattern: str) -> None:
    w = packed(pattern)
    inputs = draw(w)
    found = reference.gradients(*inputs, w)
    expected = [torch.zeros_like(t) for t in inputs[:3]]
    for one, rows, keys in alone(w):
        sides = (rows, keys, keys)
        parts = by_autograd([t[s][None] for t, s in zip(inputs, (*sides, rows), strict=True)], one, seen(one))
        for whole, side, part in zip(expected, sides, parts, strict=True):
            whole[side] = part[0]
    for name, whole in zip(("dq", "dk", "dv"), expected, strict=True):
        np.testing.assert_allclose(found[name].numpy(), whole.numpy(), rtol=1e-9, atol=1e-9)


def test_the_log_sum_exp_is_by_head_and_row_as_fa4_has_it() -> None:
    w = packed("causal + alibi")
    q, k, v, _ = draw(w)
    found = reference.log_sum_exp(q, k, v, w)
    assert found.shape == (w.heads_q, w.total_q)
    for one, rows, keys in alone(w):
        expected = reference.log_sum_exp(q[None, rows], k[None, keys], v[None, keys], one)[0]
        assert torch.equal(found[:, rows], expected)


def test_inputs_come_with_the_offsets_of_their_sequences() -> None:
    w = packed("causal", op="bwd")
    inputs = make_inputs(w, "cpu", 0)
    assert isinstance(inputs, BackwardInputs)
    assert inputs.packed is not None
    assert inputs.packed.cu_seqlens_q.tolist() == [0, 4, 5, 5, 11, 12, 12]
    assert inputs.packed.cu_seqlens_k.tolist() == [0, 9, 10, 13, 19, 26, 26]
    assert inputs.packed.cu_seqlens_q.dtype == torch.int32
    assert inputs.dq.shape == inputs.q.shape == (12, 4, 8)
    assert inputs.lse.shape == (4, 12)
    assert inputs.bytes > 0


@pytest.mark.parametrize("op", ["fwd", "bwd"])
@pytest.mark.parametrize(("pattern", "pairs"), [("full", PAIRS), ("causal", [(9, 9), (0, 0), (33, 33), (1, 1)])])
def test_the_cpu_is_right_also_on_lengths_that_it_is_not_timed_on(
    op: str, pattern: str, pairs: list[tuple[int, int]], tmp_path: Path
) -> None:
    w = packed(pattern, pairs, op=op, head_dim_v=8)
    lab, family = TorchLab(w, Room(CPU, tmp_path), "eager"), load("sdpa_cpu")
    assert family.refuses(w, CPU) == ""
    kernel, verified_with = lab.build(family.stock(w)), set()
    for seed in range(4):
        inputs = lab.draw(seed)
        assert inputs.packed is not None
        verified_with.add(inputs.packed.workload.sequences)
        found, expected = (verify.named(x) for x in (lab.run(kernel, inputs), lab.reference(inputs)))
        for name in expected:
            assert verify.errors(found[name], expected[name]).whole < 2e-6, name
    assert w.sequences in verified_with
    assert len(verified_with) == 3  # two draws with its own lengths, two with lengths of their own


def test_a_cpu_that_aligns_to_the_top_left_refuses_what_differs_in_any_sequence() -> None:
    assert "aligns causal to the top left" in load("sdpa_cpu").refuses(packed("causal"), CPU)
    assert load("sdpa_cpu").refuses(packed("causal", [(3, 3), (5, 5)]), CPU) == ""
