"""FlexAttention's Triton family: its budgets by hand, its reasons, its options; BlockMasks in one list; fallbacks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tuner.config import Config
from tuner.families.flex_triton import FAMILY, accumulator_registers, smem_bytes
from tuner.pattern import parse
from tuner.target import Target, named
from tuner.workload import Workload

H200, B200 = named("sm_90a"), named("sm_100a")
A100 = Target("NVIDIA A100-SXM4-80GB", "sm_80", 108)
L4 = Target("NVIDIA L4", "sm_89", 58)

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def workload(head_dim: int = 128, pattern: str = "causal", **changes: Any) -> Workload:
    shape = {"batch": 2, "heads_q": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096}
    return Workload(**{**shape, **changes}, head_dim=head_dim, pattern=parse(pattern))


def config(m: int, n: int, warps: int = 4, stages: int = 3, q: int = 128, kv: int = 128, full: bool = True) -> Config:
    tiles = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
    return Config.make("flex_triton", 1, **tiles, q_block=q, kv_block=kv, full_blocks=full)


@pytest.mark.parametrize(
    ("c", "w", "target", "expected"),
    [
        (config(128, 64), workload(128), A100, 2 * (2 * 64 * 256)),  # two stages of K and V ahead, 2 bytes each
        (config(128, 64), workload(128), H200, 2 * (2 * 64 * 256 + 128 * 128)),  # and Q, for the MMA to read
        (config(128, 64, stages=1), workload(128), A100, 2 * (64 * 128)),
        (config(64, 32, stages=4), workload(96, head_dim_v=40), L4, 2 * (3 * 32 * (128 + 64))),  # powers of two
        (config(64, 32, stages=2), workload(128, dtype="float32"), A100, 4 * (32 * 256)),
    ],
)
def test_least_shared_memory_by_hand(c: Config, w: Workload, target: Target, expected: int) -> None:
    assert smem_bytes(c, w, target) == expected


@pytest.mark.parametrize(
    ("c", "w", "expected"),
    [
        (config(128, 64, 8), workload(128), 128 * (64 + 128) // 256),
        (config(128, 128, 4), workload(128), 256),
        (config(64, 32, 4), workload(192, head_dim_v=96), 64 * (32 + 128) // 128),
    ],
)
def test_accumulators_by_hand(c: Config, w: Workload, expected: int) -> None:
    assert accumulator_registers(c, w) == expected


@pytest.mark.parametrize(
    ("c", "w", "target", "words"),
    [
        (config(128, 64), workload(), A100, ""),
        (config(128, 64, q=64), workload(), A100, "BLOCK_M 128 does not divide the BlockMask's q_block 64"),
        (config(64, 128, kv=64), workload(), A100, "BLOCK_N 128 does not divide the BlockMask's kv_block 64"),
        (config(128, 128, 4), workload(), H200, "take 256 registers a thread and 255 exist"),
        (config(128, 128, 4), workload(), B200, ""),  # there accumulators live in tensor memory
        (config(128, 128, 8, 4), workload(), A100, "takes 196608 bytes of shared memory at least and 166912 exist"),
        (config(128, 128, 8, 3), workload(), L4, "takes 131072 bytes of shared memory at least and 101376 exist"),
        # 1152 is nine times 128, and four and a half times 256
        (config(64, 64, kv=256), workload(seqlen_q=1152, seqlen_k=1152), A100, "checks no bounds"),
        (config(64, 64, q=256), workload(seqlen_q=1152, seqlen_k=1152), A100, "q_block 256 does not divide"),
        (config(64, 64, kv=256), workload(seqlen_q=1100, seqlen_k=1100), A100, ""),
    ],
)
def test_every_refusal_says_why(c: Config, w: Workload, target: Target, words: str) -> None:
    found = FAMILY.feasible(c, w, target)
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize(
    ("changes", "target", "words"),
    [
        ({}, A100, ""),
        ({}, L4, ""),
        ({"dtype": "float32", "head_dim": 512}, H200, ""),
        ({}, named("cpu"), "needs a GPU"),
        ({}, Target("Tesla T4", "sm_75", 40), "needs sm_80 or newer"),
        ({"op": "bwd"}, A100, ""),
        ({"lengths_q": (4096, 9), "lengths_k": (4096, 9), "layout": "varlen"}, A100, "no varlen layout"),
    ],
)
def test_what_it_computes_and_where(changes: dict[str, Any], target: Target, words: str) -> None:
    found = FAMILY.refuses(workload(**changes), target)
    assert words in found
    assert bool(words) == bool(found)


def backward(m1: int, n1: int, m2: int, n2: int, warps: int = 4, stages: int = 2, block: int = 128) -> Config:
    tiles = {"BLOCK_M1": m1, "BLOCK_N1": n1, "BLOCK_M2": m2, "BLOCK_N2": n2, "num_warps": warps, "num_stages": stages}
    return Config.make("flex_triton", 1, **tiles, q_block=block, kv_block=block, full_blocks=True)


@pytest.mark.parametrize(
    ("c", "target", "words"),
    [
        (backward(64, 128, 128, 64, 8, 3), H200, ""),  # PyTorch's own on Hopper
        (backward(64, 32, 64, 64), A100, "BLOCK_M1 64 does not divide BLOCK_N1 32"),
        (backward(32, 64, 32, 64), A100, "BLOCK_N2 64 does not divide BLOCK_M2 32"),
        (backward(32, 96, 64, 64), A100, "BLOCK_N1 96 does not divide the BlockMask's kv_block 128"),
        (backward(32, 64, 96, 32), A100, "BLOCK_M2 96 does not divide the BlockMask's q_block 128"),
        # dk and dv of 128 rows, 256 columns, and two tiles of 128 by 64: 49,152 values of 128 threads
        (backward(64, 128, 64, 64, 4), A100, "take 384 registers a thread"),
        # dq of 128 rows and 128 columns, and two tiles of 128 by 64
        (backward(32, 32, 128, 64, 4), A100, "take 256 registers a thread"),
        (backward(64, 64, 64, 64, 8, 4), L4, ""),  # 3 stages of 64 rows of 256 columns: 98,304 bytes
        (backward(64, 64, 64, 64, 8, 5), L4, "takes 131072 bytes of shared memory at least and 101376 exist"),
    ],
)
def test_every_refusal_of_the_backward_says_why(c: Config, target: Target, words: str) -> None:
    found = FAMILY.feasible(c, workload(op="bwd"), target)
    assert words in found
    assert bool(words) == bool(found)


def test_options_keep_to_their_direction() -> None:
    extras = FAMILY.extras(backward(64, 128, 128, 64, 8, 3), workload(op="bwd"))
    assert extras["kernel_options"] == {
        "BACKEND": "TRITON",
        "bwd_BLOCK_M1": 64,
        "bwd_BLOCK_N1": 128,
        "bwd_BLOCK_M2": 128,
        "bwd_BLOCK_N2": 64,
        "bwd_num_warps": 8,
        "bwd_num_stages": 3,
    }


def test_without_a_mask_there_is_no_block_mask_to_size() -> None:
    space = FAMILY.space(workload(pattern="full + softcap(30)"))
    assert set(space) == {"BLOCK_M", "BLOCK_N", "num_warps", "num_stages"}
    dense = Config.make("flex_triton", 1, BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3)
    assert FAMILY.extras(dense, workload(pattern="full")) == {
        "kernel_options": {
            "BACKEND": "TRITON",
            "fwd_BLOCK_M": 128,
            "fwd_BLOCK_N": 64,
            "fwd_num_warps": 8,
            "fwd_num_stages": 3,
        }
    }


def test_a_few_queries_are_not_spread_over_tall_tiles() -> None:
    assert FAMILY.space(workload(seqlen_q=1))["BLOCK_M"] == (16, 32, 64)
    assert all(int(c["BLOCK_M"]) <= 64 for c in FAMILY.first(workload(seqlen_q=1)))


def test_extras_say_how_to_build_the_block_mask() -> None:
    assert FAMILY.extras(config(64, 64, q=256, kv=128, full=False), workload()) | {"kernel_options": 0} == {
        "kernel_options": 0,
        "block_size": [256, 128],
        "full_blocks": False,
    }
    assert "full_blocks" not in FAMILY.extras(config(64, 64), workload())
    assert config(64, 64).label == "64x64 128x128 full_blocks stages=3 warps=4"


@needs_torch
@pytest.mark.parametrize("pattern", ["causal", "sliding_window(100)", "document(mean=150)", "prefix_lm(300)"])
@pytest.mark.parametrize("block", [(64, 64), (128, 64)])
def test_one_list_holds_every_visible_block_in_order(pattern: str, block: tuple[int, int]) -> None:
    """Against the pattern written out, element by element."""
    import torch

    from tuner.families import flex, pattern_torch

    w = workload(64, pattern, seqlen_q=512, seqlen_k=512)
    two, one = (flex.make_block_mask(w, "cpu", block, full_blocks=full) for full in (True, False))
    assert two is not None
    assert one is not None
    assert one.full_kv_num_blocks is None
    assert one.full_q_num_blocks is None
    keep = pattern_torch.mask_mod(w, "cpu")
    assert keep is not None
    at = torch.arange(512)
    visible = keep(at[0], at[0], at[:, None], at[None, :])
    blocks = visible.view(512 // block[0], block[0], 512 // block[1], block[1]).any(dim=3).any(dim=1)
    for row, wanted in enumerate(blocks):
        count = int(one.kv_num_blocks[0, 0, row])
        assert one.kv_indices[0, 0, row, :count].tolist() == wanted.nonzero().flatten().tolist()
    for column, wanted in enumerate(blocks.T):
        count = int(one.q_num_blocks[0, 0, column])
        assert one.q_indices[0, 0, column, :count].tolist() == wanted.nonzero().flatten().tolist()
    assert one.BLOCK_SIZE == two.BLOCK_SIZE == block
    assert (int(one.kv_num_blocks.sum()), one.seq_lengths) == (int(blocks.sum()), two.seq_lengths)


@needs_torch
def test_a_call_that_torch_compile_gave_up_on_raises_instead_of_running_unfused() -> None:
    import torch

    from tuner.families import flex
    from tuner.lab_torch import make_inputs

    w = workload(16, "causal", batch=1, heads_q=1, heads_kv=1, seqlen_q=64, seqlen_k=64, dtype="float32")
    kernel = flex.build(w, "cpu", (32, 32))
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="fell back to Python"):
        kernel(make_inputs(w, "cpu", 0))
