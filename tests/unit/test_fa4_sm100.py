"""FA4's tunables on Blackwell: tensor memory, shared memory and registers by hand, and every refusal's reason."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tuner import families
from tuner.config import Config, Param
from tuner.families import fa4_sm100_tiles as tiles
from tuner.families.fa4_bwd_sm100 import FAMILY as BWD
from tuner.families.fa4_bwd_sm100 import dq_stages, smem_bytes, tmem_columns
from tuner.families.fa4_fwd_sm100 import FAMILY as FWD
from tuner.pattern import parse
from tuner.target import Target, named
from tuner.trial import Resources, Trial, TrialStatus
from tuner.workload import Workload

B200 = named("sm_100a")
KIB = 1024


def workload(head_dim: int = 128, pattern: str = "causal", **changes: Any) -> Workload:
    shape = {"batch": 2, "heads_q": 16, "heads_kv": 16, "seqlen_q": 8192, "seqlen_k": 8192}
    return Workload(**{**shape, **changes}, head_dim=head_dim, pattern=parse(pattern))


def backward(head_dim: int = 128, pattern: str = "causal", **changes: Any) -> Workload:
    return workload(head_dim, pattern, op="bwd", **changes)


def fwd(tile_n: int = 128, q_stage: int = 2, **changes: Param) -> Config:
    rest: dict[str, Param] = {
        "mask": "native",
        "kv_stage": 0,
        "two_cta": False,
        "use_clc_scheduler": False,
        "num_splits": 1,
        "ex2_emu_freq": 16,
        "num_regs": "192-72",
        "q_blocks": 1,
        "kv_blocks": 1,
        "pack_gqa": False,
    }
    return Config.make("fa4_fwd_sm100", 1, tile_n=tile_n, q_stage=q_stage, **{**rest, **changes})


def bwd(**changes: Param) -> Config:
    rest: dict[str, Param] = {
        "mask": "native",
        "two_cta": False,
        "tile_n": 128,
        "hd256_generic": False,
        "dQ_reduce_ncol": 0,
        "num_regs": "136-144",
        "q_blocks": 1,
        "kv_blocks": 1,
    }
    return Config.make("fa4_bwd_sm100", 1, **{**rest, **changes})


@pytest.mark.parametrize(
    ("c", "w", "columns"),
    [
        (fwd(128, 2), workload(128), 2 * 128 + 2 * 128),  # FA4's own tile fills tensor memory
        (fwd(192, 1), workload(128), 2 * 192 + 128),
        (fwd(96, 2), workload(64), 2 * 96 + 2 * 64),
        (fwd(128, 1), workload(256), 2 * 128 + 256),
        (fwd(64, 2), workload(72, head_dim_v=40), 2 * 64 + 2 * 48),  # 40 is padded to 48
    ],
)
def test_columns_of_tensor_memory_by_hand(c: Config, w: Workload, columns: int) -> None:
    assert tiles.tmem_columns(c, w) == columns


@pytest.mark.parametrize(
    ("c", "w", "stages", "smem"),
    [
        # Q and O 2*128*128*2 bytes each; (224 - 128) KiB hold 3 tiles of 128*128*2
        (fwd(128, 2), workload(128), 3, 128 * KIB + 3 * 32 * KIB),
        # each of two blocks holds half of every K and V tile
        (fwd(128, 2, two_cta=True), workload(128, "full"), 6, 128 * KIB + 6 * 16 * KIB),
        (fwd(128, 2, kv_stage=2), workload(128), 3, 128 * KIB + 2 * 32 * KIB),
        # 160 KiB beside Q and O of 32 KiB each, in tiles of 16 KiB
        (fwd(128, 2), workload(64), 10, 64 * KIB + 10 * 16 * KIB),
        # O is float32 where splits are combined; it shares Q's room from 128 columns on
        (fwd(128, 2, num_splits=4), workload(128), 3, 128 * KIB + 3 * 32 * KIB),
        (fwd(128, 2, num_splits=4), workload(64), 8, 96 * KIB + 8 * 16 * KIB),
        # 192 over 128: two whole tiles of 48 KiB beside a Q of 96 KiB, and a V of 32 KiB between them
        (fwd(128, 2), workload(192, head_dim_v=128), 2, 96 * KIB + 2 * 48 * KIB + 32 * KIB),
        # with smaller tiles three whole ones fit, and FA4 takes the same ring of K, V, K
        (fwd(96, 2), workload(192, head_dim_v=128), 3, 96 * KIB + 2 * 36 * KIB + 24 * KIB),
        (fwd(96, 2, kv_stage=2), workload(192, head_dim_v=128), 3, 96 * KIB + 2 * 36 * KIB),
        # 256: O in the place of Q, 64 KiB, and tiles of 64 KiB
        (fwd(128, 1), workload(256), 2, 64 * KIB + 2 * 64 * KIB),
        # head_dim 8 is padded to 16: no more than 32 stages
        (fwd(64, 2), workload(8), 32, 16 * KIB + 32 * 2 * KIB),
    ],
)
def test_stages_and_shared_memory_by_hand(c: Config, w: Workload, stages: int, smem: int) -> None:
    assert tiles.kv_stages_that_fit(c, w) == stages
    in_flight = 2 if w.head_dim == 256 else c["q_stage"]  # a single Q tile of 256 has two score tiles in flight
    assert tiles.smem_bytes(c, w) == smem + 1024 * (in_flight + 1)


@pytest.mark.parametrize(
    ("c", "w", "in_flight"),
    [
        (fwd(128, 1), workload(128), True),
        (fwd(96, 1), workload(128), False),
        (fwd(128, 1), workload(128, "causal + softcap(9)"), False),
        (fwd(128, 1, mask="block"), workload(128), False),
        (fwd(128, 1), workload(192, head_dim_v=128), False),
        (fwd(128, 2), workload(128), False),
        (fwd(128, 1, num_splits=2), workload(128), False),  # 8192 keys are 64 tiles, 32 a split, and it takes 64
        (fwd(128, 1, num_splits=4), workload(64), True),  # 16 a split, and it takes 16
        (fwd(128, 1, num_splits=4), workload(64, "sliding_window(1024)"), False),
        (fwd(128, 1, num_splits=2), workload(256), False),
    ],
)
def test_when_fa4_keeps_two_score_tiles_in_flight(c: Config, w: Workload, in_flight: bool) -> None:
    assert tiles.s_ping_pong(c, w) is in_flight


def test_shared_memory_that_fa4_measured_at_a_launch() -> None:
    """FA4 notes 247,808 bytes for head_dim 192 over 128 with tile_n=192: too many, although two whole stages fit."""
    c, w = fwd(192, 1), workload(192, head_dim_v=128)
    assert tiles.smem_bytes(c, w) == 247_808
    assert "takes 247808 bytes of shared memory and 232448 exist" in FWD.feasible(c, w, B200)


@pytest.mark.parametrize(
    ("c", "registers"),
    [
        (fwd(num_regs="192-72"), (192, 72, 56)),  # 512 - 2*192 - 72
        (fwd(num_regs="200-64"), (200, 64, 48)),
        (fwd(q_stage=1, num_regs="256-160"), (256, 160, 48)),  # (512 - 256 - 160) for two groups
        (fwd(q_stage=1, num_regs="184-80"), (184, 80, 120)),
    ],
)
def test_registers_of_the_forward_by_hand(c: Config, registers: tuple[int, int, int]) -> None:
    assert tiles.forward_registers(c) == registers


@pytest.mark.parametrize(
    ("c", "w", "words"),
    [
        (fwd(), workload(pattern="document(mean=512)"), "no native argument for document"),
        (fwd(mask="block"), workload(pattern="full"), "no BlockMask to build"),
        (fwd(kv_blocks=2), workload(), "mask=native has none"),
        (fwd(pack_gqa=True), workload(), "more query heads than K/V heads"),
        (fwd(), workload(seqlen_q=100), "a second Q tile would be empty: 100 rows fill one of 128"),
        (fwd(pack_gqa=True), workload(seqlen_q=100, heads_kv=1), ""),  # 1,600 rows when packed
        (fwd(use_clc_scheduler=True), workload(pattern="full"), "no native mask makes tiles uneven"),
        (fwd(use_clc_scheduler=True, mask="block"), workload(), "no native mask makes tiles uneven"),
        (fwd(128, 1, use_clc_scheduler=True, two_cta=True), workload(256), "of head_dim 256 wrongly"),
        (fwd(two_cta=True), workload(), "no 2-CTA kernel for causal at head_dim 128"),
        (fwd(two_cta=True), workload(64, "full"), "no 2-CTA kernel for full at head_dim 64"),
        (fwd(two_cta=True, num_splits=2), workload(pattern="full"), "does not split the keys of 2-CTA tiles"),
        (fwd(128, 1, two_cta=True, mask="block"), workload(256), "2-CTA tiles span two"),
        (fwd(two_cta=True), workload(pattern="full", seqlen_q=256), "256 rows fill one thread block's tiles"),
        (
            fwd(two_cta=True, pack_gqa=True),
            workload(pattern="full", heads_q=12, heads_kv=4),
            "3 packed heads do not divide a tile of 128",
        ),
        (fwd(num_splits=2), workload(192, head_dim_v=128), "head_dim 192 differs from head_dim_v 128"),
        (fwd(num_splits=8), workload(seqlen_k=512, seqlen_q=512), "4 tiles of keys cannot be split 8 ways"),
        (fwd(80), workload(), "tile_n 80 is not a multiple of 32"),
        (fwd(160, 2), workload(128), "takes 576 columns of tensor memory and 512 exist"),
        (fwd(num_regs="256-160"), workload(), "leaves -160 registers to a thread that loads"),
        (fwd(128, 1, num_regs="120-80"), workload(), "setmaxnreg raises softmax from 128"),
        (fwd(160, 1), workload(256), "takes 576 columns"),
        (fwd(128, 1, kv_stage=2), workload(256), "2 stages of K and V fit: kv_stage=2 is no other kernel"),
    ],
)
def test_every_refusal_of_the_forward_says_why(c: Config, w: Workload, words: str) -> None:
    found = FWD.feasible(c, w, B200)
    assert words in found
    assert bool(words) == bool(found)


def test_a_tile_of_256_is_paired_with_an_empty_one_while_pairs_fit_one_wave() -> None:
    c = fwd(128, 1, two_cta=True)
    few, many = (workload(256, "full", batch=b, heads_q=37, heads_kv=37, seqlen_q=1) for b in (2, 3))
    assert FWD.feasible(c, few, B200) == ""  # 2 * 2 * 37 = 148 blocks
    assert "1 rows fill one thread block's tiles" in FWD.feasible(c, many, B200)


@pytest.mark.parametrize("family", [FWD, BWD])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float32"}, "not float32"),
        ({"lengths_q": (8192, 9), "lengths_k": (8192, 9), "layout": "varlen"}, "no varlen layout"),
        ({"head_dim": 136}, "not 136 over 136"),
        ({"head_dim": 192}, "not 192 over 192"),
        ({"head_dim_v": 256}, "not 128 over 256"),
        ({"head_dim": 192, "head_dim_v": 128}, ""),
        ({"head_dim": 256}, ""),
        ({"head_dim": 8}, ""),
    ],
)
def test_what_blackwell_cannot_compute_is_refused(family: Any, changes: dict[str, Any], words: str) -> None:
    w = workload(**{"op": "fwd" if family is FWD else "bwd", **changes})
    found = family.refuses(w, B200)
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize("family", [FWD, BWD])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a", "cpu"])
def test_no_other_architecture_is_taken(family: Any, arch: str) -> None:
    w = workload(op="fwd" if family is FWD else "bwd")
    found = family.refuses(w, Target("another", arch, 100))
    assert found == f"needs sm_100a or sm_103a, the target is {arch}"
    assert family.refuses(w, Target("NVIDIA B300", "sm_103a", 148)) == ""


def test_each_direction_refuses_the_other() -> None:
    assert FWD.refuses(backward(), B200) == "computes fwd, not bwd"
    assert BWD.refuses(workload(), B200) == "computes bwd, not fwd"


@pytest.mark.parametrize(
    "w",
    [
        workload(64, "full"),
        workload(128, "causal", heads_kv=4),
        workload(128, "full", seqlen_q=128, seqlen_k=4096, batch=1),
        workload(192, "full", head_dim_v=128),
        workload(256, "sliding_window(1024)"),
        workload(96, "document(mean=512)", heads_kv=2),
    ],
    ids=lambda w: w.label,
)
def test_what_is_feasible_fits_the_chip_by_an_own_account(w: Workload) -> None:
    """Every feasible point keeps within columns, bytes and registers counted here from the parts of a block."""
    space = FWD.space(w)
    feasible = 0
    for values in product(*space.values()):
        p: dict[str, Any] = dict(zip(space, values, strict=True))
        c = Config.make("fa4_fwd_sm100", 1, **p)
        if FWD.feasible(c, w, B200):
            continue
        feasible += 1
        d, dv = (16 * ((x + 15) // 16) for x in (w.head_dim, w.head_dim_v))
        assert 2 * p["tile_n"] + p["q_stage"] * dv <= 512
        softmax, correction = map(int, p["num_regs"].split("-"))
        groups = p["q_stage"] * softmax + correction + (3 - p["q_stage"]) * tiles.forward_registers(c)[2]
        assert groups * 128 <= 65536
        shared = p["q_stage"] * 128 * d * 2 + 2 * p["tile_n"] * min(d, dv) * 2 // (2 if p["two_cta"] else 1)
        assert shared <= tiles.smem_bytes(c, w) <= 227 * KIB
        assert p["two_cta"] is False or (p["mask"] == "native" and p["num_splits"] == 1)
    assert feasible >= 20


@pytest.mark.parametrize(
    ("w", "offers"),
    [
        (workload(128, "full"), {"two_cta": (True, False), "use_clc_scheduler": (False,), "num_splits": (1,)}),
        (workload(128, "causal"), {"two_cta": (False,), "use_clc_scheduler": (False, True), "num_splits": (1,)}),
        (workload(128, "causal", seqlen_q=1), {"q_stage": (1,), "num_splits": (1, 2, 4, 8)}),
        (workload(128, "causal", seqlen_q=16, heads_kv=1), {"q_stage": (2, 1), "pack_gqa": (True, False)}),
        (workload(192, "causal", head_dim_v=128, batch=1, seqlen_q=1), {"num_splits": (1,)}),
        (workload(128, "document(mean=64)"), {"mask": ("block",), "use_clc_scheduler": (False,)}),
        (workload(256, "causal"), {"q_stage": (1,), "two_cta": (True, False)}),
    ],
)
def test_the_space_offers_only_what_a_workload_has(w: Workload, offers: dict[str, Any]) -> None:
    assert {name: FWD.space(w)[name] for name in offers} == offers


@pytest.mark.parametrize(
    ("c", "w", "columns"),
    [
        (bwd(), backward(128), 4 * 128),
        (bwd(two_cta=True), backward(128), 4 * 128),
        (bwd(two_cta=True, tile_n=64), backward(128), 4 * 64),
        (bwd(), backward(64), 2 * 128 + 2 * 64 + 128),  # P and dS have columns of their own
        (bwd(), backward(96, head_dim_v=72), 2 * 128 + 96 + 96),  # 72 is padded to 96
        (bwd(two_cta=True), backward(192, head_dim_v=128), 512),
        (bwd(two_cta=True), backward(256), None),
    ],
)
def test_columns_of_the_backward_by_hand(c: Config, w: Workload, columns: int | None) -> None:
    assert tmem_columns(c, w) == columns


@pytest.mark.parametrize(
    ("c", "w", "words"),
    [
        (bwd(tile_n=64), backward(), "an MMA has 128 rows"),
        (bwd(tile_n=64, two_cta=True), backward(), ""),
        (bwd(tile_n=64, two_cta=True, mask="block", kv_blocks=2), backward(), "without a BlockMask"),
        (bwd(tile_n=64, two_cta=True), backward(128, head_dim_v=72), "not 128 over 72"),
        (bwd(two_cta=True, mask="block"), backward(), "even number of tile_n"),
        (bwd(two_cta=True, mask="block", kv_blocks=2), backward(), ""),
        (bwd(mask="partial"), backward(deterministic=True), "order of writes"),
        (bwd(q_blocks=2), backward(), "mask=native has none"),
        (bwd(dQ_reduce_ncol=32), backward(), "the same kernel as dQ_reduce_ncol=0"),
        (bwd(two_cta=True, dQ_reduce_ncol=8), backward(), "the same kernel as dQ_reduce_ncol=0"),
        (bwd(two_cta=True, dQ_reduce_ncol=8), backward(deterministic=True), ""),
        (bwd(dQ_reduce_ncol=24), backward(64), "does not divide a block's 64 columns"),
        (bwd(num_regs="128-192"), backward(), "leaves 0 registers to a thread that loads"),
        (bwd(num_regs="136-120"), backward(), "setmaxnreg raises the others from 128"),
        (bwd(two_cta=True, hd256_generic=True), backward(256), "with 64 rows of K/V"),
        (bwd(two_cta=True, num_regs="136-144"), backward(256), "share out their registers themselves"),
        (bwd(two_cta=True, hd256_generic=True, tile_n=64), backward(256), ""),
    ],
)
def test_every_refusal_of_the_backward_says_why(c: Config, w: Workload, words: str) -> None:
    found = BWD.feasible(c, w, B200)
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (backward(pattern="causal + alibi"), ""),
        (backward(pattern="causal + softcap(30)"), ""),
        (backward(256, "causal + softcap(30)"), "neither a BlockMask nor a softcap"),
        (backward(256, "document(mean=512)"), "neither a BlockMask nor a softcap"),
        (backward(pattern="document(mean=512)", deterministic=True), "order of writes"),
        (backward(deterministic=True), ""),
    ],
)
def test_gradients_that_fa4_does_not_give_here_are_refused(w: Workload, words: str) -> None:
    found = BWD.refuses(w, B200)
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize(
    ("w", "smem"),
    [
        # Q twice, K, V, dO, dS, 32 KiB each; dQ's 64 columns of float32
        (backward(128), 6 * 32 * KIB + 32 * KIB),
        (backward(64), 5 * 16 * KIB + 32 * KIB + 32 * KIB),
        # grouped: dV leaves by twice 32 columns of float32, for which dO's 16 KiB are too few
        (backward(64, heads_kv=4), 6 * 16 * KIB + 32 * KIB + 32 * KIB),
    ],
)
def test_shared_memory_of_the_backward_by_hand(w: Workload, smem: int) -> None:
    assert smem_bytes(bwd(), w) == smem + 3 * KIB
    assert smem_bytes(bwd(two_cta=True), w) is None


def test_pieces_of_dq_in_flight() -> None:
    assert [dq_stages(bwd(dQ_reduce_ncol=n)) for n in (8, 16)] == [8, 4]  # 64 columns
    assert [dq_stages(bwd(two_cta=True, dQ_reduce_ncol=n)) for n in (16, 32)] == [2, 1]  # 32 in each of two blocks


def test_the_backward_of_wider_heads_holds_two_tiles_in_a_block_of_the_mask() -> None:
    for d, dv, kv in ((128, 128, 128), (192, 128, 256)):
        w = backward(d, "document(mean=512)", head_dim_v=dv)
        assert BWD.extras(BWD.stock(w), w) == {"block_size": [256, kv]}


def test_columns_of_tensor_memory_pass_through_json_and_old_results_have_none() -> None:
    trial = Trial(fwd(), TrialStatus.OK, resources=Resources(128, 0, 230_000, 90_000, 512))
    assert Trial.from_dict(trial.to_dict()) == trial
    old = {**trial.to_dict(), "resources": {"registers": 128, "spill_bytes": 0, "smem_bytes": 1, "code_bytes": 2}}
    assert Trial.from_dict(old).resources == Resources(128, 0, 1, 2, None)


def test_labels_are_short_and_tell_configs_apart() -> None:
    assert fwd(num_splits=2).label == "ex2=16 native regs=192-72 splits=2 q_stage=2 tile_n=128"
    assert fwd().label != fwd(kv_stage=2).label
    assert bwd(two_cta=True).label == "native regs=136-144 tile_n=128 2cta"


@pytest.mark.parametrize(
    ("fields", "words", "block"),
    [
        ({"head_dim": 128}, "", [256, 128]),
        ({"head_dim": 128, "op": "bwd"}, "", [256, 128]),
        ({"head_dim": 192, "head_dim_v": 128, "op": "bwd"}, "", [256, 256]),
        ({"head_dim": 160}, "not 160 over 160", None),
        ({"head_dim": 256}, "", [256, 128]),
        ({"head_dim": 256, "op": "bwd"}, "has no BlockMask", None),
    ],
)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_flexattentions_flash_backend_takes_there_what_fa4_takes(
    arch: str, fields: dict[str, Any], words: str, block: list[int] | None
) -> None:
    rival, other = families.load("flex_flash_sm100_stock"), families.load("flex_flash_stock")
    shape = {"batch": 1, "heads_q": 2, "heads_kv": 2, "seqlen_q": 512, "seqlen_k": 512, "pattern": parse("causal")}
    w = Workload(**{**shape, **fields})
    reason = rival.refuses(w, named(arch))
    assert (reason == "") is (words == "")
    assert words in reason
    assert other.refuses(w, named(arch)).startswith("needs sm_90a")
    if block:
        assert rival.extras(rival.stock(w), w)["block_size"] == block
