"""FA4's backward tunables on Hopper: against what ran, failed and aborted on an H200, and FA4's own choices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.config import Config, Param
from tuner.families import able, load
from tuner.families.fa4_bwd_sm90 import FAMILY
from tuner.families.fa4_bwd_tiles import smem_bytes
from tuner.pattern import parse
from tuner.search import Search
from tuner.target import named
from tuner.workload import Workload

H200 = named("sm_90a")
FIXTURES = Path(__file__).parents[1] / "fixtures"
SAMPLE: list[dict[str, Any]] = json.loads((FIXTURES / "h200_fa4_bwd_sample.json").read_text())["results"]
ABORTS: list[dict[str, Any]] = json.loads((FIXTURES / "fa4_bwd_sm90_compiler_aborts.json").read_text())["configs"]

NAMES = ("m_block_size", "n_block_size", "num_stages_Q", "num_stages_dO", "num_stages_PdS")
NAMES += ("SdP_swapAB", "dKV_swapAB", "dQ_swapAB", "AtomLayoutMSdP", "AtomLayoutNdKV", "AtomLayoutMdQ")


def workload(head_dim: int = 128, pattern: str = "causal", **changes: Any) -> Workload:
    shape = {"batch": 2, "heads_q": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096, "op": "bwd"}
    return Workload(**{**shape, **changes}, head_dim=head_dim, pattern=parse(pattern))


def config(*values: Param, **changes: Param) -> Config:
    params = {**dict(zip(NAMES, values, strict=True)), "num_wg": 2, "dQ_single_wg": False, "q_blocks": 1, **changes}
    return Config.make("fa4_bwd_sm90", 1, **params)


def recorded(params: dict[str, Any]) -> Config:
    return Config.make("fa4_bwd_sm90", 1, **params, dQ_single_wg=False, q_blocks=1)


def refusal(c: Config, w: Workload) -> str:
    return FAMILY.feasible(c, w, H200)


def test_what_failed_at_launch_is_pruned_and_what_ran_is_not() -> None:
    by_outcome: dict[str, list[str]] = {"ok": [], "incorrect": [], "run_error": []}
    for row in SAMPLE:
        if row["config"] is not None:
            by_outcome[row["outcome"]].append(refusal(recorded(row["config"]), workload()))
    assert {k: len(v) for k, v in by_outcome.items()} == {"ok": 18, "incorrect": 4, "run_error": 4}
    assert set(by_outcome["ok"]) == {""}
    assert set(by_outcome["incorrect"]) == {""}  # these are for the verification to find
    words = "takes 264192 bytes of shared memory and 232448 exist: the launch would fail"
    assert by_outcome["run_error"] == [words] * 4


def test_everything_recorded_as_ok_lies_in_the_space() -> None:
    space = FAMILY.space(workload())
    for row in SAMPLE:
        if row["outcome"] == "ok" and row["config"] is not None:
            assert all(value in space[name] for name, value in recorded(row["config"]).params)


def test_one_config_that_aborts_the_compiler_passes_and_the_other_is_too_large() -> None:
    """So compiling must be contained: no constraint here says why the first one aborts."""
    first, second = (refusal(recorded(c), workload()) for c in ABORTS)
    assert first == ""
    assert second == "takes 273408 bytes of shared memory and 232448 exist: the launch would fail"


# FA4 b36's own backward choices on Hopper: head_dim, head_dim_v, pattern, and the tunables in order.
STOCK = [
    (64, 64, "causal", (128, 128, 2, 2, 2, True, False, False, 1, 2, 2), {}),
    (96, 96, "causal", (64, 128, 2, 2, 2, True, False, False, 1, 2, 1), {"dQ_single_wg": True}),
    (128, 128, "causal", (64, 128, 2, 2, 2, True, False, False, 1, 2, 1), {}),
    (128, 128, "full", (80, 128, 2, 2, 2, True, False, True, 1, 2, 1), {}),
    (192, 128, "causal", (64, 96, 2, 2, 1, False, True, False, 1, 2, 1), {}),
    (192, 192, "causal", (64, 96, 2, 1, 1, False, True, False, 1, 2, 1), {}),
    (256, 256, "causal", (64, 48, 2, 1, 1, False, True, False, 1, 1, 1), {}),
    (256, 256, "document(mean=512)", (64, 64, 1, 1, 1, False, False, False, 1, 1, 1), {}),
]


@pytest.mark.parametrize(("head_dim", "head_dim_v", "pattern", "values", "changes"), STOCK)
@pytest.mark.parametrize("heads_kv", [16, 2])
def test_fa4s_own_choices_are_feasible_and_tried_first(
    head_dim: int, head_dim_v: int, pattern: str, values: tuple[Param, ...], changes: dict[str, Param], heads_kv: int
) -> None:
    w = workload(head_dim, pattern, head_dim_v=head_dim_v, heads_kv=heads_kv)
    c = config(*values, **changes)
    assert refusal(c, w) == ""
    assert c in Search(FAMILY, w, H200, budget=48, seed=0).ask(10)


@pytest.mark.parametrize(
    ("c", "w", "expected"),
    [
        # barriers 8 * 2 * (2 + 2) = 64 -> 128; LSE and sums 4 * 128 * 4 = 2048: 2176 -> 3072
        # Q 80*128*2*2 = 40960; V, K 128*128*2 = 32768; dO 40960; dS 80*128*2*2 = 40960; dQ 80*128*4 = 40960
        (config(*STOCK[3][3]), workload(), 3072 + 40960 + 2 * 32768 + 40960 + 40960 + 40960),
        # P in shared memory too: 64*128*2 = 16384, as dS. LSE and sums 4 * 64 * 4 = 1024 + 128 -> 2048
        (
            config(64, 128, 2, 2, 1, False, False, False, 1, 2, 1),
            workload(),
            2048 + 32768 + 2 * 32768 + 32768 + 2 * 16384 + 32768,
        ),
        # dKV_swapAB pads head dims to 64: 136 to 192, 72 to 128. One stage of dO: LSE and sums 768 + 128 -> 1024
        # Q 64*192*2*2; V 96*128*2; K 96*192*2; dO 64*128*2; P, dS 64*96*2; dQ 64*192*4
        (
            config(64, 96, 2, 1, 1, False, True, False, 1, 2, 1),
            workload(136, head_dim_v=72),
            1024 + 49152 + 24576 + 36864 + 16384 + 2 * 12288 + 49152,
        ),
    ],
)
def test_shared_memory_is_the_sum_of_the_tiles(c: Config, w: Workload, expected: int) -> None:
    assert smem_bytes(dict(c.params), w) == expected


GOOD = STOCK[2][3]  # head_dim 128, causal


def but(**changes: Param) -> Config:
    return config(*GOOD, **changes)


@pytest.mark.parametrize(
    ("c", "w", "words"),
    [
        (but(num_stages_Q=1), workload(), "num_stages_dO is 2: it must be 1 or num_stages_Q 1"),
        (but(num_stages_PdS=3), workload(), "num_stages_PdS is 3: it must be 1 or num_stages_Q 2"),
        (but(num_wg=1), workload(), "num_wg is 1: FA4 hands out registers for 2 or 3"),
        (but(num_wg=3, dQ_single_wg=True), workload(), "dQ_single_wg gives dQ to one of two warp groups"),
        (but(num_wg=3), workload(heads_kv=4), "over grouped heads is written for num_wg 2"),
        (but(AtomLayoutMSdP=3), workload(), "AtomLayoutMSdP 3 does not divide the 2 warp group(s)"),
        (but(dQ_single_wg=True, AtomLayoutMdQ=2), workload(), "AtomLayoutMdQ 2 does not divide the 1 warp group(s)"),
        (but(q_blocks=2), workload(), "q_blocks sizes a BlockMask, and this pattern needs none"),
        (but(SdP_swapAB=False, m_block_size=80), workload(), "S and dP puts 80 on the axis of 64 rows a wgmma"),
        (but(SdP_swapAB=False, AtomLayoutMSdP=2), workload(), "64 rows a wgmma, which 2 warp group(s) cannot share"),
        (but(n_block_size=96), workload(), "S and dP puts 96 on the axis of 64 rows"),
        (but(n_block_size=64, SdP_swapAB=False), workload(), "dK puts 64 on the axis of 64 rows a wgmma, which 2 warp"),
        (but(m_block_size=80), workload(), "dQ puts 80 on the axis of 64 rows"),
        (but(dQ_swapAB=True, AtomLayoutMdQ=2), workload(64), ""),
        (but(dKV_swapAB=True, AtomLayoutNdKV=1), workload(64), "dK puts 64 on the axis of 64 rows a wgmma, which 2"),
        (but(m_block_size=128), workload(), "accumulators take 256 registers a thread and 216 fit with 2 MMA"),
        (but(dQ_single_wg=True, m_block_size=96), workload(128), "dQ puts 96"),
        # 128 * (192 + 192) / 256 for dK and dV, 2 * 64 * 128 / 256 for S and dP
        (but(), workload(192), "accumulators take 256 registers a thread"),
        (but(), workload(136), "pads head_dim to 144, no multiple of 32: FA4 then reads a wrong dq"),
        (but(m_block_size=72, dQ_swapAB=True), workload(), "tile 72x128 has a side that is no multiple of 16"),
    ],
)
def test_every_constraint_names_its_reason(c: Config, w: Workload, words: str) -> None:
    found = refusal(c, w)
    assert words in found
    assert bool(found) == bool(words)


def test_the_block_mask_follows_the_tiles() -> None:
    """sm_90 wants the K/V block to be n_block_size and the Q block a multiple of m_block_size."""
    documents = workload(pattern="document(mean=512)")
    assert refusal(but(q_blocks=2), documents) == ""
    assert FAMILY.extras(but(q_blocks=2), documents) == {"block_size": [128, 128]}
    assert FAMILY.extras(but(n_block_size=64), documents) == {"block_size": [64, 64]}
    assert FAMILY.extras(but(), workload()) == {}  # causal is an argument of FA4
    for head_dim, keys in ((64, 128), (128, 128), (192, 96), (256, 64)):
        w = workload(head_dim, "document(mean=512)")
        assert FAMILY.extras(FAMILY.stock(w), w) == {"block_size": [128, keys]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"op": "fwd"}, "computes bwd, not fwd"),
        ({"dtype": "float32"}, "computes bfloat16 and float16, not float32"),
        ({"head_dim_v": 264}, "head_dim goes to 256, not 264"),
        ({"head_dim": 80}, "pads head_dim to 80, no multiple of 32"),
        ({"head_dim": 96}, ""),
        ({"head_dim": 136}, ""),  # there FA4 swaps dK and dV, which pads to 64
        ({"head_dim": 200, "pattern": "document(mean=512)"}, "pads head_dim to 208"),
        ({"heads_kv": 2, "head_dim_v": 64}, "sums over grouped heads only where head_dim_v equals head_dim, not 64"),
        ({"deterministic": True}, ""),
        ({"deterministic": True, "pattern": "sliding_window(100) + softcap(20)"}, ""),
        ({"deterministic": True, "pattern": "document(mean=512)"}, "not deterministic with a BlockMask on sm_90"),
        ({"pattern": "prefix_lm(100) + alibi"}, ""),
        ({"pattern": "sliding_window(1)"}, "every query sees one key under sliding_window(window=1)"),
        ({"pattern": "document(mean=1)", "seqlen_q": 4, "seqlen_k": 4}, "every query sees one key"),
    ],
)
def test_workloads_that_it_cannot_compute_are_refused(changes: dict[str, Any], words: str) -> None:
    found = FAMILY.refuses(workload(**changes), H200)
    assert words in found
    assert bool(found) == bool(words)


@pytest.mark.parametrize(
    ("changes", "default", "flash"),
    [
        ({}, "flex_flash_stock", ""),
        ({"deterministic": True}, "flex_triton_stock", "not deterministic"),
        ({"head_dim": 80}, "flex_triton_stock", "reads a wrong dq"),
        ({"head_dim": 192}, "flex_triton_stock", "no backward tile of FlexAttention's 128 keys for head_dim 192"),
        ({"head_dim": 192, "pattern": "full"}, "flex_flash_stock", ""),
        ({"head_dim_v": 64, "heads_kv": 4}, "flex_triton_stock", "sums over grouped heads"),
    ],
)
def test_the_default_of_a_backward_is_the_first_that_pytorch_ships_right(
    changes: dict[str, Any], default: str, flash: str
) -> None:
    can, refused = able(workload(**changes), H200)
    assert can[0].name == default
    assert flash in refused.get("flex_flash_stock", "")
    assert "flex_triton_stock" in [f.name for f in can]


def test_a_cpu_has_one_backward() -> None:
    """FlexAttention has none there, and PyTorch's own takes causal or nothing."""
    can, refused = able(workload(dtype="float32"), named("cpu"))
    assert [f.name for f in can] == ["sdpa_cpu"]
    assert refused["flex_cpu"] == "computes fwd, not bwd: FlexAttention has no backward on a CPU"
    can, refused = able(workload(dtype="float32", pattern="sliding_window(64)"), named("cpu"))
    assert can == []
    assert refused["sdpa_cpu"] == "has no argument for sliding_window(window=64)"


def test_labels_are_short_and_tell_configs_apart() -> None:
    assert but().label == "64x128 MSdP=1 MdQ=1 NdKV=2 SdP_swapAB PdS=2 Q=2 dO=2"
    assert workload().label == "causal b2 h16 s4096 d128 bwd"
    assert load("fa4_bwd_sm90").name == "fa4_bwd_sm90"
