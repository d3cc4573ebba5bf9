"""FA4's kernels for Blackwell are made on a machine that need not have a GPU, each variant a kernel of its own.

One process compiles everything here, as a compiling child does, so that what one config put in FA4's place
for its call would show in the next one's kernel if it stayed there.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cross import in_child
from tuner.config import Config
from tuner.families import load
from tuner.pattern import parse
from tuner.target import named, version_of
from tuner.workload import Workload

pytestmark = [
    pytest.mark.skipif(not version_of("flash-attn-4"), reason="flash-attn-4 is not installed"),
    pytest.mark.slow,
]

B200 = named("sm_100a")
SHAPE: dict[str, Any] = {"batch": 2, "heads_q": 8, "heads_kv": 8, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128}
DENSE = Workload(**SHAPE)
DOCUMENTS = Workload(**SHAPE, pattern=parse("document(mean=512)"))
BACKWARD = Workload(**SHAPE, op="bwd", pattern=parse("causal"))

# Compiles in this order in one process. After each: the objects, what they take, the shared memory that the
# kernel object itself declares, and whether FA4 is as it was before.
ONE_PROCESS = """
import json, sys
from pathlib import Path
from tuner.config import Config
from tuner.families import load
from tuner.families.base import Room
from tuner.target import named
from tuner.workload import Workload
from flash_attn.cute import interface, utils

KERNELS = ("FlashAttentionForwardSm100", "FlashAttentionBackwardSm100")
made = []
for name in KERNELS:
    class Noting(getattr(interface, name)):
        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            made.append(self)
    setattr(interface, name, Noting)

def seams():
    cached = (interface._flash_attn_fwd, interface._flash_attn_fwd_combine, interface._flash_attn_bwd)
    parts = [f.compile_cache for f in (*cached, interface._bwd_preprocess, interface._bwd_postprocess_convert)]
    parts += [interface._get_fwd_config, *(getattr(interface, n) for n in KERNELS)]
    return [id(p) for p in parts + [getattr(utils, n) for n in dir(utils) if n.startswith("_get_")]]

room, before, answers = Room(named("sm_100a"), Path(sys.argv[1])), seams(), []
for config, workload in json.loads(sys.argv[2]):
    config = Config.from_dict(config)
    made.clear()
    built = load(config.family).compile(config, Workload.from_dict(workload), room)
    kernel = made[-1] if made else None
    answers.append({
        "files": [path.relative_to(room.cache_dir).as_posix() for path in built.files],
        "resources": built.resources.to_dict(),
        "declared": kernel.shared_storage.size_in_bytes() if kernel else None,
        "kernel": {n: getattr(kernel, n, None) for n in (
            "q_stage", "kv_stage", "use_2cta_instrs", "use_clc_scheduler", "n_block_size", "is_split_kv", "pack_gqa",
            "ex2_emu_freq", "num_regs_softmax", "num_regs_correction", "num_regs_other",
            "tile_n", "num_regs_reduce", "num_regs_compute", "dQ_reduce_ncol", "sdQaccum_stage",
        )} if kernel else None,
        "restored": seams() == before,
    })
print(json.dumps(answers))
"""


def variant(family: str, w: Workload, **params: Any) -> Config:
    """Return a config with the first value of the family's space for whatever is not named."""
    space = load(family).space(w)
    config = Config.make(family, 1, **{name: values[0] for name, values in space.items()} | params)
    assert load(family).feasible(config, w, B200) == ""
    return config


PAIRED = variant("fa4_fwd_sm100", DENSE, tile_n=128, two_cta=True, ex2_emu_freq=10, num_regs="184-80")
OTHER_REGISTERS = variant("fa4_fwd_sm100", DENSE, tile_n=128, two_cta=True, ex2_emu_freq=10, num_regs="200-64")
SPARSE = variant("fa4_fwd_sm100", DOCUMENTS, mask="block", tile_n=64, q_stage=1, kv_stage=2, kv_blocks=2)
SENDING = variant("fa4_bwd_sm100", BACKWARD, two_cta=True, dQ_reduce_ncol=16, num_regs="144-144")
GROUPED = Workload(**{**SHAPE, "head_dim": 64, "heads_kv": 2}, op="bwd", deterministic=True)
ALONE = variant("fa4_bwd_sm100", GROUPED, dQ_reduce_ncol=8)
JOBS = [
    (PAIRED, DENSE),
    (OTHER_REGISTERS, DENSE),
    (SPARSE, DOCUMENTS),
    (SENDING, BACKWARD),
    (ALONE, GROUPED),
    (PAIRED, DENSE),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="module")
