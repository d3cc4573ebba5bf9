"""``flashtune compile`` makes real Hopper code on a machine that need not have a GPU.

The installed command; every object it leaves is looked into apart from what it says of it.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tuner.target import version_of

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


def architectures(data: bytes) -> list[int]:
    """Return the SM of every GPU image in an object: low byte of e_flags, where e_machine is 190 (CUDA)."""
    starts, at = [], data.find(b"\x7fELF")
    while at >= 0:
        starts.append(at)
        at = data.find(b"\x7fELF", at + 4)
    headers = [data[at : at + 64] for at in starts]
    return [h[48] for h in headers if len(h) == 64 and struct.unpack_from("<H", h, 18)[0] == 190]


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
