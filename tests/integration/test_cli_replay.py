"""``flashtune replay`` and ``tables``, and a budget in seconds, as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FLASHTUNE = Path(sys.executable).with_name("flashtune")
SWEEP = Path(__file__).parents[1] / "fixtures" / "h200_fa4_fwd_sweep.jsonl"
SCRIPT = {"seed": 3, "outcomes": {"2": {"speedup": 1.25}, "5": {"does": "compile_error"}, "8": {"speedup": 0.5}}}


def flashtune(home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "FLASHTUNE_HOME": str(home), "FLASHTUNE_COMPILE_WORKERS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [FLASHTUNE, *args], cwd=home, env=environ, capture_output=True, text=True, timeout=300, check=False
    )


def answer(home: Path, *args: str) -> Any:
    done = flashtune(home, *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with one finished study of ten fake variants, and two small tables."""
    home = tmp_path_factory.mktemp("home")
    (home / "script.json").write_text(json.dumps(SCRIPT))
    rows = SWEEP.read_text().splitlines()
    few = [r for r in rows[1:] if '"head_dim": 128' in r and '"seqlen": 1024' in r]
    (home / "few.jsonl").write_text("\n".join([rows[0], *few]))
    assert flashtune(home, "tune", "--fake-script", "script.json", "--heads", "10").returncode == 0
    return home


def test_replay_reports_regret_by_cell_strategy_and_seed(home: Path) -> None:
    found = answer(home, "replay", "few.jsonl", "--seeds", "2", "--budget", "6")
    assert [c["name"] for c in found["cells"]] == ["full b16 h16 s1024 d128", "causal b16 h16 s1024 d128"]
    assert [s["strategy"] for s in found["summary"]] == ["ours", "cold", "first", "tpe", "random", "random+default"]
    assert len(found["replays"]) == 2 * 6 * 2
    for r in found["replays"]:
        assert r["evaluated"] == len(r["configs"]) == len(set(r["configs"])) <= 6
        assert r["regrets"] == sorted(r["regrets"], reverse=True)
        assert r["regret"] == r["regrets"][-1] >= 1
    ours = [r["regret"] for r in found["replays"] if r["strategy"] == "ours"]
    (row,) = (s for s in found["summary"] if s["strategy"] == "ours")
    assert row["worst"] == max(ours)
    assert row["mean"] == pytest.approx(sum(ours) / len(ours))


def test_replay_for_people_shows_every_cell_and_draws(home: Path) -> None:
    options = ("--seeds", "1", "--strategy", "random", "--strategy", "ours")
    for name in ("regret.png", "regret.html"):
        done = flashtune(home, "replay", "few.jsonl", *options, "--plot", name)
        assert done.returncode == 0, done.stderr
        assert "causal b16 h16 s1024 d128" in done.stdout
        assert f"wrote {name}" in done.stderr
    assert (home / "regret.png").read_bytes().startswith(b"\x89PNG")
    assert "configs evaluated" in (home / "regret.html").read_text()


