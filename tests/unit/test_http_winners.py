"""The index of published answers says exactly what the plain rules say over all of them."""

from dataclasses import replace
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from api.http.winners import REMEMBERED, SHORT_QUERY, Question, Snapshot
from db.store import Published
from tuner.config import Config
from tuner.lookup import MatchKind, find
from tuner.target import Target, Toolchain
from tuner.trial import TunedConfig, Verdict
from tuner.workload import Workload

WORKLOAD = Workload(batch=2, heads_q=8, heads_kv=8, seqlen_q=512, seqlen_k=512, head_dim=64)
TUNED = TunedConfig(
    **{"config": Config.make("fake", 1, tile_m=64), "default": Config.make("fake", 1), "verdict": Verdict.PUBLISHED},
    **{"speedup": 1.25, "low": 1.2, "high": 1.3, "confidence": 0.95, "margin": 0.02, "ties": (), "finalists": ()},
    **{"verification": None, "reason": "", "rounds": 40, "rounds_dropped": 0},
)
PATTERNS = ("full", "causal", "sliding_window(64)", "sliding_window(128)", "causal + softcap(30)")

workloads = st.builds(
    lambda batch, seqlen, heads, dim, pattern, deterministic: Workload.from_dict(
        {"batch": batch, "heads_q": 8, "heads_kv": heads, "seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": dim}
        | {"pattern": pattern, "deterministic": deterministic}
    ),
    st.sampled_from([1, 2, 3, 4, 64]),
    st.sampled_from([256, 300, 512, 100_000]),
    st.sampled_from([4, 8]),
    st.sampled_from([64, 128]),
    st.sampled_from(PATTERNS),
    st.booleans(),
)
targets = st.builds(
    lambda model, arch, cap: Target(model, arch, 132, power_cap_w=cap),
    st.sampled_from(["NVIDIA H200", "NVIDIA H100", ""]),
    st.sampled_from(["sm_90a", "sm_100a"]),
    st.sampled_from([None, 500, 700]),
)
toolchains = st.builds(
    lambda torch, triton: Toolchain(torch=torch, triton=triton), st.sampled_from(["", "2.11", "2.13"]), st.just("3.7")
)
policies = st.sampled_from(["graph", "eager"])
questions = st.builds(Question, workloads, targets, toolchains, policies)


def entry(number: int, q: Question) -> Published:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return Published(q.workload, q.target, q.toolchain, q.policy, TUNED, f"study{number}", number % 3 + 1, at)


def blanked(entries: list[Published], q: Question) -> list[Published]:
    """Forget of the entries what the asker left empty: an independent form of the rule."""
    out = []
    for e in entries:
        tools = {k: v if q.toolchain.to_dict()[k] else "" for k, v in e.toolchain.to_dict().items()}
        target = e.target if q.target.model else replace(e.target, model="")
        out.append(replace(e, target=target, toolchain=Toolchain(**tools)))
    return out


@settings(max_examples=300, deadline=None)
@given(st.lists(questions, max_size=12), st.lists(questions, min_size=1, max_size=8))
def test_the_index_agrees_with_the_rules(known: list[Question], asked: list[Question]) -> None:
    entries = [entry(i, q) for i, q in enumerate(known)]
    snapshot = Snapshot(entries)
    for q in asked + known:
        expected = find(q.workload, q.target, q.toolchain, q.policy, blanked(entries, q))
        got = snapshot.match(q)
        assert got.to_dict() == expected.to_dict()
        assert (got.kind is MatchKind.DEFAULT) == (got.entry is None)


def test_answers_are_remembered_by_their_query_and_only_so_many_and_only_short_ones() -> None:
    q = Question(WORKLOAD, Target("", "sm_90a", 0), Toolchain(), "graph")
    snapshot = Snapshot([entry(0, q)])
    first = snapshot.answer(q, b"0")
    assert snapshot.remembered(b"0") is first
    assert snapshot.remembered(b"") is None
    snapshot.answer(q, b"x" * (SHORT_QUERY + 1))
    assert snapshot.remembered(b"x" * (SHORT_QUERY + 1)) is None
    for number in range(1, REMEMBERED + 1):
        snapshot.answer(q, b"%d" % number)
    assert snapshot.remembered(b"0") is None
    assert snapshot.remembered(b"%d" % REMEMBERED) == first
