"""``flashtune compile`` makes real Hopper code on a machine that need not have a GPU.

The installed command; every object it leaves is looked into apart from what it says of it. Then the
pool beneath it, whose objects travel to another folder and serve there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cross import architectures, in_child
from tuner.compile import Compiled, CompilePool
from tuner.config import Config
from tuner.families import load
from tuner.pattern import parse
from tuner.target import named, version_of
from tuner.trial import TrialStatus
from tuner.workload import Workload
from workers.artifacts import FolderArtifacts

pytestmark = pytest.mark.skipif(not version_of("flash-attn-4"), reason="flash-attn-4 is not installed")

FLASHTUNE = Path(sys.executable).with_name("flashtune")
REGISTERS_OF_AN_SM = 65536
CAUSAL = ("compile", "--target", "sm_90a", "-n", "4", "--pattern", "causal", "--head-dim", "64")


def run(home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ,
        "FLASHTUNE_HOME": str(home),
        "FLASHTUNE_COMPILE_WORKERS": "2",
        "CUDA_VISIBLE_DEVICES": "",  # as on a machine without a GPU
    }
    done = subprocess.run(
        [FLASHTUNE, *args], cwd=home, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def compiled(home: Path, *args: str) -> list[dict[str, Any]]:
    answer = json.loads(run(home, *args, "--json").stdout)
    assert answer["target"]["arch"] == "sm_90a"
    configs: list[dict[str, Any]] = answer["configs"]
    return configs


def objects(home: Path) -> dict[Path, tuple[int, int]]:
    """Return the compiled objects with their times and inodes, which writing one again would change."""
    return {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in home.rglob("*.o")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def causal(home: Path) -> list[dict[str, Any]]:
    return compiled(home, *CAUSAL)


def test_every_config_compiles_and_fits_the_chip(causal: list[dict[str, Any]]) -> None:
    assert [c["status"] for c in causal] == ["ok"] * 4, causal
    stock, *tuned = causal
    assert (stock["config"]["family"], stock["config"]["params"]) == ("fa4_fwd_sm90", {})
    assert len({json.dumps(c["config"]) for c in causal}) == 4
    for c in causal:
        assert 0 < c["registers"] <= 255
        assert c["compile_s"] > 0
        assert c["code_bytes"] > 10_000
        assert c["spill_bytes"] == 0  # what would spill is not feasible
    for c in tuned:
        groups = c["config"]["params"]["tile_m"] // 64 + 1  # of 128 threads: one for each 64 rows, one that loads
        assert c["registers"] * groups * 128 <= REGISTERS_OF_AN_SM


def test_shared_memory_holds_q_the_stages_of_k_and_v_and_barriers(causal: list[dict[str, Any]]) -> None:
    stock, *tuned = causal
    assert stock["smem_bytes"] is None  # its tiles are FA4's own affair
    for c in tuned:
        p = c["config"]["params"]
        rows = p["tile_m"] + 2 * p["num_stages"] * p["tile_n"]  # of 64 values of 2 bytes
        probabilities = 0 if p["mma_pv_is_rs"] else p["tile_m"] * p["tile_n"]
        assert c["smem_bytes"] == 2 * (64 * rows + probabilities) + 1024
        assert c["smem_bytes"] <= 227 * 1024


def test_every_object_holds_code_for_hopper(home: Path, causal: list[dict[str, Any]]) -> None:
    found = objects(home)
    assert len(found) == len(causal)
    for path in found:
        assert architectures(path.read_bytes()) == [90]
    assert {oct(p.stat().st_mode & 0o077) for p in home.rglob("sm_90a")} == {"0o0"}  # nobody else can put code there


def test_compiled_once_it_is_answered_from_the_cache(home: Path, causal: list[dict[str, Any]]) -> None:
    before = objects(home)
    again = run(home, *CAUSAL)
    assert objects(home) == before
    assert "4 configs" in again.stdout
    for c in causal:  # the table has the same figures
        words = [str(c[name]) for name in ("registers", "smem_bytes", "code_bytes") if c[name] is not None]
        assert any(set(words) <= set(line.split()) for line in again.stdout.splitlines())


def test_a_block_mask_with_documents_and_softcap_compiles(home: Path, causal: list[dict[str, Any]]) -> None:
    before = objects(home)
    pattern = ("--pattern", "document(mean=512) + softcap(30)", "--head-dim", "64")
    stock, tuned = compiled(home, "compile", "--family", "fa4_fwd_sm90", "-n", "2", *pattern)
    assert (stock["status"], tuned["status"]) == ("ok", "ok"), (stock["error"], tuned["error"])
    assert tuned["config"]["params"]["mask"] == "block"
    assert 0 < tuned["registers"] <= 255
    assert tuned["code_bytes"] > causal[1]["code_bytes"]  # the same tile without mask_mod and score_mod
    assert len(objects(home)) == len(before) + 2
    assert all(architectures(p.read_bytes()) == [90] for p in objects(home))


ROOT = Path(__file__).parents[2]
SM_90A = named("sm_90a")
LONG = Workload(batch=1, heads_q=4, heads_kv=4, seqlen_q=4096, seqlen_k=4096, head_dim=64, pattern=parse("causal"))
SHORT = replace(LONG, seqlen_q=1024, seqlen_k=1024)  # FA4 has one kernel for both lengths
STOCK = Config.make("fa4_fwd_sm90", 1)
TUNED = next(c for c in load("fa4_fwd_sm90").first(LONG) if c["mask"] == "native")

# Compiles in this order in one process, and tells what was truly compiled.
ONE_PROCESS = """
import json, sys
from pathlib import Path
from tuner.config import Config
from tuner.families import load
from tuner.families.base import Room
from tuner.target import named
from tuner.workload import Workload

