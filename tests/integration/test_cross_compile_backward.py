"""FA4's backward compiled for a Hopper that is not here: what comes of it, and what kills the compiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cross import ROOT, architectures, in_child
from tuner.compile import Compiled, CompilePool
from tuner.config import Config, Param
from tuner.families.fa4_bwd_sm90 import FAMILY
from tuner.families.fa4_bwd_tiles import smem_bytes
from tuner.pattern import parse
from tuner.search import Search
from tuner.target import named, version_of
from tuner.trial import TrialStatus
from tuner.workload import Workload

pytestmark = [
    pytest.mark.skipif(not version_of("flash-attn-4"), reason="flash-attn-4 is not installed"),
    pytest.mark.slow,
]

SM_90A = named("sm_90a")
ABORTS: list[dict[str, Any]] = json.loads(
    (ROOT / "tests" / "fixtures" / "fa4_bwd_sm90_compiler_aborts.json").read_text()
)["configs"]
CAUSAL = Workload(
    batch=2, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_k=4096, head_dim=128, op="bwd", pattern=parse("causal")
)
DOCUMENTS = CAUSAL.with_(pattern=parse("document(mean=512) + softcap(20)"), heads_kv=4)
NAMES = ("m_block_size", "n_block_size", "num_stages_Q", "num_stages_dO", "num_stages_PdS")
NAMES += ("SdP_swapAB", "dKV_swapAB", "dQ_swapAB", "AtomLayoutMSdP", "AtomLayoutNdKV", "AtomLayoutMdQ")
REGISTERS_OF_AN_SM = 65_536


def config(*values: Param, **changes: Param) -> Config:
    params = {**dict(zip(NAMES, values, strict=True)), "num_wg": 2, "dQ_single_wg": False, "q_blocks": 1, **changes}
    return Config.make("fa4_bwd_sm90", 1, **params)


TUNED = config(64, 128, 2, 2, 1, False, False, False, 1, 2, 1)


PREAMBLE = """
import json, sys
from pathlib import Path
from tuner.config import Config
from tuner.families import fa4_bwd_launch, fa4_cache
from tuner.families.base import Room
from tuner.target import named
from tuner.workload import Workload

room = Room(named("sm_90a"), Path(sys.argv[1]))
jobs = [(Config.from_dict(c), Workload.from_dict(w)) for c, w in json.loads(sys.argv[2])]
"""


def test_configs_that_abort_the_compiler_end_as_trials_and_the_next_one_compiles(tmp_path: Path) -> None:
    with CompilePool(SM_90A, tmp_path, workers=1) as pool:
        aborting = [Config.make("fa4_bwd_sm90", 1, **c, dQ_single_wg=False, q_blocks=1) for c in ABORTS]
        found = [pool.submit(c, CAUSAL) for c in (*aborting, TUNED)]
        first, second, after = (f.result() for f in found)
    for crash in (first, second):
        assert crash.status is TrialStatus.COMPILE_CRASH
        assert "SIGABRT" in crash.error
        assert crash.files == ()
    assert after.status is TrialStatus.OK, after.error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


@pytest.fixture(scope="module")
def compiled(folder: Path) -> dict[str, Compiled]:
    sparse = Search(FAMILY, DOCUMENTS, SM_90A, budget=48, seed=0).ask(1)[0]
    jobs = {
        "stock": (FAMILY.stock(CAUSAL), CAUSAL),
        "tuned": (TUNED, CAUSAL),
        "sparse": (sparse, DOCUMENTS),
        "deterministic": (FAMILY.stock(CAUSAL), CAUSAL.with_(deterministic=True, heads_kv=4)),
    }
    with CompilePool(SM_90A, folder, workers=1) as pool:
        futures = {name: pool.submit(c, w) for name, (c, w) in jobs.items()}
        return {name: f.result() for name, f in futures.items()}


def test_it_compiles_what_comes_before_and_after_too(folder: Path, compiled: dict[str, Compiled]) -> None:
    assert {name: (c.status, c.error) for name, c in compiled.items()} == dict.fromkeys(compiled, (TrialStatus.OK, ""))
    # the backward; LSE, sums and a zero dq before it; dq after it, and where heads are grouped dk with dv
    for name, after in (("stock", 1), ("tuned", 1), ("sparse", 2), ("deterministic", 2)):
        kinds = [Path(file).parent.name for file in compiled[name].files]
        assert kinds.count("bwd_pre") == 1
        assert kinds.count("bwd_post") == after
        assert len(kinds) == 2 + after
        for file in compiled[name].files:
            assert architectures((folder / file).read_bytes()) == [90]
    assert any(file.startswith("fa4/bwd-pds1/") for file in compiled["tuned"].files)
    assert all(file.startswith("fa4/shipped/") for file in compiled["stock"].files)


def test_the_figures_are_those_of_the_backward(compiled: dict[str, Compiled]) -> None:
    for name, found in compiled.items():
        r = found.resources
        assert r.registers is not None
        assert 128 < r.registers * 3 * 128 <= REGISTERS_OF_AN_SM  # two warp groups that multiply and one that loads
        assert (r.code_bytes or 0) > 20_000
        assert (r.smem_bytes is None) == (name in ("stock", "deterministic"))
    assert compiled["tuned"].resources.spill_bytes == 0


def test_another_process_finds_what_was_compiled(folder: Path, compiled: dict[str, Compiled]) -> None:
    script = (
        PREAMBLE
        + """
