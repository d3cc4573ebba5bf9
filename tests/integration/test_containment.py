"""Whatever a config does, it is a result about that config, and the study's answer is the same without it.

Real children that really abort, hang, fault and eat memory; only the kernels' times are scripted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from tuner.spec import StudySettings
from tuner.trial import Trial, TrialStatus, TunedConfig, Verdict
from tuner.workload import Workload
from tuner.workload_file import NamedWorkload
from workers.runner import Outcome, Place, Runner
from workers.settings import Settings

DEADLINE_S = 5.0  # a good config needs a tenth of it, with the start of its child
MEMORY_BYTES = 500 << 20
VARIANTS, BEST = 18, 7
SETTINGS = StudySettings(compile_timeout_s=DEADLINE_S, run_timeout_s=DEADLINE_S, compile_memory_bytes=MEMORY_BYTES)

# What a config does, how its trial ends, and a pattern for the first line of its error text.
MISDEEDS = {
    "compile_error": (TrialStatus.COMPILE_ERROR, r"ValueError: unable to partition input \(scripted\)"),
    "compile_abort": (TrialStatus.COMPILE_CRASH, "died of SIGABRT"),
    "compile_hang": (TrialStatus.COMPILE_TIMEOUT, "no answer after 5 s; killed"),
    "compile_memory": (TrialStatus.COMPILE_CRASH, r"used \d+ MiB of memory, 500 MiB are allowed"),
    "run_error": (TrialStatus.RUN_ERROR, r"RuntimeError: invalid argument at launch \(scripted\)"),
    "fault": (TrialStatus.RUN_CRASH, "died of SIGSEGV"),
    "hang": (TrialStatus.RUN_TIMEOUT, "no answer after 5 s; killed"),
    "exit": (TrialStatus.RUN_CRASH, "exited with status 3"),
    "nan": (TrialStatus.INCORRECT, "the output has NaN or inf, or was not written everywhere"),
    "wrong": (TrialStatus.INCORRECT, r"relative error 0\.(049|05).* exceeds 0\.00.*"),
    "wrong_row": (TrialStatus.INCORRECT, r"relative error 0\..* exceeds 0\.00.*"),
    "unwritten": (TrialStatus.INCORRECT, "the output has NaN or inf, or was not written everywhere"),
}
# Every misdeed has a variant of its own, and none of them is the best one.
VARIANT_OF = dict(zip(MISDEEDS, (n for n in range(VARIANTS) if n != BEST), strict=False))


@dataclass(frozen=True)
class Study:
    """A finished study: its answer and its trials by variant."""

    tuned: TunedConfig
    trials: dict[int, Trial]
    stats: dict[str, Any]


def workload(batch: int) -> NamedWorkload:
    shape = {"heads_q": VARIANTS, "heads_kv": VARIANTS, "seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64}
    return NamedWorkload(f"batch {batch}", Workload(batch=batch, **shape))


@contextmanager
def runner(home: Path, outcomes: dict[str, Any]) -> Iterator[tuple[Runner, Store]]:
    settings = Settings.from_env({"FLASHTUNE_HOME": str(home), "FLASHTUNE_COMPILE_WORKERS": "2"})
    script = {"seed": 5, "noise": {"sigma": 0.002, "ar": 0.5, "drift": 0.02}, "outcomes": outcomes}
    with (
        Store.open(settings.database_url) as store,
        Runner(settings, store, Place.find(settings, device="fake", script=json.dumps(script))) as made,
    ):
        yield made, store


def tune(home: Path, outcomes: dict[str, Any], batches: tuple[int, ...]) -> list[Study]:
    """Tune one workload for each batch, at once in one runner."""
    with runner(home, outcomes) as (made, store):
        found: dict[str, Outcome] = {o.named.name: o for o in made.tune([workload(b) for b in batches], SETTINGS)}
        studies = []
        for batch in batches:
            outcome = found[f"batch {batch}"]
            assert outcome.tuned is not None, outcome.error
            trials = {int(t.config.get("variant", -1)): t for t in store.study(outcome.study_id).trials()}
            studies.append(Study(outcome.tuned, trials, dict(outcome.stats)))
    return studies


@pytest.fixture(scope="module")
def contained(tmp_path_factory: pytest.TempPathFactory) -> list[Study]:
    """Two workloads at once, in each of which every misdeed is done."""
    outcomes: dict[str, Any] = {str(n): {"does": does} for does, n in VARIANT_OF.items()}
    outcomes[str(BEST)] = {"speedup": 1.05}
    return tune(tmp_path_factory.mktemp("contained"), outcomes, (1, 2))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The same without misdeeds."""
    return tune(tmp_path_factory.mktemp("undisturbed"), {str(BEST): {"speedup": 1.05}}, (1,))[0]