room, files = Room(named("sm_90a"), Path(sys.argv[1])), []
for config, workload in json.loads(sys.argv[2]):
    config = Config.from_dict(config)
    built = load(config.family).compile(config, Workload.from_dict(workload), room)
    files.append([path.relative_to(room.cache_dir).as_posix() for path in built.files])

from tuner.families import fa4_cache
print(json.dumps([files, fa4_cache.compiled_here]))
"""


def in_one_process(cache: Path, *jobs: tuple[Config, Workload]) -> tuple[list[list[str]], list[str]]:
    """Return the files of every job and the hashes of the kernels that were compiled and not found."""
    order = [(config.to_dict(), workload.to_dict()) for config, workload in jobs]
    files, fresh = in_child(ONE_PROCESS, cache, SM_90A, order)
    return files, fresh


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("here")


@pytest.fixture(scope="module")
def pooled(here: Path) -> tuple[Compiled, Compiled]:
    with CompilePool(SM_90A, here, workers=1) as pool:
        stock, tuned = (pool.submit(c, LONG) for c in (STOCK, TUNED))
        return stock.result(), tuned.result()


def test_the_pool_says_which_objects_a_config_needs(here: Path, pooled: tuple[Compiled, Compiled]) -> None:
    assert [c.status for c in pooled] == [TrialStatus.OK] * 2, pooled
    for found in pooled:
        (name,) = found.files
        assert architectures((here / name).read_bytes()) == [90]
    assert {here / name for found in pooled for name in found.files} == set(objects(here))
    stock, tuned = (found.files[0] for found in pooled)
    assert stock.startswith("fa4/shipped/")
    assert tuned.startswith("fa4/stages2/")


def test_an_object_that_travelled_is_not_compiled_again(
    here: Path, pooled: tuple[Compiled, Compiled], tmp_path: Path
) -> None:
    """The third kernel is new to the other folder: it shows that what is compiled there is noticed."""
    there, artifacts = tmp_path / "there", FolderArtifacts(tmp_path / "shared")
    artifacts.fetch(there, artifacts.publish(here, [name for found in pooled for name in found.files]))
    arrived = objects(there)
    assert {p.relative_to(there).as_posix(): p.read_bytes() for p in arrived} == {
        p.relative_to(here).as_posix(): p.read_bytes() for p in objects(here)
    }
    other = replace(LONG, pattern=parse("full"))
    files, fresh = in_one_process(there, (STOCK, LONG), (TUNED, LONG), (STOCK, other))
    assert files[:2] == [list(found.files) for found in pooled]
    assert fresh == [Path(files[2][0]).stem]
    assert {p: found for p, found in objects(there).items() if p in arrived} == arrived


def test_a_kernel_compiled_before_is_reported_by_its_own_name(tmp_path: Path) -> None:
    """One process compiles for many workloads, and FA4 holds in memory what it made for those before."""
    other = replace(LONG, pattern=parse("full"))
    (first, second, again), fresh = in_one_process(tmp_path, (STOCK, LONG), (STOCK, other), (STOCK, SHORT))
    assert again == first != second
    assert len(fresh) == 2
