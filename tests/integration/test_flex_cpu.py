"""The real thing, small: FlexAttention's C++ kernels compiled, verified, timed and published on this CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from tuner.target import version_of
from tuner.trial import Trial, TrialStatus

CXX = os.environ.get("CXX", "g++")
pytestmark = [
    pytest.mark.skipif(not version_of("torch"), reason="torch is not installed"),
    pytest.mark.skipif(
        not shutil.which(CXX), reason=f"FlexAttention on a CPU needs a C++ compiler; {CXX} is not there"
    ),
]

FLASHTUNE = Path(sys.executable).with_name("flashtune")
WORKLOAD = (
    *("--pattern", "sliding_window(64)", "--batch", "1", "--heads", "2", "--seqlen", "512"),
    *("--head-dim", "32", "--dtype", "float32"),
)
TRIALS = 3

# Stands for the compiler: notes who calls it for what, then calls it.
NOTING_COMPILER = """#!/bin/sh
echo "$(tr '\\0' ' ' < /proc/$PPID/cmdline): $*" >> '{log}'
exec {compiler} "$@"
"""


@dataclass(frozen=True)
class Tuned:
    """One study of a real workload, and every call of the C++ compiler meanwhile."""

    home: Path
    answer: dict[str, Any]
    trials: list[Trial]
    compiler_calls: list[str]


def run(home: Path, *args: str) -> Any:
    environ = {**os.environ, "FLASHTUNE_HOME": str(home), "CXX": str(home / "c++")}
    done = subprocess.run(
        [FLASHTUNE, *args, "--json"], cwd=home, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    home = tmp_path_factory.mktemp("home")
    (home / "c++").write_text(NOTING_COMPILER.format(log=home / "calls", compiler=CXX))
    (home / "c++").chmod(0o755)
    answer = run(home, "tune", *WORKLOAD, "--device", "cpu", "--trials", str(TRIALS))
    with Store.open(str(home / "flashtune.db"), read_only=True) as store:
        (row,) = store.studies()
        trials = list(store.study(row.id).trials())
    return Tuned(home, answer, trials, (home / "calls").read_text().splitlines())


def test_every_trial_compiles_is_right_and_is_measured(tuned: Tuned) -> None:
    assert [(t.status, t.error) for t in tuned.trials] == [(TrialStatus.OK, "")] * (TRIALS + 1)
    assert len({t.config.key for t in tuned.trials}) == TRIALS + 1
    assert sum(t.config.is_stock for t in tuned.trials) == 1
    for t in tuned.trials:
        assert t.measurement is not None
        assert t.measurement.policy == "eager"
        assert min(t.measurement.samples_us) > 1  # eight million floating-point operations
    assert all((t.compile_s or 0) > 0 for t in tuned.trials)


def test_the_errors_are_those_of_float32(tuned: Tuned) -> None:
    for t in tuned.trials:
        assert t.verification is not None
        assert t.verification.passed
        # float32 rounds to 6e-8, and a softmax over 64 keys adds up some of these; bfloat16 would show 4e-3
        assert 1e-8 < t.verification.error < 1e-6
        assert t.verification.error <= t.verification.row_error < 1e-5


def test_the_answer_is_measured_beside_the_default(tuned: Tuned) -> None:
    assert (tuned.answer["target"]["device"], tuned.answer["policy"]) == ("cpu", "eager")
    (outcome,) = tuned.answer["outcomes"]
    found = outcome["tuned"]
    finalists = [f["config"]["params"] for f in found["finalists"]]
    assert {} in finalists  # the stock config
    assert found["config"]["params"] in finalists
    assert found["default"]["params"] == {}
    assert len(finalists) > 1
    published = found["verdict"] == "published"
    assert published == (found["config"] != found["default"]) == (found["low"] > 1 + found["margin"])


def test_lookup_returns_the_block_size_to_build(tuned: Tuned) -> None:
    found = run(tuned.home, "lookup", *WORKLOAD, "--target", "cpu")
    assert (found["kind"], found["warnings"]) == ("exact", [])
    assert found["config"] == tuned.answer["outcomes"][0]["tuned"]["config"]
    params = found["config"]["params"]
    assert found["extras"]["block_size"] == [params.get("q_block", 128), params.get("kv_block", 128)]


def test_the_measuring_child_never_has_to_compile(tuned: Tuned) -> None:
    """Kernels are made ahead, by the compiling child; the other one finds them in the cache."""
    linking = [call for call in tuned.compiler_calls if " -shared " in f"{call} "]
    assert len(linking) > TRIALS
    assert [call for call in linking if "_compile_child.py" not in call] == []
    assert tuned.answer["outcomes"][0]["stats"]["notes"] == []
