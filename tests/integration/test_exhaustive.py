"""Exhaustive tables: the grid holds what it says, a cut-off run goes on, and `flashtune replay` reads the result."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exhaustive import fixed, grid
from tuner import tables
from tuner.families.fa4_bwd_tiles import uses_block_mask
from tuner.target import named
from tuner.trial import TrialStatus
from tuner.workload_file import load

ROOT = Path(__file__).parents[2]
CELLS = load(ROOT / "benchmarks" / "exhaustive.toml")
FILE = """
[[workload]]
name = "fake"
batch = 1
heads = 12
head_dim = 64
seqlen = [256, 512]
"""
OUTCOMES = {"3": {"speedup": 1.3}, "5": {"does": "nan"}, "7": {"does": "compile_error"}, "8": {"does": "fault"}}


def run(home: Path, *args: str, code: int = 0, **script: Any) -> subprocess.CompletedProcess[str]:
    (home / "cells.toml").write_text(FILE)
    (home / "script.json").write_text(json.dumps({"outcomes": OUTCOMES, **script}))
    environ = {**os.environ, "FLASHTUNE_HOME": str(home), "FLASHTUNE_COMPILE_WORKERS": "2", "PYTHONPATH": str(ROOT)}
    program = str(ROOT / "benchmarks" / "exhaustive.py")
    done = subprocess.run(
        [sys.executable, program, "cells.toml", "--out", "out", "--fake-script", "script.json", *args],
        cwd=home,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_twelve_cells_or_more_both_ways_dense_and_sparse() -> None:
    assert len(CELLS) >= 12
    assert {c.workload.op for c in CELLS} == {"fwd", "bwd"}
    for op in ("fwd", "bwd"):
        documents = {"document" in c.workload.pattern.mask_names for c in CELLS if c.workload.op == op}
        assert documents == {True, False}
    assert 1000 < sum(len(grid(c, named("sm_90a")).configs) for c in CELLS) < 1300


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name)
def test_a_grid_is_every_feasible_config_with_the_fixed_values(cell: Any) -> None:
    target = named("sm_90a")
    found = grid(cell, target)
    family, held = found.family, fixed(found.family.name, cell.workload)
    assert found.configs[0].is_stock
    free = {k: v for k, v in family.space(cell.workload).items() if k not in held}
    assert len(free) in (4, 6)
    seen = {tuple(c[k] for k in free) for c in found.configs[1:]}
    assert len(seen) == len(found.configs) - 1 <= len(list(itertools.product(*free.values())))
    assert all(c[k] == v for c in found.configs[1:] for k, v in held.items())
    assert not any(family.feasible(c, cell.workload, target) for c in found.configs)
    if cell.workload.op == "bwd":
        own = [c for c in family.first(cell.workload) if c in found.configs]  # FA4's own choice is in
        assert own or uses_block_mask(cell.workload)


def test_a_table_is_read_by_replay_with_failures_and_their_status(tmp_path: Path) -> None:
    run(tmp_path)
    table = tmp_path / "out" / "exhaustive.jsonl.gz"
    about = json.loads(gzip.decompress(table.read_bytes()).splitlines()[0])["about"]
    assert about["cells"] == {"fake[seqlen=256]": 13, "fake[seqlen=512]": 13}
    cells = tables.read([table])
    assert [len(c.rows) for c in cells] == [12, 12]
    for cell in cells:
        assert cell.best.config["variant"] == 3
        assert cell.default_us is not None
        assert cell.default_us / (cell.best.time_us or 0) == pytest.approx(1.3, rel=0.01)
        status = {int(r.config["variant"]): r.status for r in cell.rows}
        failures = {5: TrialStatus.INCORRECT, 7: TrialStatus.COMPILE_ERROR, 8: TrialStatus.RUN_CRASH}
        assert {k: v for k, v in status.items() if v is not TrialStatus.OK} == failures
    replayed = subprocess.run(
        [Path(sys.executable).with_name("flashtune"), "replay", str(table), "--seeds", "2", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert len(json.loads(replayed.stdout)["cells"]) == 2


def test_what_time_cuts_off_goes_on_and_torn_lines_are_measured_again(tmp_path: Path) -> None:
    run(tmp_path, "--seconds", "5", code=3, outcomes={**OUTCOMES, "11": {"compile_s": 20}})
    path = tmp_path / "out" / "exhaustive.jsonl"
    first = path.read_text().splitlines()
    assert 1 <= len(first) < 26
    assert not (tmp_path / "out" / "exhaustive.jsonl.gz").exists()  # no cell is whole
    path.write_text("\n".join(first)[:-40])  # killed amid a line
    run(tmp_path)
    rows = path.read_text().splitlines()
    assert rows[: len(first) - 1] == first[:-1]
    assert len(rows) == 26
    keys = {(r["workload"], json.dumps(r["config"])) for r in map(json.loads, rows)}
    assert len(keys) == 26
    assert run(tmp_path).stdout == ""  # nothing is left
