"""FlexAttention's Triton family on a GPU: its options reach the kernel, and what comes out is right.

Needs any GPU since Ampere; compiles about ten kernels, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner import families
from tuner.compile import CompilePool
from tuner.config import Config
from tuner.pattern import parse
from tuner.sandbox import Sandbox
from tuner.target import Target, probe
from tuner.trial import TrialStatus
from tuner.workload import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FAMILY = families.load("flex_triton")


def workload(pattern: str) -> Workload:
    shape = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64}
    return Workload(**shape, pattern=parse(pattern))  # type: ignore[arg-type]


def config(w: Workload, m: int, n: int, warps: int, stages: int, q: int, kv: int, full: bool) -> Config:
    tiles = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
    masked = {"q_block": q, "kv_block": kv, "full_blocks": full} if w.pattern.masks else {}
    return Config.make(FAMILY.name, FAMILY.version, **tiles, **masked)


@pytest.fixture(scope="module")
def target() -> Target:
    return probe("cuda")


@pytest.fixture(scope="module")
def pool(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CompilePool, Path]]:
    folder = tmp_path_factory.mktemp("artifacts")
    with CompilePool(target, folder, workers=1, visible_devices=target.uuid) as pool:
        yield pool, folder


@pytest.mark.parametrize("pattern", ["full + alibi", "sliding_window(200)", "document(mean=200) + softcap(20)"])
def test_two_configs_are_right(pattern: str, target: Target, pool: tuple[CompilePool, Path]) -> None:
    w = workload(pattern)
    configs = [
        config(w, 64, 64, warps=4, stages=3, q=128, kv=128, full=True),
        config(w, 128, 32, warps=8, stages=2, q=256, kv=64, full=False),
    ]
    assert [FAMILY.feasible(c, w, target) for c in configs] == ["", ""]
    compilers, folder = pool
    compiled = {c: compilers.submit(c, w).result() for c in (FAMILY.stock(w), *configs)}
    assert {c.label: found.error for c, found in compiled.items() if found.status is not TrialStatus.OK} == {}
    with Sandbox(target, folder, visible_devices=target.uuid) as sandbox:
        bench = sandbox.open(w, FAMILY.stock(w), "graph")
        trials = [bench.attempt(c, compiled[c]) for c in configs]
    assert [(str(t.status), t.error) for t in trials] == [("ok", "")] * 2
    assert [t.verification.passed for t in trials if t.verification] == [True] * 2


def test_a_backward_is_right(target: Target, pool: tuple[CompilePool, Path]) -> None:
    w = workload("causal").with_(op="bwd")
    tiles = {"BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32, "num_warps": 4, "num_stages": 2}
    tuned = Config.make(FAMILY.name, FAMILY.version, **tiles, q_block=128, kv_block=128, full_blocks=True)
    assert FAMILY.feasible(tuned, w, target) == ""
    compilers, folder = pool
    compiled = {c: compilers.submit(c, w).result() for c in (FAMILY.stock(w), tuned)}
    assert {c.label: found.error for c, found in compiled.items() if found.status is not TrialStatus.OK} == {}
    with Sandbox(target, folder, visible_devices=target.uuid) as sandbox:
        trial = sandbox.open(w, FAMILY.stock(w), "graph").attempt(tuned, compiled[tuned])
    assert (str(trial.status), trial.error) == ("ok", "")


def test_a_config_that_does_not_compile_is_a_result(target: Target, pool: tuple[CompilePool, Path]) -> None:
    """And shows that the options are heard: a block of 128 keys does not divide a BlockMask of 64."""
    w = workload("causal")
    compilers, _ = pool
    found = compilers.submit(config(w, 64, 128, warps=4, stages=2, q=64, kv=64, full=True), w).result()
    assert found.status is TrialStatus.COMPILE_ERROR
    assert "BLOCK" in found.error
    again = compilers.submit(config(w, 64, 64, warps=4, stages=2, q=128, kv=128, full=True), w).result()
    assert (again.status, again.error) == (TrialStatus.OK, "")
