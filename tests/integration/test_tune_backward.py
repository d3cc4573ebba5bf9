"""A backward tuned from end to end on this CPU: the stock kernel, and variants of it with planted defects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from tests.integration.command import answer
from tuner.target import version_of
from tuner.trial import Trial, TrialStatus

pytestmark = pytest.mark.skipif(not version_of("torch"), reason="torch is not installed")

WORKLOAD = (
    *("--pattern", "causal", "--batch", "1", "--heads", "4", "--heads-kv", "2", "--seqlen", "256"),
    *("--head-dim", "32", "--dtype", "float32", "--op", "bwd", "--deterministic"),
)
BREAKS = {"0": "wrong_dk", "1": "nan", "2": "swapped", "3": "unwritten", "4": "unrepeatable"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def outcome(home: Path) -> dict[str, Any]:
    (home / "script.json").write_text(json.dumps({"breaks": BREAKS}))
    families = ("--family", "sdpa_cpu", "--family", "decoy_bwd")
    script = ("--fake-script", str(home / "script.json"))
    (found,) = answer(home, "tune", *WORKLOAD, "--device", "cpu", *families, *script)["outcomes"]
    return dict(found)


@pytest.fixture(scope="module")
def trials(home: Path, outcome: dict[str, Any]) -> dict[str, Trial]:
    with Store.open(str(home / "flashtune.db"), read_only=True) as store:
        (row,) = store.studies()
        return {f"{t.config.family} {t.config.label}": t for t in store.study(row.id).trials()}


def test_right_backwards_are_measured_and_defects_are_trials(trials: dict[str, Trial]) -> None:
    expected = {"sdpa_cpu stock": TrialStatus.OK, "decoy_bwd stock": TrialStatus.OK}
    for variant in range(12):
        wrong = str(variant) in BREAKS
        expected[f"decoy_bwd variant={variant}"] = TrialStatus.INCORRECT if wrong else TrialStatus.OK
    assert {name: t.status for name, t in trials.items()} == expected
    for t in trials.values():
        if t.status is TrialStatus.OK:
            assert t.measurement is not None
            assert min(t.measurement.samples_us) > 1  # fifty million floating-point operations


def test_the_errors_of_every_gradient_are_stored(trials: dict[str, Trial]) -> None:
    for name, t in trials.items():
        assert t.verification is not None
        assert t.verification.passed == (t.status is TrialStatus.OK), name
        if t.status is TrialStatus.OK:
            assert sorted(t.verification.outputs) == [f"{g} (draw {n})" for g in ("dk", "dq", "dv") for n in (1, 2)]
            assert all(1e-8 < values[0] < 1e-5 for values in t.verification.outputs.values())  # float32
    assert trials["decoy_bwd variant=0"].error.startswith("dk (draw ")
    assert trials["decoy_bwd variant=1"].error.startswith("dv (draw 1): the output has NaN")
    assert trials["decoy_bwd variant=3"].error.startswith("dv (draw 1): the output has NaN or inf, or was not written")
    assert trials["decoy_bwd variant=4"].error.startswith("two runs on the same inputs differ")


def test_the_answer_is_a_right_one_and_can_be_looked_up(home: Path, outcome: dict[str, Any]) -> None:
    assert outcome["workload"]["op"] == "bwd"
    tuned = outcome["tuned"]
    assert tuned["default"]["family"] == "sdpa_cpu"
    assert str(tuned["config"]["params"].get("variant")) not in BREAKS
    assert tuned["verification"]["passed"] is True
    found = answer(home, "lookup", *WORKLOAD, "--target", "cpu")
    assert (found["kind"], found["config"]) == ("exact", tuned["config"])
    forward = [o for o in WORKLOAD if o not in ("--op", "bwd")]
    assert answer(home, "lookup", *forward, "--target", "cpu")["kind"] == "default"


def test_a_workload_file_takes_it_too(home: Path) -> None:
    shape = 'batch = 1\nheads = 2\nseqlen = 128\nhead_dim = 32\ndtype = "float32"\n'
    (home / "bwd.toml").write_text('[[workload]]\nname = "own"\nop = "bwd"\npattern = "full"\n' + shape)
    (found,) = answer(home, "tune", "bwd.toml", "--device", "cpu")["outcomes"]
    assert (found["workload"]["op"], found["tuned"]["verdict"]) == ("bwd", "kept default")
    assert [f["config"]["family"] for f in found["tuned"]["finalists"]] == ["sdpa_cpu"]