def built(folder: Path) -> list[dict[str, Any]]:
    order = [(config.to_dict(), workload.to_dict()) for config, workload in JOBS]
    answers: list[dict[str, Any]] = in_child(ONE_PROCESS, folder, B200, order)
    return answers


def architectures(data: bytes) -> set[int]:
    """Return the SM of every GPU image in an object: low byte of e_flags, where e_machine is 190 (CUDA)."""
    found, at = set(), data.find(b"\x7fELF")
    while at >= 0:
        header = data[at : at + 64]
        if len(header) == 64 and struct.unpack_from("<H", header, 18)[0] == 190:
            found.add(struct.unpack_from("<I", header, 48)[0] >> 8 & 0xFF)
        at = data.find(b"\x7fELF", at + 4)
    return found


def test_every_object_holds_code_for_blackwell_and_its_figures_fit_the_chip(
    folder: Path, built: list[dict[str, Any]]
) -> None:
    for answer in built:
        r = answer["resources"]
        assert all(architectures((folder / name).read_bytes()) == {100} for name in answer["files"])
        assert r["registers"] * 512 <= 65536  # 16 warps at launch
        assert r["code_bytes"] > 10_000
        assert r["tmem_columns"] <= 512
    assert [a["resources"]["tmem_columns"] for a in built] == [512, 512, 2 * 64 + 128, 512, 512, 512]


def test_the_kernels_are_what_the_configs_say(built: list[dict[str, Any]]) -> None:
    paired, other, sparse, sending, alone, _ = (a["kernel"] for a in built)
    assert (paired["q_stage"], paired["use_2cta_instrs"], paired["kv_stage"]) == (2, True, 6)
    assert (paired["num_regs_softmax"], paired["num_regs_correction"], paired["num_regs_other"]) == (184, 80, 64)
    assert (other["num_regs_softmax"], other["num_regs_correction"], other["num_regs_other"]) == (200, 64, 48)
    assert (paired["ex2_emu_freq"], sparse["ex2_emu_freq"]) == (10, 0)
    assert (sparse["q_stage"], sparse["n_block_size"], sparse["kv_stage"]) == (1, 64, 2)
    assert sparse["use_2cta_instrs"] is False
    assert (sending["use_2cta_instrs"], sending["tile_n"]) == (True, 128)
    assert (sending["dQ_reduce_ncol"], sending["sdQaccum_stage"]) == (16, 2)
    assert (sending["num_regs_reduce"], sending["num_regs_compute"]) == (144, 144)
    assert (alone["use_2cta_instrs"], alone["dQ_reduce_ncol"], alone["sdQaccum_stage"]) == (False, 8, 8)


def test_shared_memory_is_what_the_kernel_declares(built: list[dict[str, Any]]) -> None:
    for answer in (*built[:3], built[4]):
        assert answer["resources"]["smem_bytes"] == answer["declared"]
    assert built[3]["resources"]["smem_bytes"] is None  # a 2-CTA backward puts several things in one place
    assert built[3]["declared"] <= 227 * 1024


def test_variants_share_no_object_and_the_same_one_is_found_again(built: list[dict[str, Any]]) -> None:
    """FA4's own key holds neither registers nor stages: two such variants differ by their folder."""
    paired, other, sparse, sending, alone, again = (a["files"] for a in built)
    assert Path(paired[0]).name == Path(other[0]).name
    assert len({paired[0], other[0], sparse[0], sending[0], alone[0]}) == 5
    assert again == paired
    assert built[5]["declared"] is None  # nothing was compiled for it
    assert (len(sending), len(alone)) == (3, 3)  # main, before and after


def test_fa4_is_left_as_it_was(built: list[dict[str, Any]]) -> None:
    assert [a["restored"] for a in built] == [True] * len(built)
