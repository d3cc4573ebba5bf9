"""Forward with its backward on a Hopper GPU: four outputs are right, one BlockMask serves both, parts add up.

Compiles about forty kernels of 5 to 13 s on one core each, and FlexAttention's two backends twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.trying import all_right, tried
from tuner import families
from tuner.compile import CompilePool
from tuner.config import Config
from tuner.families.joint import Joint
from tuner.pattern import parse
from tuner.sandbox import Sandbox
from tuner.target import Target
from tuner.trial import Trial
from tuner.workload import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

JOINT = families.load("fa4_joint_sm90")
OUTPUTS = {"out", *(f"{gradient} (draw {n})" for gradient in ("dq", "dk", "dv") for n in (1, 2))}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("causal", {}),
    ("sliding_window(200)", {"heads_kv": 2}),
    ("document(mean=200)", {}),
    ("document(mean=200)", {"head_dim": 64, "heads_kv": 2}),
    ("prefix_lm(300) + softcap(20)", {}),
    ("causal", {"seqlen_q": 1000, "seqlen_k": 1000, "head_dim": 64}),
    ("causal", {"deterministic": True}),
]
RIVALS = {
    "causal": ["flex_flash_stock", "flex_triton_stock", "cudnn", "fa4_joint_sm90"],
    "document(mean=200)": ["flex_flash_stock", "flex_triton_stock", "fa4_joint_sm90"],
}


def workload(pattern: str, **changes: Any) -> Workload:
    shape = {"batch": 2, "heads_q": 4, "heads_kv": 4, "seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 128}
    return Workload(**{**shape, **changes}, op="fwd+bwd", pattern=parse(pattern))


def joint() -> Joint:
    assert isinstance(JOINT, Joint)
    return JOINT


def fa4_configs(w: Workload, target: Target) -> list[Config]:
    """Return what FA4 does by itself, and the second and the last of what is tried first."""
    first = [c for c in joint().first(w) if not joint().feasible(c, w, target)]
    return list(dict.fromkeys([joint().stock(w), first[min(1, len(first) - 1)], first[-1]]))


def rivals(w: Workload, target: Target) -> list[Config]:
    return [f.stock(w) for f in families.able(w, target)[0]]


@pytest.fixture(scope="module")
def pool(target: Target, folder: Path) -> Iterator[CompilePool]:
    """A pool that begins with everything at once: one test after the other would keep two cores busy."""
    with CompilePool(target, folder, workers=14, visible_devices=target.uuid) as pool:
        everything = [(workload(pattern, **shape), fa4_configs) for pattern, shape in CASES]
        everything += [(workload(pattern), rivals) for pattern in RIVALS]
        for w, configs in everything:
            for config in configs(w, target):
                pool.submit(config, w, timeout_s=300)
        yield pool


def passed(trials: list[Trial]) -> None:
    all_right(trials)
    assert all(t.verification is not None and set(t.verification.outputs) == OUTPUTS for t in trials)


@pytest.mark.parametrize(("pattern", "shape"), CASES)
def test_fa4_is_right_in_all_four_outputs(
    pattern: str, shape: dict[str, Any], target: Target, pool: CompilePool, sandbox: Sandbox
) -> None:
    w = workload(pattern, **shape)
    assert joint().refuses(w, target) == ""
    bench, trials = tried(w, fa4_configs(w, target), pool, sandbox)
    bench.close()
    passed(trials)


@pytest.mark.parametrize("policy", ["graph", "eager"])
@pytest.mark.parametrize("pattern", RIVALS)
def test_every_rival_is_right_and_its_parts_add_up(
    pattern: str, policy: str, target: Target, pool: CompilePool, sandbox: Sandbox
) -> None:
    w = workload(pattern)
    configs = rivals(w, target)
    assert [c.family for c in configs] == RIVALS[pattern]
    bench, trials = tried(w, configs, pool, sandbox, policy)
    passed(trials)
    bench.start_finals(configs)
    rounds = bench.rounds(10, seed=0)
    parts = bench.parts()
    bench.close()
    assert rounds.notes == []
    for config, its, times in zip(configs, parts, zip(*rounds.times, strict=True), strict=True):
        whole = statistics.median(times)
        print(f"{w.label} {policy} | {config.family}: {whole:.1f} us, parts {its}")
        assert its.keys() == {"fwd", "bwd"}
        # a graph has no host time between its kernels; a caller's wait for two calls is not that for one
        low, high = (0.8, 1.25) if policy == "graph" else (0.5, 2.0)
        assert low * whole < sum(its.values()) < high * whole
