"""The suite's program from a file of workloads to tables, picture and verification; cut off, and resumed."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tuner import tables

ROOT = Path(__file__).parents[2]
SCRIPT = {"noise": {"sigma": 0.001}, "outcomes": {"1": {"speedup": 1.3}, "2": {"speedup": 1.27}}}
FILE = """
[defaults]
batch = 1
heads = 4
head_dim = 64
[[workload]]
name = "fake"
policy = ["graph", "eager"]
seqlen = [256, 512]
pattern = ["full", "causal"]
"""
CPU = """
[defaults]
dtype = "float32"
batch = 1
heads = 2
head_dim = 32
[[workload]]
name = "cpu"
seqlen = 256
pattern = ["causal", "sliding_window(64)"]
"""


def start(home: Path, file: str, *args: str) -> subprocess.Popen[str]:
    (home / "suite.toml").write_text(file)
    command = [sys.executable, str(ROOT / "benchmarks" / "suite.py"), "suite.toml", "--db", "suite.db", "--out", "out"]
    environ = {**os.environ, "FLASHTUNE_HOME": str(home), "FLASHTUNE_COMPILE_WORKERS": "2", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *args],
        cwd=home,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=900)
    assert process.returncode == code, out + err
    return out, err


def fake(home: Path, *args: str, code: int = 0, script: dict[str, Any] = SCRIPT) -> tuple[str, str]:
    (home / "script.json").write_text(json.dumps(script))
    return finish(start(home, FILE, "--fake-script", "script.json", "--trials", "4", *args), code)


def result(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((home / "out" / "suite.json.gz").read_bytes()))
    return found


def test_from_workloads_to_tables_and_verification(tmp_path: Path) -> None:
    out, _ = fake(tmp_path)
    found = result(tmp_path)
    assert found["missing"] == []
    assert sorted((c["policy"], c["workload"]["seqlen_q"]) for c in found["cells"]) == sorted(
        (p, s) for p in ("graph", "eager") for s in (256, 512) for _ in range(2)
    )
    for cell in found["cells"]:
        assert cell["rivals"]["fake"]["ratio"] == pytest.approx(1.3, rel=0.01)
        assert len(cell["tuned"]["finalists"][0]["samples_us"]) == cell["tuned"]["rounds"]
    verified = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert [v["verdict"] for v in verified.values()] == ["passed"] * 8
    for name in ("suite.md", "suite.png"):
        assert (tmp_path / "out" / name).stat().st_size > 500
    assert (tmp_path / "out" / "suite.md").read_text().split("\n\n", 1)[1].strip() in out
    (cells, more) = ([tables.read([tmp_path / "out" / f"trials-{p}.jsonl.gz"])] * 2 for p in ("graph", "eager"))
    assert len(cells[0]) == len(more[0]) == 4

    again, _ = fake(tmp_path)  # nothing is tuned or verified a second time
    assert again.count("(known)") == 8
    assert "verify " not in again


def test_what_time_cuts_off_goes_on_where_it_stood(tmp_path: Path) -> None:
    slow = {**SCRIPT, "outcomes": {**SCRIPT["outcomes"], "3": {"compile_s": 1.5}}}
    _, err = fake(tmp_path, "--seconds", "5", "--no-verify", code=3, script=slow)
    assert "time was up" in err
    first = {c["name"]: c["study"] for c in result(tmp_path)["cells"]}
    assert len(first) < 8
    fake(tmp_path, "--no-verify", script=slow)
    second = {c["name"]: c["study"] for c in result(tmp_path)["cells"]}
    assert len(second) == 8
    assert first.items() <= second.items()


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps({**SCRIPT, "outcomes": {"3": {"compile_s": 2}}}))
    process = start(tmp_path, FILE, "--fake-script", "script.json", "--trials", "4", "--no-verify")
    time.sleep(7)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    fake(tmp_path, "--no-verify")
    assert result(tmp_path)["missing"] == []


def test_a_config_that_turns_wrong_fails_the_suite_and_leaves_the_table(tmp_path: Path) -> None:
    fake(tmp_path, "--no-verify")
    wrong = {**SCRIPT, "outcomes": {**SCRIPT["outcomes"], "1": {"does": "wrong"}}}
    _, err = fake(tmp_path, code=1, script=wrong)
    assert err.count("ERROR") == 8
    assert all(c["tuned"]["config"]["params"] == {"variant": 2} for c in result(tmp_path)["cells"])


@pytest.mark.slow
def test_real_kernels_of_a_cpu(tmp_path: Path) -> None:
    finish(start(tmp_path, CPU, "--device", "cpu", "--trials", "1", "--search-seconds", "20", "--draws", "2"))
    found = result(tmp_path)
    assert {c["policy"] for c in found["cells"]} == {"eager"}
    rivals = {c["workload"]["pattern"]: set(c["rivals"]) for c in found["cells"]}
    assert rivals == {"causal": {"flex_cpu", "sdpa_cpu"}, "sliding_window(window=64)": {"flex_cpu"}}
    assert len(json.loads((tmp_path / "out" / "verify.json").read_text())) == 2


def test_a_file_that_is_none_is_said_in_one_line(tmp_path: Path) -> None:
    out, err = finish(start(tmp_path, "speed = 1"), 2)
    assert out == ""
    assert err.startswith("suite.py: suite.toml: ")
    assert err.count("\n") == 1
