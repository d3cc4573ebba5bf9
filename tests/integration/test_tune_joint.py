"""Forward and backward tuned as one from end to end: on this CPU with real kernels, and on the fake device."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.command import FLASHTUNE, answer, text
from tuner.target import version_of

WORKLOAD = (
    *("--pattern", "causal", "--batch", "1", "--heads", "4", "--heads-kv", "2", "--seqlen", "128"),
    *("--head-dim", "32", "--dtype", "float32", "--op", "fwd+bwd"),
)


@pytest.mark.skipif(not version_of("torch"), reason="torch is not installed")
def test_on_a_cpu_the_answer_tells_the_whole_and_both_parts(tmp_path: Path) -> None:
    (outcome,) = answer(tmp_path, "tune", *WORKLOAD, "--deterministic", "--device", "cpu")["outcomes"]
    assert outcome["workload"]["op"] == "fwd+bwd"
    tuned = outcome["tuned"]
    (finalist,) = tuned["finalists"]
    assert (finalist["config"]["family"], tuned["verdict"]) == ("sdpa_cpu", "kept default")
    assert finalist["parts_us"].keys() == {"fwd", "bwd"}
    assert min(finalist["parts_us"].values()) > 1
    assert tuned["extras"]["median_us"] == {**finalist["parts_us"], "fwd+bwd": finalist["median_us"]}
    assert tuned["extras"]["default_median_us"] == tuned["extras"]["median_us"]
    assert {"out", "dq (draw 1)", "dk (draw 2)", "dv (draw 2)"} <= tuned["verification"]["outputs"].keys()
    found = answer(tmp_path, "lookup", *WORKLOAD, "--deterministic", "--target", "cpu")
    assert (found["kind"], found["config"]) == ("exact", tuned["config"])
    assert found["extras"] == tuned["extras"]
    backward = ["bwd" if o == "fwd+bwd" else o for o in WORKLOAD]
    assert answer(tmp_path, "lookup", *backward, "--deterministic", "--target", "cpu")["kind"] == "default"


def test_on_the_fake_device_a_faster_pair_is_published_and_shown_with_its_parts(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps({"base_us": 70, "outcomes": {"3": {"speedup": 1.4}}}))
    (tmp_path / "both.toml").write_text(
        '[[workload]]\nname = "step"\nop = "fwd+bwd"\npattern = "causal"\n'
        "batch = 1\nheads = 8\nseqlen = 1024\nhead_dim = 64\n"
    )
    (outcome,) = answer(tmp_path, "tune", "both.toml", "--fake-script", "script.json")["outcomes"]
    tuned = outcome["tuned"]
    assert (tuned["verdict"], tuned["config"]["params"]) == ("published", {"variant": 3})
    assert tuned["extras"]["median_us"] == pytest.approx({"fwd": 14.285714, "bwd": 35.714286, "fwd+bwd": 50.0})
    assert tuned["extras"]["default_median_us"] == pytest.approx({"fwd": 20.0, "bwd": 50.0, "fwd+bwd": 70.0})
    shown = text(tmp_path, "show", outcome["study"])
    assert "fwd us" in shown
    assert "the parts were timed apart" in shown
    row = next(line.split() for line in shown.splitlines() if "winner" in line)
    assert row[2:5] == ["50.0", "14.3", "35.7"]
    words = ("--heads", "8", "--seqlen", "1024", "--head-dim", "64", "--op", "fwd+bwd", "--target", "fake")
    assert "median_us: fwd 14.3, bwd 35.7, fwd+bwd 50.0" in text(tmp_path, "lookup", *words)


def test_a_direction_alone_has_no_parts_and_its_answer_is_not_that_of_both(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text("{}")
    words = ("--heads", "4", "--fake-script", "script.json")
    (both,) = answer(tmp_path, "tune", *words, "--op", "fwd+bwd")["outcomes"]
    (alone,) = answer(tmp_path, "tune", *words)["outcomes"]
    assert both["study"] != alone["study"]
    assert [f["parts_us"] for f in alone["tuned"]["finalists"]] == [{}] * len(alone["tuned"]["finalists"])
    assert alone["tuned"]["extras"] == {}


def test_an_op_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    environ = {**os.environ, "FLASHTUNE_HOME": str(tmp_path)}
    done = subprocess.run(
        [FLASHTUNE, "tune", "--op", "bwd+fwd", "--device", "cpu"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "op is 'bwd+fwd'; it must be one of fwd, bwd, fwd+bwd" in done.stderr
