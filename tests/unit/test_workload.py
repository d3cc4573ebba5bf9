"""Workloads: what is refused, keys, round trips, and the count of work against a naive loop."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import InputError, WorkloadError
from tuner.pattern import document_lengths, parse
from tuner.workload import Workload

_BASE: dict[str, Any] = {"batch": 2, "heads_q": 6, "heads_kv": 3, "seqlen_q": 20, "seqlen_k": 20, "head_dim": 64}


def workload(**changes: Any) -> Workload:
    return Workload.from_dict({**_BASE, **changes})


# Every combination of masks that the grammar accepts; lengths sum to 20.
_WINDOWS = ("", "sliding_window(1)", "sliding_window(6)", "sliding_window(50)")
_PASTS = ("", "causal", "prefix_lm(1)", "prefix_lm(7)", "prefix_lm(20)")
_DOCUMENTS = ("", "document(lengths=[3,9,1,7])", "document(lengths=[20])", "document(mean=4,seed=1)")
_COMBINATIONS = [
    " & ".join(m for m in masks if m) or "full" for masks in itertools.product(_WINDOWS, _PASTS, _DOCUMENTS)
]


def naive_pairs(w: Workload) -> int:
    """Count by the table in ``tuner.pattern``'s docstring, pair by pair."""
    masks = {p.name: dict(p.params) for p in w.pattern.masks}
    owner: list[int] = []
    if (document := w.pattern.mask("document")) is not None:
        owner = [d for d, n in enumerate(document_lengths(document, w.seqlen_k)) for _ in range(n)]
    count = 0
    for query in range(w.seqlen_q):
        for j in range(w.seqlen_k):
            i = query + w.seqlen_k - w.seqlen_q
            seen = True
            for name, params in masks.items():
                if name == "causal":
                    seen &= j <= i
                elif name == "sliding_window":
                    seen &= j <= i and i - j < params["window"]  # type: ignore[operator]
                elif name == "prefix_lm":
                    seen &= j <= i or j < params["prefix"]  # type: ignore[operator]
                elif name == "document":
                    seen &= owner[i] == owner[j]
            count += seen
    return count


@pytest.mark.parametrize("pattern", _COMBINATIONS)
def test_visible_pairs_and_flops_agree_with_a_naive_count(pattern: str) -> None:
    counted = 0
    for seqlen_q in (1, 5, 20, 27):
        try:
            w = workload(pattern=pattern, seqlen_q=seqlen_q, head_dim_v=128)
        except WorkloadError:
            continue  # documents need equal lengths, a causal query needs something to see
        pairs = naive_pairs(w)
        assert w.visible_pairs() == pairs, w
        # QK over 64 and PV over 128 channels, 2 operations each, for 2 batches of 6 query heads
        assert w.flops() == 12 * pairs * (2 * 64 + 2 * 128)
        assert w.with_(op="bwd").flops() == 2.5 * w.flops()
        counted += 1
    expected = 1 if "document" in pattern else 3 if "sliding" in pattern or "causal" in pattern else 4
    assert counted == expected


def test_score_modifications_do_not_change_the_count() -> None:
    assert workload(pattern="causal + softcap(30) + alibi").flops() == workload(pattern="causal").flops()


