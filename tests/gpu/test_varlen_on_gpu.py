"""Packed sequences on a Hopper GPU: every family is right, on the lengths it is timed on and on others.

Compiles about thirty FA4 kernels, forward in 8 s on one core each and backward in 13 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.trying import all_right, tried
from tuner import families
from tuner.compile import CompilePool
from tuner.config import Config
from tuner.sandbox import Sandbox
from tuner.target import Target
from tuner.workload import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

RAGGED = {"lengths": "1000,1,513,128,77,2048"}
DECODE = {"lengths_q": "1*64", "lengths_k": "8192,700*31,1,4000*31"}
FORWARD: list[dict[str, Any]] = [
    {**RAGGED, "pattern": "full"},
    {**RAGGED, "pattern": "causal"},
    {**RAGGED, "pattern": "causal", "heads_kv": 1},
    {**RAGGED, "pattern": "sliding_window(200)", "heads_kv": 2, "dtype": "float16"},
    {**RAGGED, "pattern": "causal + softcap(20)"},
    {**RAGGED, "pattern": "causal + alibi", "heads_kv": 2},
    {**RAGGED, "pattern": "causal", "head_dim": 192, "head_dim_v": 128},
    {"lengths": "700,0,300", "pattern": "causal"},  # an empty sequence
    {"lengths_q": "5,300,7", "lengths_k": "900,300,0", "pattern": "full"},  # queries without keys
    {"lengths_q": "1,16,128", "lengths_k": "900,16,2000", "pattern": "causal + alibi"},  # ends aligned
    {"batch": 300, "lengths": "mean=90,seed=3", "pattern": "causal"},  # above 256 FA4 schedules otherwise
    {**DECODE, "pattern": "full", "heads_kv": 1},
    {**DECODE, "pattern": "causal", "heads_kv": 4},
    {"batch": 64, "seqlen_q": 1, "seqlen_k": 8192, "pattern": "causal", "heads_kv": 1},  # decoding, dense
    {"batch": 8, "seqlen_q": 16, "seqlen_k": 4096, "pattern": "causal", "heads_kv": 2},
]
BACKWARD: list[dict[str, Any]] = [
    {**RAGGED, "pattern": "full"},
    {**RAGGED, "pattern": "causal"},
    {**RAGGED, "pattern": "causal", "heads_kv": 1},
    {**RAGGED, "pattern": "sliding_window(200)", "heads_kv": 2},
    {**RAGGED, "pattern": "causal + softcap(20) + alibi"},
    {**RAGGED, "pattern": "causal", "deterministic": True},
    {"lengths": "700,0,300", "pattern": "causal", "head_dim": 64},
    {"lengths_q": "5,300,0", "lengths_k": "900,300,70", "pattern": "causal"},  # keys that no query sees
    {"batch": 300, "lengths": "mean=90,seed=3", "pattern": "causal"},
]
CASES = [{**c, "op": "fwd"} for c in FORWARD] + [{**c, "op": "bwd"} for c in BACKWARD]


def workload(case: dict[str, Any]) -> Workload:
    return Workload.from_dict({"heads_q": 4, "heads_kv": 4, "head_dim": 128, **case})


def configs(w: Workload, target: Target) -> list[Config]:
    """The stock config of every family that is able, and two tuned ones of FA4's."""
    able, _ = families.able(w, target)
    fa4 = families.load(f"fa4_{w.op}_sm90")
    first = [c for c in fa4.first(w) if not fa4.feasible(c, w, target)]
    return [*(f.stock(w) for f in able), *first[:1], *first[3:4]]


@pytest.fixture(scope="module")
def pool(target: Target, folder: Path) -> Iterator[CompilePool]:
    """A pool that begins with everything at once."""
    with CompilePool(target, folder, workers=14, visible_devices=target.uuid) as pool:
        for w in map(workload, CASES):
            for config in configs(w, target):
                pool.submit(config, w, timeout_s=300)
        yield pool


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{workload(c).label} {c.get('dtype', '')}")
def test_every_family_is_right(case: dict[str, Any], target: Target, pool: CompilePool, sandbox: Sandbox) -> None:
    w = workload(case)
    its = configs(w, target)
    if w.layout == "varlen" and not w.pattern.scores and w.head_dim == w.head_dim_v and not w.deterministic:
        assert its[0].family == "torch_varlen"
    assert f"fa4_{w.op}_sm90" in {c.family for c in its}
    bench, trials = tried(w, its, pool, sandbox)
    bench.close()
    all_right(trials)
