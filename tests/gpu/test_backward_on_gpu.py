"""Backward on a Hopper GPU: stock and tuned kernels are right on every pattern, and wrong gradients are found.

Compiles about fifty kernels of 13 s on one core each, and FlexAttention's two backends three times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.trying import all_right, tried
from tuner import families
from tuner.compile import CompilePool
from tuner.config import Config
from tuner.pattern import parse
from tuner.sandbox import Sandbox
from tuner.target import Target
from tuner.workload import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FA4 = families.load("fa4_bwd_sm90")
SAMPLE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "h200_fa4_bwd_sample.json").read_text()
)["results"]


def workload(pattern: str, heads_kv: int = 4, **changes: Any) -> Workload:
    shape = {"batch": 2, "heads_q": 4, "heads_kv": heads_kv, "seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 128}
    return Workload(**{**shape, **changes}, op="bwd", pattern=parse(pattern))


@pytest.fixture(scope="module")
def pool(target: Target, folder: Path) -> Iterator[CompilePool]:
    """A pool that begins with everything at once: one test after the other would keep two cores busy."""
    with CompilePool(target, folder, workers=14, visible_devices=target.uuid) as pool:
        everything = [(pattern, shape, fa4_configs) for pattern, shape in CASES]
        everything += [(pattern, {"heads_kv": 2}, rivals) for pattern in RIVALS]
        everything.append(("causal", RECORDED, recorded_configs))
        for pattern, shape, configs in everything:
            w = workload(pattern, **shape)
            for config in configs(w, target):
                pool.submit(config, w, timeout_s=300)
        yield pool


# Every mask, by FA4's own arguments and by block lists; every score modification; shapes beyond the square.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("causal", {}),
    ("sliding_window(200)", {}),
    ("prefix_lm(300)", {}),
    ("document(mean=200)", {}),
    ("causal & document(mean=200)", {}),
    ("causal + softcap(20)", {}),
    ("causal + alibi", {}),
    ("document(mean=200) + softcap(20) + alibi", {}),
    ("causal", {"head_dim": 64}),
    ("document(mean=200)", {"head_dim": 64}),
    ("causal", {"heads_kv": 1}),
    ("document(mean=200)", {"heads_kv": 2}),
    ("causal", {"seqlen_q": 1000, "seqlen_k": 1000}),
    ("causal", {"seqlen_q": 300}),
    ("sliding_window(100)", {"seqlen_q": 512}),  # keys that no query sees
    ("prefix_lm(100)", {"seqlen_q": 1024, "seqlen_k": 512}),
    ("full", {"head_dim": 192, "head_dim_v": 128}),
    ("causal", {"deterministic": True}),
    ("sliding_window(200)", {"deterministic": True, "heads_kv": 2}),
]


RIVALS = {
    "causal": ["flex_flash_stock", "flex_triton_stock", "cudnn", "fa4_bwd_sm90"],
    "document(mean=200)": ["flex_flash_stock", "flex_triton_stock", "fa4_bwd_sm90"],
    "causal + softcap(20)": ["flex_flash_stock", "flex_triton_stock", "fa4_bwd_sm90"],
}
RECORDED = {"heads_q": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096}


def fa4_configs(w: Workload, target: Target) -> list[Config]:
    first = [c for c in FA4.first(w) if not FA4.feasible(c, w, target)]
    # for head_dim 128 one that was recorded as right, and is not FA4's choice
    return [FA4.stock(w), first[3 if len(first) > 3 else 1]]


def rivals(w: Workload, target: Target) -> list[Config]:
    return [f.stock(w) for f in families.able(w, target)[0]]


def recorded_configs(w: Workload, target: Target) -> list[Config]:
    """The stock config, four recorded as right, and the four that ran without any error and were wrong."""
    by_outcome: dict[str, list[Config]] = {"incorrect": [], "ok": [], "run_error": []}
    for row in SAMPLE:
        if row["config"] is not None:
            by_outcome[row["outcome"]].append(
                Config.make("fa4_bwd_sm90", 1, **row["config"], dQ_single_wg=False, q_blocks=1)
            )
    return [FA4.stock(w), *by_outcome["ok"][:4], *by_outcome["incorrect"]]


@pytest.mark.parametrize(("pattern", "shape"), CASES)
def test_fa4_is_right_as_shipped_and_in_a_tuned_config(
    pattern: str, shape: dict[str, Any], target: Target, pool: CompilePool, sandbox: Sandbox
) -> None:
    w = workload(pattern, **shape)
    assert FA4.refuses(w, target) == ""
    bench, trials = tried(w, fa4_configs(w, target), pool, sandbox)
    bench.close()
    all_right(trials)


@pytest.mark.parametrize("pattern", RIVALS)
def test_every_rival_is_right(pattern: str, target: Target, pool: CompilePool, sandbox: Sandbox) -> None:
    w = workload(pattern, heads_kv=2)
    configs = rivals(w, target)
    assert [c.family for c in configs] == RIVALS[pattern]
    bench, trials = tried(w, configs, pool, sandbox)
    bench.close()
    all_right(trials)


def test_wrong_gradients_are_found_and_right_ones_are_not_accused(
    target: Target, pool: CompilePool, sandbox: Sandbox
) -> None:
    w = workload("causal", **RECORDED)
    bench, trials = tried(w, recorded_configs(w, target), pool, sandbox)
    bench.close()
    assert [str(t.status) for t in trials] == ["ok"] * 5 + ["incorrect"] * 4
    for t in trials[5:]:
        assert t.verification is not None
        assert not t.verification.passed
        assert t.error.startswith(("dq (draw ", "dk (draw ", "dv (draw "))
