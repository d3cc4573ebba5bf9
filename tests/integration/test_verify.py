"""``flashtune verify`` as a person runs it: what fails later is withdrawn, and nothing else is touched.

The installed command in fresh homes, on the fake family: a config turns wrong by another script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from tuner.target import Target, Toolchain
from tuner.trial import TrialStatus

FLASHTUNE = Path(sys.executable).with_name("flashtune")
ROOT = Path(__file__).parents[2]
SPEEDS = {"4": {"speedup": 1.2}, "2": {"speedup": 1.17}}
SHAPE = ("--heads", "6", "--seqlen", "512")


def run(home: Path, *args: str, code: int = 0, **does: str) -> subprocess.CompletedProcess[str]:
    """Run flashtune in a home of its own; ``does`` says what variants do that are right otherwise."""
    outcomes: dict[str, Any] = {k: dict(v) for k, v in SPEEDS.items()}
    for name, what in does.items():
        outcomes.setdefault(name.removeprefix("v"), {})["does"] = what
    (home / "script.json").write_text(json.dumps({"noise": {"sigma": 0.001}, "outcomes": outcomes}))
    environ = {**os.environ, "FLASHTUNE_HOME": str(home), "FLASHTUNE_COMPILE_WORKERS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [FLASHTUNE, *args], cwd=home, env=environ, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with one tuned workload, whose winner is variant 4."""
    run(tmp_path, "tune", *SHAPE, "--fake-script", "script.json")
    return tmp_path


def verify(home: Path, *args: str, code: int = 0, **does: str) -> dict[str, Any]:
    done = run(home, "verify", *args, "--fake-script", "script.json", "--json", code=code, **does)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def looked_up(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(home, "lookup", *SHAPE, "--target", "fake", "--json").stdout)
    return found


def test_what_is_right_passes_and_nothing_changes(home: Path) -> None:
    before = looked_up(home)
    found = verify(home, "--all", "--draws", "3")
    assert found["counts"] == {"passed": 1, "failed": 0, "unjudged": 0, "skipped": 0}
    (one,) = found["checked"]
    assert one["config"]["params"] == {"variant": 4}
    assert one["verification"]["draws"] == 3
    assert 0 < one["verification"]["error"] <= one["limit"] < 0.01
    assert looked_up(home) == before


def test_the_inputs_are_others_than_those_of_tuning_and_of_the_last_time(home: Path) -> None:
    with Store.open(str(home / "flashtune.db"), read_only=True) as store:
        (answer,) = store.published()
    assert answer.tuned.verification is not None
    seeds = {verify(home, "--all")["checked"][0]["verification"]["seed"] for _ in range(2)}
    assert len(seeds | {answer.tuned.verification.seed}) == 3


@pytest.mark.parametrize(
    ("does", "status"), [("wrong", "incorrect"), ("nan", "incorrect"), ("fault", "run_crash"),
                         ("compile_error", "compile_error")],
)  # fmt: skip
def test_a_config_that_fails_later_is_no_longer_served(home: Path, does: str, status: str) -> None:
    found = verify(home, "--all", code=1, v4=does)
    assert found["counts"] == {"passed": 1, "failed": 1, "unjudged": 0, "skipped": 0}
    failed, instead = found["checked"]
    assert failed["reason"].startswith(f"{status}: ")
    assert failed["instead"]["params"] == instead["config"]["params"] == {"variant": 2}  # and is verified, too
    now = looked_up(home)
    assert (now["config"]["params"], now["verdict"]) == ({"variant": 2}, "published")
    assert now["speedup"] == pytest.approx(1.17, rel=0.01)
    with Store.open(str(home / "flashtune.db"), read_only=True) as store:
        study = store.study(store.studies()[0].id)
        trial = next(t for t in study.trials() if t.config.get("variant") == 4)
        (record,) = study.stats()["withdrawn"]
    assert (trial.status, trial.measurement) == (TrialStatus(status), None)
    assert (record["status"], record["config"]) == (status, "fake variant=4")
    assert "withdrawn" in run(home, "show", study.id).stdout


def test_one_after_the_other_until_the_default_is_left(home: Path) -> None:
    wrong = {f"v{n}": "wrong" for n in range(6)}
    found = verify(home, "--all", code=1, **wrong)
    assert found["checked"][-1]["verdict"] == "passed"
    assert found["counts"]["failed"] == len(found["checked"]) - 1 == 2  # the two that beat the default
    assert looked_up(home)["verdict"] == "kept default"
    again = verify(home, "--all", **wrong)
    assert again["counts"] == {"passed": 1, "failed": 0, "unjudged": 0, "skipped": 0}


def test_tuning_again_answers_without_the_withdrawn_config(home: Path) -> None:
    verify(home, "--all", code=1, v4="wrong")
    outcome = json.loads(run(home, "tune", *SHAPE, "--fake-script", "script.json", "--json").stdout)["outcomes"][0]
    assert outcome["from_database"]
    assert outcome["tuned"]["config"]["params"] == {"variant": 2}


def test_a_default_that_fails_leaves_everything_as_it_is_and_is_said(home: Path) -> None:
    before = looked_up(home)
    found = verify(home, "--all", code=1, stock="wrong")
    assert [c["verdict"] for c in found["checked"]] == ["unjudged"]
    assert "the default" in found["checked"][0]["reason"]
    assert looked_up(home) == before


def test_named_studies_alone(home: Path) -> None:
    run(home, "tune", "--heads", "6", "--seqlen", "1024", "--fake-script", "script.json")
    with Store.open(str(home / "flashtune.db"), read_only=True) as store:
        ids = {row.workload.seqlen_q: row.id for row in store.studies()}
    assert [c["study"] for c in verify(home, ids[1024][:8])["checked"]] == [ids[1024]]
    assert len(verify(home, "--all")["checked"]) == 2


def test_what_was_tuned_elsewhere_is_skipped_and_said(home: Path) -> None:
    with Store.open(str(home / "flashtune.db")) as store:
        (answer,) = store.published()
        handle = store.study(answer.study_id)
        from tuner.spec import StudySettings, StudySpec

        for target, tools in (
            (Target("NVIDIA H200", "sm_90a", 132), handle.toolchain),
            (handle.target, Toolchain(torch="1.0")),
        ):
            spec = StudySpec(handle.workload, target, tools, handle.policy, handle.families)
            store.begin_study(spec, StudySettings()).finish(answer.tuned, {})
    found = verify(home, "--all")
    assert found["counts"] == {"passed": 1, "failed": 0, "unjudged": 0, "skipped": 2}
    reasons = [c["reason"] for c in found["checked"] if c["verdict"] == "skipped"]
    assert any("NVIDIA H200" in r for r in reasons)
    assert any("torch 1.0" in r for r in reasons)


@pytest.mark.parametrize(
    ("args", "said"),
    [((), "name studies, or give --all"), (("--all", "abc"), "one of the two"),
     (("--all", "--draws", "0"), "draws is 0"),
     (("fff",), "no study has the id 'fff'")],
)  # fmt: skip
def test_bad_input_is_said(home: Path, args: tuple[str, ...], said: str) -> None:
    assert said in run(home, "verify", *args, "--fake-script", "script.json", code=2).stderr
