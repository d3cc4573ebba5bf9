"""A sitting on the fake family: steps in order and within their seconds, packed, and gone on from elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from db.store import Store

ROOT = Path(__file__).parents[2]
FILE = """
[[workload]]
name = "fake"
batch = 1
heads = 4
head_dim = 64
seqlen = [256, 512]
policy = "graph"
"""


def sit(home: Path, out: str, *args: str, code: int = 0, **outcomes: dict[str, Any]) -> dict[str, str]:
    """Run one sitting with the fake family; return how its steps ended."""
    (home / "cells.toml").write_text(FILE)
    script = home / "script.json"
    script.write_text(json.dumps({"outcomes": {"1": {"speedup": 1.2}, **outcomes}}))
    environ = {**os.environ, "FLASHTUNE_HOME": str(home / "home"), "FLASHTUNE_COMPILE_WORKERS": "2"}
    files = ["--suite-file", str(home / "cells.toml"), "--exhaustive-file", str(home / "cells.toml")]
    more = [f"--{step}-args=--fake-script {script}" for step in ("suite", "verify", "exhaustive")]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_session.py"), str(home / out), *files, *more, *args]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    steps = json.loads((home / out / "session.json").read_text())["steps"]
    return {s["step"]: s["state"] for s in steps}


def test_steps_run_in_order_and_all_of_it_is_packed(tmp_path: Path) -> None:
    steps = ("--step", "suite", "--step", "verify", "--step", "exhaustive")
    assert sit(tmp_path, "one", "--seconds", "150", *steps) == dict.fromkeys(("suite", "verify", "exhaustive"), "done")
    with tarfile.open(tmp_path / "one" / "session.tar.gz") as tar:
        names = set(tar.getnames())
        tar.extractall(tmp_path / "packed", filter="data")
    assert {
        "suite.db",
        "suite/suite.json.gz",
        "suite/suite.md",
        "exhaustive/exhaustive.jsonl.gz",
        "verify.log",
    } <= names
    with Store.open(str(tmp_path / "packed" / "suite.db")) as store:
        assert len(store.published()) == 2


def test_a_second_sitting_goes_on_from_the_pack(tmp_path: Path) -> None:
    sit(tmp_path, "one", "--seconds", "100", "--step", "suite")
    pack = tmp_path / "one" / "session.tar.gz"
    steps = ("--step", "suite", "--step", "exhaustive", "--resume", str(pack))
    assert sit(tmp_path, "two", "--seconds", "100", *steps) == {"suite": "done", "exhaustive": "done"}
    assert (tmp_path / "two" / "work" / "suite.log").read_text().count("(known)") == 2


def test_a_step_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    began = time.monotonic()
    hanging = {"does": "compile_hang"}
    found = sit(tmp_path, "one", "--seconds", "150", "--step", "suite:12", "--step", "exhaustive:6", **{"2": hanging})
    assert found == {"suite": "out of time", "exhaustive": "out of time"}
    assert time.monotonic() - began < 90
    with Store.open(str(tmp_path / "one" / "work" / "suite.db")) as store:
        assert store.studies()  # what was measured is there


def test_a_step_without_time_is_not_begun_and_a_failed_one_is_said(tmp_path: Path) -> None:
    found = sit(tmp_path, "one", "--seconds", "60", "--step", "verify", "--step", "suite:1", code=1)
    assert found == {"verify": "failed", "suite": "not begun"}  # there is no database yet


@pytest.mark.parametrize(
    ("step", "said"), [("sweep", "step is 'sweep'"), ("suite:long", "seconds of suite are 'long'")]
)
def test_a_wrong_step_is_refused(tmp_path: Path, step: str, said: str) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_session.py"),
        str(tmp_path),
        "--seconds",
        "9",
        "--step",
        step,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
