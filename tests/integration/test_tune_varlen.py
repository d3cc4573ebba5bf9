"""Packed sequences tuned from end to end on this CPU: the stock kernel, and variants of it with planted defects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from tests.integration.command import answer
from tuner.target import version_of

pytestmark = pytest.mark.skipif(not version_of("torch"), reason="torch is not installed")

SHAPE = ("--pattern", "causal", "--heads", "4", "--heads-kv", "2", "--head-dim", "32", "--dtype", "float32")
LENGTHS = ("--lengths", "256,0,19*2,100")
BREAKS = {"0": "wrong_dk", "1": "nan", "2": "swapped"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def outcome(home: Path) -> dict[str, Any]:
    (home / "script.json").write_text(json.dumps({"breaks": BREAKS}))
    how = ("--family", "sdpa_cpu", "--family", "decoy_bwd", "--fake-script", str(home / "script.json"))
    (found,) = answer(home, "tune", *SHAPE, *LENGTHS, "--op", "bwd", "--device", "cpu", *how)["outcomes"]
    return dict(found)


def test_right_backwards_are_measured_and_defects_are_found(home: Path, outcome: dict[str, Any]) -> None:
    assert outcome["workload"]["lengths_q"] == outcome["workload"]["lengths_k"] == [256, 0, 19, 19, 100]
    tuned = outcome["tuned"]
    assert tuned["default"]["family"] == "sdpa_cpu"
    assert str(tuned["config"]["params"].get("variant")) not in BREAKS
    assert sorted(tuned["verification"]["outputs"]) == [f"{g} (draw {n})" for g in ("dk", "dq", "dv") for n in (1, 2)]
    with Store.open(str(home / "flashtune.db"), read_only=True) as store:
        (row,) = store.studies()
        statuses = {t.config.get("variant"): str(t.status) for t in store.study(row.id).trials()}
    assert statuses == {v: "incorrect" if str(v) in BREAKS else "ok" for v in (None, *range(12))}


def test_the_answer_is_looked_up_by_the_lengths(home: Path, outcome: dict[str, Any]) -> None:
    backward = (*SHAPE, "--op", "bwd", "--target", "cpu")
    found = answer(home, "lookup", *backward, *LENGTHS)
    assert (found["kind"], found["config"]) == ("exact", outcome["tuned"]["config"])
    other = answer(home, "lookup", *backward, "--lengths", "250,1,30,30,80")  # five, as long, up to 512 tokens
    assert (other["kind"], other["config"]) == ("bucket", outcome["tuned"]["config"])
    dense = answer(home, "lookup", *backward, "--batch", "5", "--seqlen", "256")
    assert dense["kind"] == "default"
    assert "layout varlen, not dense" in dense["reason"]


def test_a_workload_file_draws_lengths_and_a_forward_keeps_the_default(home: Path) -> None:
    shape = 'heads = 2\nhead_dim = 32\ndtype = "float32"\npattern = "full"\n'
    decode = '[[workload]]\nname = "decode"\nlengths_q = "1*3"\nlengths_k = [128, 9, 300]\n'
    drawn = '[[workload]]\nname = "drawn"\nbatch = 3\nlengths = "mean=64,seed=1"\n'
    (home / "packed.toml").write_text(f"[defaults]\n{shape}{decode}{drawn}")
    found = answer(home, "tune", "packed.toml", "--device", "cpu")["outcomes"]
    assert [o["tuned"]["verdict"] for o in found] == ["kept default"] * 2
    assert [o["workload"]["seqlen_q"] for o in found] == [1, max(found[1]["workload"]["lengths_q"])]
    for o in found:
        assert [f["config"]["family"] for f in o["tuned"]["finalists"]] == ["sdpa_cpu"]