def test_every_query_sees_something_wherever_a_workload_is_accepted() -> None:
    for pattern, seqlen_q in itertools.product(_COMBINATIONS, (1, 5, 20, 27)):
        try:
            w = workload(pattern=pattern, seqlen_q=seqlen_q)
        except WorkloadError:
            continue
        # aligned at the end, so one query fewer leaves out the first, which sees the least
        one_fewer = naive_pairs(w.with_(seqlen_q=seqlen_q - 1)) if seqlen_q > 1 and "document" not in pattern else 0
        assert naive_pairs(w) > one_fewer


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"batch": True}, "batch is True"),
        ({"heads_q": -4}, "heads_q is -4"),
        ({"seqlen_q": 1.0}, "seqlen_q is 1.0"),
        ({"seqlen_k": "64"}, "seqlen_k is '64'"),
        ({"seqlen_k": 10**12}, "seqlen_k is 1000000000000"),
        ({"head_dim": 65}, "head_dim is 65"),
        ({"head_dim": 520}, "head_dim is 520"),
        ({"head_dim_v": 4}, "head_dim_v is 4"),
        ({"heads_kv": 4}, "heads_q 6 is not a multiple of heads_kv 4"),
        ({"op": "forward"}, "op is 'forward'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": ["bf16"]}, r"dtype is \['bf16'\]"),
        ({"layout": "paged"}, "layout is 'paged'"),
        ({"deterministic": "yes"}, "deterministic is 'yes'"),
        ({"pattern": "document(mean=4)", "seqlen_q": 1}, "seqlen_q == seqlen_k, got 1 and 20"),
        ({"pattern": "document(lengths=[4,5])"}, "sums to 9, not to seqlen 20"),
        ({"pattern": "prefix_lm(21)"}, r"prefix_lm\(prefix=21\) is longer than seqlen_k 20"),
        ({"pattern": "causal", "seqlen_q": 21}, "seqlen_q 21 is longer than seqlen_k 20"),
        ({"pattern": "sliding_window(2)", "seqlen_q": 21}, "seqlen_q 21 is longer than seqlen_k 20"),
        ({"pattern": "casual"}, "did you mean causal"),
        ({"pattern": 5}, "pattern 5"),
        ({"heads": 8}, "unknown workload field 'heads'"),
    ],
)
def test_errors_name_the_value(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        workload(**changes)


@pytest.mark.parametrize("name", list(_BASE))
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(WorkloadError, match=f"{name} is missing"):
        Workload.from_dict({k: v for k, v in _BASE.items() if k != name})


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Draw from a small world, so that two draws are often nearly equal."""
    seqlen_k = draw(st.sampled_from([20, 120]))
    pattern = draw(st.sampled_from([c for c in _COMBINATIONS if "lengths" not in c or seqlen_k == 20]))
    whole = "document" in pattern
    packed: dict[str, Any] = {}
    if not whole and "prefix_lm" not in pattern and draw(st.booleans()):
        pairs = draw(st.lists(st.sampled_from([(0, 0), (1, 1), (1, 20), (12, 20), (20, 20)]), min_size=1, max_size=4))
        packed = {"lengths_q": [q for q, _ in pairs] + [1], "lengths_k": [k for _, k in pairs] + [1]}
    heads_kv = draw(st.sampled_from([1, 2, 12]))
    dense = Workload(
        batch=draw(st.sampled_from([1, 12])),
        heads_q=heads_kv * draw(st.sampled_from([1, 2])),
        heads_kv=heads_kv,
        seqlen_q=seqlen_k if whole else draw(st.sampled_from([1, 12, 20])),
        seqlen_k=seqlen_k,
        head_dim=draw(st.sampled_from([64, 128])),
        head_dim_v=draw(st.sampled_from([0, 64, 128])),
        op=draw(st.sampled_from(["fwd", "bwd"])),
        dtype=draw(st.sampled_from(["bf16", "bfloat16", "float32"])),
        pattern=parse(pattern + draw(st.sampled_from(["", "+alibi", "+softcap(5)", "+softcap(5)+alibi"]))),
        deterministic=draw(st.booleans()),
    )
    return dense.with_(**packed)


@given(st.lists(workloads(), min_size=2, max_size=8))
def test_keys_are_equal_exactly_for_equal_workloads(drawn: list[Workload]) -> None:
    for a, b in itertools.combinations(drawn, 2):
        assert (a.key == b.key) == (a == b)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 3},
        {"heads_q": 9},
        {"heads_kv": 6},
        {"seqlen_q": 19},
        {"seqlen_k": 21},
        {"head_dim": 72},
        {"head_dim_v": 72},
        {"op": "bwd"},
        {"dtype": "float16"},
        {"pattern": parse("causal")},
        {"lengths_q": (20, 20), "lengths_k": (20, 20)},
        {"deterministic": True},
    ],
)
def test_each_field_changes_the_key(changes: dict[str, Any]) -> None:
    # head_dim_v is given, so that head_dim alone changes
    base = workload(head_dim_v=64)
    assert base.with_(**changes).key != base.key


def test_the_key_is_stable() -> None:
    # stored in databases and snapshots: a change needs a new KEY_VERSION
    w = workload(pattern="document(mean=5) & causal + softcap(30)", dtype="half", op="bwd", deterministic=True)
    assert w.key == (
        "w1|bwd|float16|b2|hq6|hkv3|sq20|sk20|d64|dv64|dense|det1|causal & document(mean=5,seed=0) + softcap(cap=30.0)"
    )


@given(workloads())
def test_round_trip_through_json(w: Workload) -> None:
    assert Workload.from_dict(json.loads(json.dumps(w.to_dict()))) == w


def test_label_shortens_what_is_equal() -> None:
    assert workload(heads_kv=6).label == "full b2 h6 s20 d64"
    assert workload(seqlen_q=1, head_dim_v=128).label == "full b2 h6/3 s1x20 d64/128"
