"""Packed sequences as values: lengths in their forms, keys, what is refused, and the count of work."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_workload import naive_pairs
from tuner import lengths
from tuner.errors import WorkloadError
from tuner.pattern import document_lengths, parse
from tuner.workload import Workload

BASE: dict[str, Any] = {"heads_q": 6, "heads_kv": 3, "head_dim": 64}


def packed(**values: Any) -> Workload:
    return Workload.from_dict({**BASE, **values})


def test_lengths_bring_batch_seqlens_and_layout() -> None:
    w = packed(lengths_q=[3, 0, 5], lengths_k="9,4,20")
    assert (w.layout, w.batch, w.seqlen_q, w.seqlen_k, w.total_q, w.total_k) == ("varlen", 3, 5, 20, 8, 33)
    assert w.sequences == ((3, 9), (0, 4), (5, 20))


def test_lengths_are_drawn_as_a_patterns_documents_are() -> None:
    drawn = packed(batch=4, lengths="mean=300, seed=7").lengths_q
    documents = document_lengths(parse("document(mean=300,seed=7)").masks[0], 100_000)
    assert drawn == documents[:4]
    assert (
        drawn == packed(batch=4, lengths="mean=300,seed=7").lengths_k != packed(batch=4, lengths="mean=300").lengths_q
    )


@given(st.lists(st.integers(0, 3) | st.integers(0, 10**6), min_size=1, max_size=30))
def test_the_text_of_lengths_reads_back(given_lengths: list[int]) -> None:
    text = lengths.text(tuple(given_lengths))
    assert lengths.read(text, None, "lengths") == tuple(given_lengths)
    assert lengths.read(str(given_lengths), None, "lengths") == tuple(given_lengths)


def test_the_key_is_stable_and_short_where_lengths_repeat() -> None:
    w = packed(lengths="512*3,100", pattern="causal")
    assert w.key == "w1|fwd|bfloat16|b4|hq6|hkv3|sq512|sk512|d64|dv64|varlen(512*3,100)|det0|causal"
    decode = packed(lengths_q="1*50000", lengths_k="8192,300*49999")
    assert decode.key.endswith("|sq1|sk8192|d64|dv64|varlen(1*50000;8192,300*49999)|det0|full")
    assert decode.label == "full b50000 h6/3 varlen s1x8192 t50000x15007892 d64"
    assert w.label == "causal b4 h6/3 varlen s512 t1636 d64"


def test_every_order_and_side_of_lengths_has_a_key_of_its_own() -> None:
    pairs = [([1, 2], [2, 2]), ([2, 1], [2, 2]), ([2, 2], [2, 2]), ([2, 2], [1, 2]), ([2], [2]), ([2, 0], [2, 0])]
    keys = {packed(lengths_q=q, lengths_k=k).key for q, k in pairs}
    keys.add(packed(batch=2, seqlen_q=2, seqlen_k=2).key)
    assert len(keys) == len(pairs) + 1


def test_a_copy_keeps_or_changes_the_lengths() -> None:
    w = packed(lengths=[5, 9])
    assert w.with_(op="bwd").sequences == w.sequences
    longer = w.with_(lengths_q=[1] * 3, lengths_k=[7] * 3)
    assert (longer.batch, longer.seqlen_q, longer.seqlen_k) == (3, 1, 7)
    dense = w.with_(layout="dense")
    assert (dense.layout, dense.lengths_q, dense.seqlen_q, "lengths_q" in dense.to_dict()) == ("dense", (), 9, False)
    assert dense.with_(lengths_q=[9, 5], lengths_k=[9, 5]).layout == "varlen"
    assert Workload.from_dict(json.loads(json.dumps(longer.to_dict()))) == longer


@pytest.mark.parametrize(
    "pattern", ["full", "causal", "sliding_window(1)", "sliding_window(6)", "causal + softcap(3) + alibi"]
)
def test_work_is_counted_sequence_by_sequence(pattern: str) -> None:
    pairs = [(1, 20), (7, 9), (7, 9), (0, 5), (13, 13), (0, 0)]
    if pattern == "full":
        pairs += [(9, 4), (3, 0)]
    w = packed(lengths_q=[q for q, _ in pairs], lengths_k=[k for _, k in pairs], pattern=pattern, head_dim_v=32)
    alone = [w.with_(layout="dense", batch=1, seqlen_q=q, seqlen_k=k) for q, k in pairs if q and k]
    expected = sum(naive_pairs(one) for one in alone)
    assert w.visible_pairs() == expected
    assert w.flops() == 2 * 6 * expected * (64 + 32) == sum(one.flops() for one in alone)
    assert w.with_(op="bwd").flops() == 2.5 * w.flops()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"lengths": [5], "layout": "dense"}, "lengths_q is given with layout dense; write layout varlen"),
        ({"layout": "varlen", "batch": 1, "seqlen_q": 1, "seqlen_k": 1}, "layout varlen needs lengths_q"),
        ({"lengths": [5, 6], "batch": 3}, "lengths_q has 2 lengths and batch is 3"),
        ({"lengths": []}, "workload field seqlen_q is missing|batch is 0|needs lengths_q"),
        ({"lengths": [0, 0]}, "seqlen_q is 0"),
        ({"lengths": [5, -1]}, "lengths_q has a length of -1"),
        ({"lengths": [5, True]}, "lengths_q has a length of True"),
        ({"lengths": [5, "6"]}, "lengths_q has a length of '6'"),
        ({"lengths": {"mean": 5}}, r"lengths is \{'mean': 5\}; write numbers as"),
        ({"lengths": "5,,6"}, "lengths is '5,,6'; write"),
        ({"lengths": "mean=0", "batch": 2}, "has mean 0"),
        ({"lengths": "mean=5", "batch": 10**6}, "draws a length for each of batch, which is 1000000"),
        ({"lengths": "1*100001"}, "over 100000 sequences"),
        ({"lengths": [1] * 100_001}, "make them agree, with at most 100000"),
        ({"lengths": [1 << 24] * 128}, "sum to 2147483648; offsets are 32-bit"),
        ({"lengths": [5], "seqlen_k": 6}, "seqlen_k is 6, and the longest of lengths_k is 5"),
        ({"lengths": [5], "lengths_k": [5]}, "lengths and lengths_k contradict each other"),
        ({"lengths_k": [5]}, "lengths_q is missing beside lengths_k"),
        ({"lengths_q": [5, 6], "lengths_k": [5]}, "lengths_k has 1 lengths and batch is 2"),
        ({"lengths": [9], "pattern": "document(mean=3)"}, "layout varlen, which is packed already"),
        ({"lengths": [9], "pattern": "prefix_lm(3)"}, "needs a BlockMask, which packed calls lack"),
        ({"lengths_q": [1, 6], "lengths_k": [9, 5], "pattern": "causal"}, "sequence 1 has 6 queries and 5 keys"),
        ({"lengths_q": [3], "lengths_k": [0], "pattern": "sliding_window(2)"}, "seqlen_k is 0"),
    ],
)
def test_errors_name_the_value(values: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        packed(**values)


def test_ragged_lengths_fit_the_same_kernels_and_memory() -> None:
    rng = random.Random(0)
    changed = 0
    for seed in range(300):
        causal, alike = bool(seed % 2), bool(seed % 3)
        k = [rng.choice([0, 1, rng.randint(1, 40)]) for _ in range(rng.randint(1, 9))] + [30]
        q = k if alike else [rng.randint(0, n) if causal else rng.randint(0, 40) for n in k[:-1]] + [25]
        other_q, other_k = lengths.ragged(tuple(q), tuple(k), causal, seed)
        assert (len(other_q), max(other_q), max(other_k)) == (len(q), max(q), max(k))
        assert sum(other_q) <= sum(q)
        assert sum(other_k) <= sum(k)
        assert (other_q == other_k) or not alike
        assert not causal or all(a <= b for a, b in zip(other_q, other_k, strict=True))
        assert lengths.ragged(tuple(q), tuple(k), causal, seed) == (other_q, other_k)
        changed += (other_q, other_k) != (tuple(q), tuple(k))
    assert changed > 250
