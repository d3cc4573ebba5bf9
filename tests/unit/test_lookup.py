"""The matching rules of a lookup, one by one."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.config import Config
from tuner.lookup import MAX_DISTANCE, Entry, Match, MatchKind, distance, find
from tuner.target import Target, Toolchain
from tuner.trial import TunedConfig, Verdict
from tuner.workload import Workload

H200 = Target("NVIDIA H200", "sm_90a", 132, 700)
TOOLS = Toolchain("580.1", "13.0", "2.11.0", "3.6.0", "4.8.1", "4.0.0b36:0123456789ab", "3.12")


def workload(**changes: Any) -> Workload:
    base = {"batch": 4, "heads_q": 16, "heads_kv": 4, "seqlen_q": 2048, "seqlen_k": 2048, "head_dim": 128}
    if "lengths" in changes:  # which bring these
        base = {k: v for k, v in base.items() if k not in ("batch", "seqlen_q", "seqlen_k")}
    return Workload.from_dict({**base, "pattern": "causal", **changes})


def entry(tile_m: int = 128, *, verdict: Verdict = Verdict.PUBLISHED, **changes: Any) -> Entry:
    """Build an entry; what is not a field of Entry is a field of its workload."""
    own = {k: changes.pop(k) for k in ("target", "toolchain", "policy", "study_id", "version") if k in changes}
    config, stock = Config.make("fa4_fwd_sm90", 1, tile_m=tile_m), Config.make("fa4_fwd_sm90", 1)
    tuned = TunedConfig(config, stock, verdict, 1.2, 1.1, 1.3, 0.95, 0.02, (), (), None, "faster", 20, 0)
    defaults: dict[str, Any] = {
        "target": H200,
        "toolchain": TOOLS,
        "policy": "graph",
        "study_id": f"s{tile_m}",
        "version": 1,
    }
    return Entry(workload=workload(**changes), tuned=tuned, **(defaults | own))


def ask(*entries: Entry, target: Target = H200, toolchain: Toolchain = TOOLS, policy: str = "graph", **w: Any) -> Match:
    return find(workload(**w), target, toolchain, policy, entries)


def tile_m(match: Match) -> Any:
    return match.config["tile_m"] if match.config else None


def test_exact() -> None:
    match = ask(entry(64, batch=5), entry(128), entry(192, batch=3))
    assert (match.kind, tile_m(match), match.distance, match.warnings) == ("exact", 128, 0.0, ())
    assert match.reason == "tuned for exactly this workload"


@pytest.mark.parametrize(
    ("asked", "tuned", "kind"),
    [
        ({"batch": 3}, {"batch": 4}, "bucket"),
        ({"batch": 4}, {"batch": 5}, "nearest"),  # 4 and 8
        ({"seqlen_q": 1025}, {"seqlen_q": 2048}, "bucket"),
        ({"seqlen_q": 1025}, {"seqlen_q": 1024}, "nearest"),
        ({"seqlen_k": 3000}, {"seqlen_k": 4096}, "bucket"),
        ({"seqlen_k": 4097}, {"seqlen_k": 4096}, "nearest"),
        ({"batch": 3, "seqlen_q": 1100, "seqlen_k": 2049}, {"batch": 4, "seqlen_q": 2048, "seqlen_k": 4096}, "bucket"),
        ({"heads_q": 12, "heads_kv": 3}, {}, "nearest"),  # 48 and 64 heads: only batch and seqlens are bucketed
        ({"pattern": "sliding_window(1000)"}, {"pattern": "sliding_window(1024)"}, "nearest"),
        ({"pattern": "document(mean=64,seed=1)"}, {"pattern": "document(mean=64,seed=2)"}, "nearest"),
    ],
)
def test_bucket_is_batch_and_seqlens_rounded_up(asked: dict[str, Any], tuned: dict[str, Any], kind: str) -> None:
    match = ask(entry(128, **tuned), **asked)
    assert match.kind == kind
    assert match.entry is not None and match.entry.workload.label in match.reason


def test_bucket_comes_before_a_nearer_neighbour() -> None:
    match = ask(entry(64, seqlen_k=2048), entry(128, seqlen_k=4096), seqlen_k=2049)
    assert (match.kind, tile_m(match)) == ("bucket", 128)


def test_exact_comes_before_a_bucket_without_soft_mismatch() -> None:
    old = replace(TOOLS, driver="570.0")
    match = ask(entry(64, toolchain=old, batch=3), entry(128, batch=4), batch=3)
    assert (match.kind, tile_m(match)) == ("exact", 64)


def test_the_nearest_is_the_one_with_the_least_distance() -> None:
    match = ask(entry(64, batch=16), entry(128, batch=9), entry(192, batch=1), batch=5)
    # log2 of 16/5, 9/5 and 5: the second
    assert (match.kind, tile_m(match)) == ("nearest", 128)
    assert match.distance == pytest.approx(math.log2(9 / 5))


@pytest.mark.parametrize(
    ("a", "b", "doublings"),
    [
        ({"batch": 1}, {"batch": 8}, 3.0),
        ({"batch": 8, "heads_q": 4, "heads_kv": 1}, {"batch": 2}, 0.0),  # 32 heads in all, either way
        ({"seqlen_q": 512}, {"seqlen_q": 2048}, 2.0),
        ({"seqlen_q": 512, "seqlen_k": 8192}, {}, 4.0),
        ({"pattern": "sliding_window(256)"}, {"pattern": "sliding_window(1024)"}, 2.0),
        ({"pattern": "prefix_lm(512)"}, {"pattern": "prefix_lm(1024)"}, 1.0),
        ({"pattern": "causal + softcap(15)"}, {"pattern": "causal + softcap(60)"}, 2.0),
        ({"pattern": "document(mean=128)"}, {"pattern": "document(mean=512,seed=77)"}, 2.0),
        ({"pattern": "document(lengths=[1024,512,512])"}, {"pattern": "document(lengths=[2048])"}, math.log2(3)),
        ({"pattern": "document(lengths=[1536,512])"}, {"pattern": "document(mean=512)"}, 1.0),
        (
            {"pattern": "document(mean=64) & sliding_window(32) + softcap(10) + alibi"},
            {"pattern": "document(mean=32) & sliding_window(64) + softcap(40) + alibi"},
            4.0,
        ),
    ],
)
def test_distance_counts_doublings(a: dict[str, Any], b: dict[str, Any], doublings: float) -> None:
    assert distance(workload(**a), workload(**b)) == pytest.approx(doublings)
    assert distance(workload(**b), workload(**a)) == distance(workload(**a), workload(**b))


def test_the_limit_of_the_distance() -> None:
    at_limit = ask(entry(128, seqlen_q=256))  # 2048 / 256: three doublings
    assert (at_limit.kind, at_limit.distance) == ("nearest", MAX_DISTANCE)
    beyond = ask(entry(128, seqlen_q=255))
    assert (beyond.kind, beyond.entry, beyond.config) == ("default", None, None)
    assert "use the stock kernel" in beyond.reason
    assert "causal b4 h16/4 s255x2048 d128, is 3.01 doublings away, limit 3" in beyond.reason


@pytest.mark.parametrize(
    ("tuned", "says"),
    [
        ({"op": "bwd"}, "op bwd, not fwd"),
        ({"dtype": "float16"}, "dtype float16, not bfloat16"),
        ({"heads_kv": 8}, "heads_q / heads_kv 2, not 4"),
        ({"head_dim": 64, "head_dim_v": 128}, "head_dim 64, not 128"),
        ({"head_dim_v": 64}, "head_dim_v 64, not 128"),
        ({"lengths": "2048*4"}, "layout varlen, not dense"),
        ({"deterministic": True}, "deterministic True, not False"),
        ({"pattern": "full"}, "pattern full, not causal"),
        ({"pattern": "causal + alibi"}, "pattern causal alibi, not causal"),
        ({"pattern": "causal & document(mean=512)"}, "pattern causal document, not causal"),
        ({"pattern": "sliding_window(2048)"}, "pattern sliding_window, not causal"),
    ],
)
def test_another_kind_of_workload_never_matches(tuned: dict[str, Any], says: str) -> None:
    match = ask(entry(128, **tuned))
    assert match.kind == "default"
    assert says in match.reason


def test_the_default_names_the_entry_with_the_fewest_differences() -> None:
    match = ask(entry(64, dtype="float16", op="bwd"), entry(128, lengths="2048*4"), entry(192, op="bwd", head_dim=64))
    assert match.reason.endswith("has layout varlen, not dense)")
    assert "op bwd" not in match.reason


def test_nothing_tuned() -> None:
    match = ask()
    assert (match.kind, match.config, match.warnings) == ("default", None, ())
    assert match.reason == "nothing tuned fits: use the stock kernel (nothing is tuned yet)"


def test_another_architecture_is_never_used() -> None:
    b200 = Target("NVIDIA B200", "sm_100a", 148, 700)
    match = ask(entry(128, target=b200))
    assert (match.kind, match.config) == ("default", None)
    assert match.warnings == ("everything tuned is for sm_100a, this is sm_90a",)
    # a far worse match of this architecture is still better
    assert tile_m(ask(entry(128, target=b200), entry(64, batch=16))) == 64


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({"model": "NVIDIA H100 80GB HBM3"}, "tuned on NVIDIA H100 80GB HBM3, this is NVIDIA H200"),
        ({"num_sms": 114}, "tuned on 114 SMs, this has 132"),
        ({"power_cap_w": 500}, "tuned under a power cap of 500 W, this has 700 W"),
        ({"driver": "570.0"}, "tuned with driver 570.0, this has 580.1"),
        ({"cuda": "12.8"}, "tuned with cuda 12.8, this has 13.0"),
        ({"torch": "2.13.0"}, "tuned with torch 2.13.0, this has 2.11.0"),
        ({"triton": ""}, "tuned with triton (none), this has 3.6.0"),
        ({"cutlass_dsl": "4.8.0"}, "tuned with cutlass_dsl 4.8.0, this has 4.8.1"),
        # same version, other sources
        ({"flash_attn_4": "4.0.0b36:ba9876543210"}, "tuned with flash_attn_4 4.0.0b36:ba9876543210, this has"),
        ({"python": "3.11"}, "tuned with python 3.11, this has 3.12"),
    ],
)
def test_a_soft_mismatch_is_used_with_a_warning_and_gives_way(there: dict[str, Any], says: str) -> None:
    of_target = there.keys() & {"model", "num_sms", "power_cap_w"}
    other = {"target": replace(H200, **there)} if of_target else {"toolchain": replace(TOOLS, **there)}
    used = ask(entry(128, version=9, **other))
    assert (used.kind, tile_m(used)) == ("exact", 128)
    assert len(used.warnings) == 1
    assert used.warnings[0].startswith(says)
    preferred = ask(entry(128, version=9, **other), entry(192))
    assert (tile_m(preferred), preferred.warnings) == (192, ())


def test_fewer_soft_mismatches_are_preferred_and_each_is_said() -> None:
    one, two = replace(TOOLS, driver="570.0"), replace(TOOLS, driver="570.0", torch="2.10.0")
    assert tile_m(ask(entry(64, toolchain=two, version=2), entry(128, toolchain=one))) == 128
    assert len(ask(entry(64, toolchain=two, target=replace(H200, model="NVIDIA H100"))).warnings) == 3


def test_what_is_unknown_or_names_one_board_is_no_mismatch() -> None:
    there = replace(H200, power_cap_w=None, num_sms=0, uuid="GPU-1", device_index=5)
    assert ask(entry(128, target=there)).warnings == ()
    assert ask(entry(128), target=there).warnings == ()


def test_another_policy_is_used_last_and_with_a_warning() -> None:
    eager = entry(64, policy="eager")
    match = ask(eager)
    assert (match.kind, tile_m(match)) == ("exact", 64)
    assert match.warnings == ("tuned for policy eager, not graph: the winner may differ",)
    neighbour = ask(eager, entry(128, batch=8))
    assert (neighbour.kind, tile_m(neighbour), neighbour.warnings) == ("nearest", 128, ())
    assert tile_m(ask(eager, entry(128, batch=8), policy="eager")) == 64


def test_distance_decides_before_soft_mismatches() -> None:
    other = replace(TOOLS, driver="570.0")
    assert tile_m(ask(entry(64, batch=8, toolchain=other), entry(128, batch=16))) == 64


def test_the_newest_version_wins_a_tie() -> None:
    assert tile_m(ask(entry(64, version=2), entry(128, version=10), entry(192, version=9))) == 128


def test_the_config_key_settles_what_is_left() -> None:
    # one doubling each; as texts, 128 < 192 < 64
    assert tile_m(ask(entry(64, batch=8), entry(192, seqlen_q=1024), entry(128, batch=2))) == 128
    assert tile_m(ask(entry(64, batch=8), entry(192, seqlen_q=1024), entry(256, batch=2))) == 192


@given(st.randoms(use_true_random=False))
def test_the_order_of_the_entries_never_decides(rng: random.Random) -> None:
    entries = [
        entry(m, batch=b, policy=p, version=v, study_id=s)
        for m in (64, 128) for b in (2, 8) for p in ("graph", "eager") for v in (1, 2) for s in ("s1", "s2")
    ]  # fmt: skip
    shuffled = rng.sample(entries, len(entries))
    match = ask(*shuffled)
    assert match == ask(*entries)
    assert match.entry is not None
    assert (match.entry.policy, match.entry.version, tile_m(match), match.entry.study_id) == ("graph", 2, 128, "s1")


def test_a_kept_default_is_an_answer_and_says_so() -> None:
    match = ask(entry(128, verdict=Verdict.KEPT_DEFAULT))
    assert match.kind == "exact"
    assert match.reason.endswith("tuning kept the default")


def test_to_dict_is_strict_json() -> None:
    hit, miss = (json.loads(json.dumps(m.to_dict(), allow_nan=False)) for m in (ask(entry(128, batch=8)), ask()))
    assert (hit["kind"], hit["distance"], hit["study_id"], hit["version"]) == ("nearest", 1.0, "s128", 1)
    assert hit["config"] == {"family": "fa4_fwd_sm90", "version": 1, "params": {"tile_m": 128}}
    assert Workload.from_dict(hit["workload"]) == workload(batch=8)
    assert (miss["kind"], miss["distance"], miss["config"], miss["study_id"]) == ("default", None, None, None)


def test_kinds_are_in_order_of_preference() -> None:
    assert [str(k) for k in MatchKind] == ["exact", "bucket", "nearest", "default"]


def test_imports_nothing_but_the_standard_library() -> None:
    code = "import sys; before = set(sys.modules); import tuner.lookup; print(*sorted(set(sys.modules) - before))"
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    tops = {name.partition(".")[0] for name in out.split()}
    assert "tuner" in tops
    assert tops - {"tuner"} <= set(sys.stdlib_module_names)


PACKED = {"lengths": "2048,500,900*2"}  # 4,348 tokens


def test_packed_sequences_match_by_batch_totals_and_longest() -> None:
    exact = ask(entry(64, lengths="2048,500,900,900"), entry(128, lengths="2048,500,900,901"), **PACKED)
    assert (exact.kind, tile_m(exact), exact.distance) == ("exact", 64, 0.0)
    same = ask(entry(64, lengths="300,1025*4", batch=5), entry(128, lengths="1025,1600*2,2000"), batch=4, **PACKED)
    assert (same.kind, tile_m(same)) == ("bucket", 128)  # four sequences, up to 8,192 tokens, up to 2,048 each
    near = ask(entry(64, lengths="2048*4"), entry(128, lengths="2048,700,900*2"), **PACKED)
    assert (near.kind, tile_m(near)) == ("bucket", 128)
    fewer_tokens = ask(entry(64, lengths="2048,600*3"), **PACKED)
    assert (fewer_tokens.kind, fewer_tokens.distance) == ("nearest", round(2 * math.log2(4348 / 3848), 9))


def test_dense_never_matches_packed() -> None:
    assert ask(entry(64), lengths="2048*4").kind == "default"
    assert ask(entry(64, lengths="2048*4")).kind == "default"
    assert ask(entry(64, lengths="2048*4", heads_kv=16), lengths="2048*4").kind == "default"
