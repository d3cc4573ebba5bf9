"""The example workload files hold what they promise."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tuner import families, target
from tuner.pattern import parse
from tuner.workload import OPS, Workload
from tuner.workload_file import NamedWorkload, load

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_is_tested_here() -> None:
    assert {p.name for p in EXAMPLES.glob("*.toml")} == {
        "quick_cpu.toml",
        "h200.toml",
        "llama_gemma_mistral.toml",
        "suite.toml",
        "training.toml",
    }


def test_quick_cpu() -> None:
    assert {w.workload for w in load(EXAMPLES / "quick_cpu.toml")} == {
        Workload(1, 8, 8, 2048, 2048, 64, dtype="float32", pattern=parse(p)) for p in ("sliding_window(256)", "causal")
    }


def test_h200() -> None:
    patterns = (
        "causal", "full", "sliding_window(1024)", "document(mean=2048)", "causal + softcap(30)", "causal + alibi",
    )  # fmt: skip
    found = load(EXAMPLES / "h200.toml")
    assert len(found) == 24
    assert {w.workload for w in found} == {
        Workload(batch, 16, 16, seqlen, seqlen, head_dim, dtype="bfloat16", pattern=parse(p))
        for head_dim, (seqlen, batch), p in product((64, 128), ((1024, 16), (8192, 2)), patterns)
    }


@pytest.mark.parametrize(
    ("prefix", "heads_q", "heads_kv", "head_dim", "patterns"),
    [
        ("llama-3-8b", 32, 8, 128, {"causal"}),
        ("llama-3-70b", 64, 8, 128, {"causal"}),
        ("gemma-2-9b", 16, 8, 256, {"sliding_window(4096) + softcap(50)", "causal + softcap(50)"}),
        ("gemma-3-4b", 8, 4, 256, {"sliding_window(1024)", "causal"}),
        ("mistral-7b", 32, 8, 128, {"sliding_window(4096)"}),
    ],
)
def test_models(prefix: str, heads_q: int, heads_kv: int, head_dim: int, patterns: set[str]) -> None:
    found = [w.workload for w in load(EXAMPLES / "llama_gemma_mistral.toml") if w.name.partition("[")[0] == prefix]
    assert {w.pattern for w in found} == {parse(p) for p in patterns}
    assert {(w.heads_q, w.heads_kv, w.head_dim, w.head_dim_v) for w in found} == {
        (heads_q, heads_kv, head_dim, head_dim)
    }
    assert {(w.seqlen_q, w.seqlen_k, w.dtype, w.op) for w in found} == {(8192, 8192, "bfloat16", "fwd")}


def test_training_steps() -> None:
    found = [w.workload for w in load(EXAMPLES / "training.toml")]
    assert len(found) == 10
    assert {(w.op, w.batch, w.seqlen_q, w.seqlen_k, w.heads_q) for w in found} == {("fwd+bwd", 2, 8192, 8192, 16)}
    assert sum(bool(w.pattern.mask("document") or w.pattern.mask("prefix_lm")) for w in found) == 6


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[NamedWorkload]:
    """The suite; where workloads cannot say fwd+bwd yet, with its backward in the place of both."""
    text = (EXAMPLES / "suite.toml").read_text()
    path = tmp_path_factory.mktemp("suite") / "suite.toml"
    path.write_text(text if "fwd+bwd" in OPS else text.replace("fwd+bwd", "bwd"))
    return load(path)


def test_the_suite_spans_what_it_says(suite: list[NamedWorkload]) -> None:
    assert (len({w.workload for w in suite}), len(suite)) == (44, 58)
    names = {part.name for w in suite for part in (*w.workload.pattern.masks, *w.workload.pattern.scores)}
    assert names == {"causal", "sliding_window", "prefix_lm", "document", "alibi", "softcap"}  # and full, with none
    patterns = {w.workload.pattern for w in suite}
    assert len(patterns) == 10 and parse("full") in patterns
    forward = {(w.workload.seqlen_q, w.workload.pattern) for w in suite if w.workload.op == "fwd"}
    assert forward == set(product((1024, 4096, 16384), patterns))
    assert {w.workload.pattern for w in suite if w.workload.op != "fwd"} == patterns
    for op in {w.workload.op for w in suite}:
        shapes = {
            (w.workload.head_dim, w.workload.heads_q // w.workload.heads_kv) for w in suite if w.workload.op == op
        }
        assert shapes == set(product((64, 128), (1, 8)))


def test_the_suite_measures_short_sequences_by_both_policies(suite: list[NamedWorkload]) -> None:
    for policy, seqlens in (("eager", {1024}), ("graph", {1024, 4096, 16384})):
        assert {w.workload.seqlen_q for w in suite if w.policy == policy} == seqlens
    short = [w for w in suite if w.workload.seqlen_q == 1024]
    assert len(short) == 2 * len({w.workload for w in short})


def test_a_hopper_gpu_has_something_to_tune_and_a_rival_in_every_cell_of_the_suite(suite: list[NamedWorkload]) -> None:
    for named in suite:
        able, _ = families.able(named.workload, target.named("sm_90a"))
        assert {"flex_flash_stock", "flex_triton_stock"} < {f.name for f in able}, named.name
        assert any(f.space(named.workload) for f in able), named.name
