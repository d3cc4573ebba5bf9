"""Every family that can compute a pattern on this GPU computes it right, and breakage is contained.

Needs a Hopper GPU; compiles about a hundred kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner import families
from tuner.compile import CompilePool
from tuner.pattern import parse
from tuner.sandbox import Sandbox
from tuner.search import Search
from tuner.target import Target
from tuner.trial import Trial, TrialStatus
from tuner.workload import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PATTERNS = (
    "full",
    "causal",
    "sliding_window(200)",
    "prefix_lm(300)",
    "document(mean=200)",
    "causal & document(mean=200)",
    "sliding_window(100) & document(mean=300)",
    "causal + softcap(30)",
    "causal + alibi",
    "document(mean=200) + softcap(20) + alibi",
)


def workload(pattern: str, heads_kv: int = 4, **changes: int) -> Workload:
    shape = {"batch": 2, "heads_q": 4, "heads_kv": heads_kv, "seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64}
    return Workload(**(shape | changes), pattern=parse(pattern))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool(target: Target, folder: Path) -> Iterator[CompilePool]:
    with CompilePool(target, folder, workers=14, visible_devices=target.uuid) as pool:
        yield pool


CASES: list[tuple[str, dict[str, int]]] = [
    *((p, {}) for p in PATTERNS),
    ("causal", {"heads_kv": 1}),
    ("causal + alibi", {"heads_kv": 2}),
    ("document(mean=200)", {"heads_kv": 2}),
    ("causal", {"head_dim": 128, "seqlen_q": 1000, "seqlen_k": 1000}),
    ("causal", {"seqlen_q": 128}),
    ("sliding_window(100)", {"seqlen_q": 512}),
    ("full", {"head_dim": 192, "head_dim_v": 128}),
]


def _configs(target: Target, w: Workload) -> list:  # type: ignore[type-arg]
    able, _ = families.able(w, target)
    # what compiles on the device does so one by one, and has tests of its own
    tunable = [f for f in able if f.compile_in == "cpu" and f.space(w)]
    tuned = [c for f in tunable for c in Search(f, w, target, budget=100, seed=1).ask(6)]
    return [f.stock(w) for f in able] + tuned


def _submit(pool: CompilePool, target: Target, w: Workload) -> dict:  # type: ignore[type-arg]
    return {c: pool.submit(c, w) for c in _configs(target, w)}


@pytest.mark.parametrize(("pattern", "shape"), CASES)
def test_every_family_is_right(
    pattern: str, shape: dict[str, int], target: Target, pool: CompilePool, sandbox: Sandbox
) -> None:
    w = workload(pattern, **shape)
    futures = _submit(pool, target, w)
    default = next(iter(futures))
    compiled = {c: f.result() for c, f in futures.items()}
    bench = sandbox.open(w, default, "graph")
    trials: list[Trial] = [
        bench.attempt(c, found) if found.status is TrialStatus.OK else Trial(c, found.status, found.error)
        for c, found in compiled.items()
    ]
    for t in trials:
        error = t.verification.error if t.verification else None
        print(
            f"{w.label} | {t.config.family} {t.config.label} | {t.status} {t.error[:200]} {error} {t.ratio} {t.notes}"
        )
    assert {t.config.key: (str(t.status), t.error) for t in trials if t.status is not TrialStatus.OK} == {}
    assert [t.config.key for t in trials if t.notes] == [], "a kernel compiled again while measuring"


def test_a_broken_kernel_gets_its_status_and_the_next_one_runs(target: Target, tmp_path: Path) -> None:
    breaks = {"0": "assert", "1": "hang", "2": "nan", "3": "wrong", "4": "unwritten"}
    script = json.dumps({"breaks": breaks})
    w = workload("causal")
    decoy = families.load("decoy")
    with (
        CompilePool(target, tmp_path, workers=1, script=script) as pool,
        Sandbox(target, tmp_path, run_timeout_s=20, script=script, visible_devices=target.uuid) as sandbox,
    ):
        default = decoy.stock(w)
        compiled = pool.submit(default, w).result()
        bench = sandbox.open(w, default, "graph")
        variants = [
            c for v in range(6) for c in Search(decoy, w, target, budget=100, seed=0).feasible if c["variant"] == v
        ]
        statuses = [str(bench.attempt(c, compiled).status) for c in variants]
    assert statuses == ["run_crash", "run_timeout", "incorrect", "incorrect", "incorrect", "ok"]