@pytest.mark.parametrize("does", MISDEEDS)
def test_every_misdeed_ends_as_its_own_status(contained: list[Study], does: str) -> None:
    status, words = MISDEEDS[does]
    for study in contained:
        trial = study.trials[VARIANT_OF[does]]
        assert (trial.status, trial.measurement) == (status, None)
        assert re.fullmatch(words, trial.error.splitlines()[0]), trial.error
        assert (trial.verification is not None) == (status is TrialStatus.INCORRECT)


def test_a_hang_takes_its_deadline_and_no_more(contained: list[Study]) -> None:
    for study in contained:
        assert study.trials[VARIANT_OF["compile_hang"]].compile_s == DEADLINE_S
        run_s = study.trials[VARIANT_OF["hang"]].run_s
        assert run_s is not None
        assert DEADLINE_S <= run_s < 12 * DEADLINE_S  # the rest is for a slow machine


def test_everyone_else_is_measured(contained: list[Study], undisturbed: Study) -> None:
    for study, bad in ((contained[0], set(VARIANT_OF.values())), (undisturbed, set())):
        assert set(study.trials) == {-1, *range(VARIANTS)}
        well = {n for n, t in study.trials.items() if t.status is TrialStatus.OK and t.measurement}
        assert well == set(study.trials) - bad


def test_the_answer_is_the_same_as_without_them(contained: list[Study], undisturbed: Study) -> None:
    for study in (*contained, undisturbed):
        tuned = study.tuned
        assert (tuned.verdict, tuned.config["variant"], tuned.ties) == (Verdict.PUBLISHED, BEST, ())
        assert tuned.speedup == pytest.approx(1.05, abs=0.01)  # 14 standard errors
        assert tuned.low > 1 + SETTINGS.margin
        assert {f.config for f in tuned.finalists} <= {
            t.config for t in study.trials.values() if t.status is TrialStatus.OK
        }


def test_no_child_is_left(contained: list[Study], undisturbed: Study) -> None:
    assert len(contained) == 2
    ours = [p for p in Path("/proc").iterdir() if p.name.isdigit() and parent_of(p) == os.getpid()]
    assert [p for p in ours if b"_child.py" in command_of(p)] == []


def parent_of(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.parametrize("does", ["compile_error", "compile_abort", "run_error", "fault", "exit", "nan", "wrong"])
def test_a_default_that_fails_is_an_error_of_its_workload(does: str, tmp_path: Path) -> None:
    """There is nothing to compare with: no answer, no trial of a config, and the next workload has its turn."""
    with runner(tmp_path, {"stock": {"does": does}}) as (made, store):
        found = list(made.tune([workload(1), workload(2)], SETTINGS))
        assert sorted(o.named.name for o in found) == ["batch 1", "batch 2"]
        for outcome in found:
            assert outcome.tuned is None
            assert re.search(r"^the default fake (does not (compile|work)|did not survive) here: ", outcome.error)
            assert store.study(outcome.study_id).trials() == []
            assert not store.study(outcome.study_id).done


def test_a_finalist_that_crashes_in_the_finals_is_out_and_the_next_best_wins(tmp_path: Path) -> None:
    """Its trial said ok; the finals take that back, and go on without it. More of them than there are retries."""
    outcomes: dict[str, Any] = {str(v): {"speedup": 1.10 + v / 100, "faults_after": 18} for v in range(4)}
    outcomes[str(BEST)] = {"speedup": 1.05}
    (study,) = tune(tmp_path, outcomes, (1,))
    assert study.tuned.config.get("variant") == BEST
    for v in range(4):
        trial = study.trials[v]
        assert (trial.status, trial.measurement) == (TrialStatus.RUN_CRASH, None)
        assert "SIGSEGV" in trial.error


def test_a_deterministic_workload_takes_only_what_repeats_bit_by_bit(tmp_path: Path) -> None:
    """The fastest variant differs in the last bits from run to run: it wins only where nobody asked."""
    outcomes: dict[str, Any] = {"0": {"does": "unrepeatable", "speedup": 1.2}, str(BEST): {"speedup": 1.05}}
    with runner(tmp_path, outcomes) as (made, store):
        plain = workload(1)
        strict = NamedWorkload("strict", plain.workload.with_(deterministic=True))
        found = {o.named.name: o for o in made.tune([plain, strict], SETTINGS)}
        trials = {t.config.get("variant"): t for t in store.study(found["strict"].study_id).trials()}
    winners = {name: o.tuned.config.get("variant") for name, o in found.items() if o.tuned}
    assert winners == {"batch 1": 0, "strict": BEST}
    assert trials[0].status is TrialStatus.INCORRECT
    assert "differ" in trials[0].error