built = [fa4_bwd_launch.compile_bwd(c, w, room) for c, w in jobs]
files = [[path.relative_to(room.cache_dir).as_posix() for path in b.files] for b in built]
print(json.dumps([files, fa4_cache.compiled_here]))
"""
    )
    jobs = [(FAMILY.stock(CAUSAL).to_dict(), CAUSAL.to_dict()), (TUNED.to_dict(), CAUSAL.to_dict())]
    files, fresh = in_child(script, folder, SM_90A, jobs)
    assert files == [list(compiled["stock"].files), list(compiled["tuned"].files)]
    assert fresh == []


def test_every_tunable_leads_to_an_object_of_its_own(tmp_path: Path) -> None:
    """FA4's compile key lacks num_stages_PdS: two configs that share a key would share a kernel."""
    script = (
        PREAMBLE
        + """
fa4_cache.Objects.__contains__ = lambda self, key: self.asked.append(self.cache_path / self._key_to_hash(key)) or True
fa4_bwd_launch.cubin.resources = lambda path: fa4_bwd_launch.Resources()
print(json.dumps([[str(p) for p in fa4_bwd_launch.compile_bwd(c, w, room).files] for c, w in jobs]))
"""
    )
    base = dict(TUNED.params)
    other = {"m_block_size": 128, "n_block_size": 64, "num_wg": 3, "dQ_single_wg": True}
    variants = [TUNED]
    for name, value in base.items():
        if name != "q_blocks":
            new = other.get(name, not value if isinstance(value, bool) else 3 - int(value))
            variants.append(Config.make("fa4_bwd_sm90", 1, **{**base, name: new}))
    mains = [
        next(p for p in files if Path(p).parent.parent.name.startswith("bwd-pds"))
        for files in in_child(script, tmp_path, SM_90A, [(c.to_dict(), CAUSAL.to_dict()) for c in variants])
    ]
    assert len(set(mains)) == len(mains) == 14


def test_shared_memory_is_what_fa4_lays_out(tmp_path: Path) -> None:
    """Against the structure that FA4 allocates, read while it is traced: the launch fails by this number."""
    script = (
        PREAMBLE
        + """
fa4_cache.Objects.__contains__ = lambda self, key: self.cache_path.name in ("bwd_pre", "bwd_post")
kernel = fa4_bwd_launch.interface.FlashAttentionBackwardSm90
layout, sizes = kernel._get_shared_storage_cls, []

class Enough(Exception):
    pass

def noting(self):
    sizes.append(layout(self).size_in_bytes())
    raise Enough

kernel._get_shared_storage_cls = noting
for c, w in jobs:
    try:
        fa4_bwd_launch.compile_bwd(c, w, room)
    except Enough:
        pass
print(json.dumps(sizes))
"""
    )
    jobs = [
        (w, c)
        for w in (
            CAUSAL.with_(head_dim=64, head_dim_v=64),
            CAUSAL.with_(head_dim=96, head_dim_v=96),
            CAUSAL,
            CAUSAL.with_(head_dim=192),
            CAUSAL.with_(head_dim=256, head_dim_v=256),
        )
        for c in Search(FAMILY, w, SM_90A, budget=48, seed=0).feasible[::97][:5]
    ]
    sizes = in_child(script, tmp_path, SM_90A, [(c.to_dict(), w.to_dict()) for w, c in jobs])
    assert len(jobs) > 15
    assert sizes == [smem_bytes(dict(c.params), w) for w, c in jobs]