def test_a_studys_trials_become_t4_and_are_replayed_from_it(home: Path) -> None:
    (study,) = answer(home, "studies")
    (cell,) = answer(home, "tables", "--study", study["id"][:6], "--t4", "out")
    assert (cell["configs"], cell["failed"], cell["best"]["params"]) == (10, 1, {"variant": 2})
    document = json.loads((home / cell["file"]).read_text())
    times = {r["configuration"]["variant"]: r for r in document["results"]}
    assert times[5]["invalidity"] == "compile"
    measured = {v: r["measurements"][0]["value"] for v, r in times.items() if r["invalidity"] == "correct"}
    assert measured[2] * 1.25 == pytest.approx(measured[8] * 0.5, rel=0.02)
    found = answer(home, "replay", cell["file"], "--strategy", "cold", "--seeds", "1", "--budget", "11")
    assert found["replays"][0]["regret"] == 1.0
    (again,) = answer(home, "tables", cell["file"])
    assert {k: v for k, v in again.items() if k != "file"} == {
        k: pytest.approx(v) if isinstance(v, float) else v for k, v in cell.items() if k != "file"
    }


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("replay",), "no table is given"),
        (("tables",), "no table is given"),
        (("replay", "none.jsonl"), "cannot read the table none.jsonl"),
        (("replay", "few.jsonl", "--strategy", "fastest"), "strategy is 'fastest'"),
        (("replay", "few.jsonl", "--budget", "0"), "budget is 0"),
        (("replay", "few.jsonl", "--seeds", "0"), "seeds is 0"),
        (("replay", "few.jsonl", "--ahead", "0"), "ahead is 0"),
        (("replay", "few.jsonl", "--plot", "x.pdf"), "suffix must be .png or .html"),
        (("replay", "script.json"), "no list of results"),
        (("tables", "--study", "ffffffffffff"), "no study has the id"),
        (("tables", "few.jsonl", "--t4", "few.jsonl"), "cannot write to the folder few.jsonl"),
        (("tune", "--seconds", "0"), "max_seconds is 0.0; it must be from 0.1"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(home: Path, args: tuple[str, ...], said: str) -> None:
    done = flashtune(home, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("flashtune:")]) == 1


def test_a_budget_in_seconds_ends_a_search_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    """Sixty variants of 0.15 s each would compile for 9 s; the finals follow all the same."""
    home = tmp_path / "home"
    home.mkdir()
    outcomes = {str(v): {"compile_s": 0.15} for v in range(60)}
    (home / "script.json").write_text(json.dumps({"seed": 1, "outcomes": outcomes}))
    options = ("tune", "--fake-script", "script.json", "--heads", "60", "--trials", "60")
    short = answer(home, *options, "--seconds", "1.5")["outcomes"][0]
    (study,) = answer(home, "studies")
    tried = study["trials"]
    assert 1 <= tried < 60
    assert short["tuned"]["verdict"] in ("kept default", "published")
    again = answer(home, *options, "--seconds", "1.5")["outcomes"][0]
    assert again["from_database"]
    assert not answer(home, *options)["outcomes"][0]["from_database"]
    (study,) = answer(home, "studies")
    assert study["trials"] == 61


def test_a_database_teaches_the_next_workload(tmp_path: Path) -> None:
    """Of 300 variants around the best, the second workload tries the first one's best region at once."""
    home = tmp_path / "home"
    home.mkdir()
    outcomes = {str(v): {"speedup": 1.3 - abs(v - 210) / 300} for v in range(300)}
    (home / "script.json").write_text(json.dumps({"seed": 1, "outcomes": outcomes}))
    shared = ("tune", "--fake-script", "script.json", "--heads", "300", "--trials", "30")
    answer(home, *shared, "--seqlen", "512")
    answer(home, *shared, "--seqlen", "1024")
    rows = answer(home, "studies")
    trials = answer(home, "show", rows[0]["id"])["trials"]
    first = [t["config"]["params"]["variant"] for t in trials if t["config"]["params"]][:4]
    assert rows[0]["workload"]["seqlen_q"] == 1024
    assert all(abs(v - 210) < 40 for v in first)


def test_the_benchmark_runs_without_kernel_tuner_and_says_so(home: Path) -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "replay.py"
    command = [sys.executable, program, "few.jsonl", "--seeds", "1", "--out", "result.json", "--plot", "benchmark.png"]
    environ = {**os.environ, "PYTHONPATH": str(program.parents[1]), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=home, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "without Kernel Tuner" in done.stderr
    (suite,) = json.loads((home / "result.json").read_text())["suites"]
    assert suite["kernel_tuner"] is None
    assert "not run" in suite["kernel_tuner_failures"][0]
    assert {s["strategy"] for s in suite["summary"]} == {
        *("ours", "cold", "first", "tpe", "random", "tpe+default", "random+default")
    }
    assert (home / "benchmark.png").read_bytes().startswith(b"\x89PNG")
