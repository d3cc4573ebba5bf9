"""``flashtune tune`` as a person runs it: what it publishes, what it never does twice, what a kill leaves behind.

The installed command in fresh homes, on the fake family: only the kernels' times are scripted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from tuner.trial import Trial, TrialStatus

FLASHTUNE = Path(sys.executable).with_name("flashtune")
TIMEOUT_S = 120
HEADS, BEST = 12, 4  # the fake family has as many variants as the workload has heads
NOISE = {"sigma": 0.002, "ar": 0.5, "drift": 0.01}
SCRIPT: dict[str, Any] = {"seed": 7, "noise": NOISE, "outcomes": {str(BEST): {"speedup": 1.2}, "9": {"speedup": 0.8}}}
WORKLOAD = ("--heads", str(HEADS), "--seqlen", "512")


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Kill what a failed test has left running."""
    yield
    while _started:
        _started.pop().kill()


def start(home: Path, *args: str) -> subprocess.Popen[str]:
    """Start flashtune in a home of its own."""
    environ = {**os.environ, "FLASHTUNE_HOME": str(home), "FLASHTUNE_COMPILE_WORKERS": "2"}
    process = subprocess.Popen(
        [FLASHTUNE, *args],
        cwd=home,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in a shell's background ignores SIGINT, and hands that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    _started.append(process)
    return process


@dataclass(frozen=True)
class Done:
    """A command that ended well."""

    out: str
    err: str

    @property
    def answer(self) -> Any:
        """What ``--json`` printed: all of it must be one document."""
        return json.loads(self.out)

    @property
    def measured(self) -> set[str]:
        """The configs that were tried, by the lines of the progress."""
        return set(re.findall(r"\[\d+/\d+\] fake (\S+): ", self.err))


def finish(process: subprocess.Popen[str], code: int = 0) -> Done:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, err
    return Done(out, err)


def run(home: Path, *args: str, code: int = 0) -> Done:
    return finish(start(home, *args), code)


def faked(home: Path, script: dict[str, Any]) -> tuple[str, str]:
    """Return the options that run the fake family by a script."""
    (home / "script.json").write_text(json.dumps(script))
    return "--fake-script", "script.json"


def tune(home: Path, *args: str, script: dict[str, Any] = SCRIPT, code: int = 0) -> Done:
    return run(home, "tune", *WORKLOAD, *faked(home, script), *args, code=code)


def stored(home: Path, run: int = 1) -> list[Trial]:
    """Return the trials of one run, of the only workload in the home's database."""
    with Store.open(str(home / "flashtune.db"), read_only=True) as store:
        (row,) = (row for row in store.studies() if row.run == run)
        return list(store.study(row.id).trials())


def variants(trials: list[Trial]) -> set[int | None]:
    return {t.config.get("variant") for t in trials}


def winner(answer: dict[str, Any]) -> Any:
    (outcome,) = answer["outcomes"]
    return outcome["tuned"]["config"]["params"]


ALL = {None, *range(HEADS)}  # None: the stock config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the workload is tuned. No test adds to its database."""
    home = tmp_path_factory.mktemp("home")
    assert tune(home).measured == {"stock", *(f"variant={n}" for n in range(HEADS))}
    return home


@pytest.fixture
def copy(home: Path, tmp_path: Path) -> Path:
    """A copy of that home, to change."""
    shutil.copytree(home, tmp_path / "copy")
    return tmp_path / "copy"


def test_the_planted_winner_is_published_with_its_evidence(home: Path) -> None:
    (outcome,) = tune(home, "--json").answer["outcomes"]
    tuned = outcome["tuned"]
    assert (tuned["verdict"], tuned["config"]["params"]) == ("published", {"variant": BEST})
    assert tuned["speedup"] == pytest.approx(1.2, rel=0.01)
    assert 1 + tuned["margin"] < tuned["low"] <= tuned["speedup"] <= tuned["high"]
    finalists = {f["config"]["params"].get("variant"): f for f in tuned["finalists"]}
    assert {None, BEST} <= set(finalists)
    assert finalists[BEST]["median_us"] == pytest.approx(100 / 1.2, rel=0.01)  # the fake's base is 100 us
    assert finalists[None]["median_us"] == pytest.approx(100, rel=0.01)
    assert tuned["verification"]["passed"]
    assert variants(stored(home)) == ALL


def test_lookup_returns_what_was_published(home: Path) -> None:
    lookup = ("lookup", *WORKLOAD, "--target", "fake")
    text = run(home, *lookup).out
    assert "match: exact" in text
    assert f"config: fake variant={BEST}" in text
    found = run(home, *lookup, "--json").answer
    assert (found["kind"], found["config"]["params"], found["verdict"]) == ("exact", {"variant": BEST}, "published")
    assert found["speedup"] == pytest.approx(1.2, rel=0.01)
    other = run(home, "lookup", "--heads", str(HEADS), "--seqlen", "999999", "--target", "fake", "--json").answer
    assert (other["kind"], other["config"]) == ("default", None)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_reader_that_has_gone_is_no_error(home: Path, form: tuple[str, ...]) -> None:
    process = start(home, "lookup", *WORKLOAD, "--target", "fake", *form)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(TIMEOUT_S) == 0


def test_the_same_tune_again_answers_from_the_database_without_a_child(copy: Path) -> None:
    shutil.rmtree(copy / "artifacts")  # every child makes its log in there as it starts
    again = tune(copy)
    assert "from the database" in again.err
    assert again.measured == set()
    assert f"variant={BEST}" in again.out
    (outcome,) = tune(copy, "--json").answer["outcomes"]
    assert outcome["from_database"]
    assert not (copy / "artifacts").exists()


def test_force_measures_again_as_a_second_run(copy: Path) -> None:
    before = stored(copy)
    forced = tune(copy, "--force", "--json")
    assert len(forced.measured) == HEADS + 1
    assert winner(forced.answer) == {"variant": BEST}
    assert stored(copy, run=1) == before
    assert variants(stored(copy, run=2)) == ALL
    assert run(copy, "lookup", *WORKLOAD, "--target", "fake", "--json").answer["version"] == 2


def same_execution(before: list[Trial], after: list[Trial]) -> bool:
    """Tell whether the first trials are still those: later runs may add samples, and change nothing else."""
    return [
        (t.config, t.status, t.compile_s, t.verification, t.measurement and t.measurement.samples_us[:3])
        for t in before
    ] == [
        (t.config, t.status, t.compile_s, t.verification, t.measurement and t.measurement.samples_us[:3])
        for t in after[: len(before)]
    ]


def test_a_larger_budget_goes_on_from_the_stored_trials(tmp_path: Path) -> None:
    first = tune(tmp_path, "--trials", "5")
    before = stored(tmp_path)
    assert len(before) == 5 + 1  # and the stock config
    second = tune(tmp_path, "--trials", "9", "--json")
    after = stored(tmp_path)
    assert len(after) == 9 + 1
    assert same_execution(before, after)
    assert first.measured & second.measured == set()
    assert second.answer["rate"]["trials"] == 4
    smaller = tune(tmp_path, "--trials", "3", "--json").answer
    assert smaller["outcomes"][0]["from_database"]


def children_of(parent: int) -> list[list[str]]:
    """Return the command lines of a tuner's children: a script, two pipes and the tuner's process id."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = place.read_bytes().decode(errors="replace").split("\0")
            if str(parent) in words and kinds([words]):
                found.append(words)
    return found


def kinds(commands: list[list[str]]) -> set[str]:
    return {Path(w).name for words in commands for w in words if w.endswith("_child.py")}


def wait_until_childless(parent: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S  # Linux kills them right after their parent, not before it is gone
    while left := children_of(parent):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def start_until(home: Path, line: str, script: dict[str, Any], *args: str) -> tuple[subprocess.Popen[str], str]:
    """Start a tune, and return it with what it has said when its progress shows a line."""
    process = start(home, "tune", *WORKLOAD, *faked(home, script), *args)
    assert process.stderr is not None
    seen = []
    for text in process.stderr:
        seen.append(text)
        if line in text:
            return process, "".join(seen)
    pytest.fail("".join(seen))


def the_rest(process: subprocess.Popen[str]) -> Done:
    assert process.stdout is not None
    assert process.stderr is not None
    done = Done(process.stdout.read(), process.stderr.read())
    process.wait(TIMEOUT_S)
    return done


SIGNALS = [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 130)]


@pytest.mark.parametrize(("how", "code"), SIGNALS, ids=[s.name for s, _ in SIGNALS])
def test_a_stopped_study_goes_on_where_it_stood(home: Path, tmp_path: Path, how: signal.Signals, code: int) -> None:
    # The winner takes an hour to compile, so that the study is in the middle however slow the machine
    endless = {**SCRIPT, "outcomes": {**SCRIPT["outcomes"], str(BEST): {"compile_s": 3600}}}
    process, said = start_until(tmp_path, f"[5/{HEADS + 1}]", endless)
    assert kinds(children_of(process.pid)) == {"_sandbox_child.py", "_compile_child.py"}
    process.send_signal(how)
    rest = the_rest(process)
    wait_until_childless(process.pid)
    stopped = Done(rest.out, said + rest.err)
    assert (process.returncode, stopped.out) == (code, "")
    assert "Traceback" not in stopped.err
    if how is not signal.SIGKILL:
        assert stopped.err.splitlines()[-1].startswith("flashtune: stopped; ")
    before = stored(tmp_path)
    assert 5 <= len(before) < HEADS + 1
    assert BEST not in variants(before)
    resumed = tune(tmp_path, "--json")
    after = stored(tmp_path)
    assert same_execution(before, after)
    assert stopped.measured & resumed.measured == set()
    assert variants(after) == ALL
    assert {t.status for t in after} == {TrialStatus.OK}
    assert winner(resumed.answer) == winner(tune(home, "--json").answer) == {"variant": BEST}


def test_an_interrupt_does_not_wait_for_a_config_that_hangs(tmp_path: Path) -> None:
    hangs = {**SCRIPT, "outcomes": {str(n): {"does": "hang"} for n in range(HEADS)}}
    process, _ = start_until(tmp_path, f"[1/{HEADS + 1}]", hangs, "--run-timeout", "3600")
    time.sleep(1)  # into the hang, most likely; what follows holds anyway
    process.send_signal(signal.SIGINT)
    rest = the_rest(process)
    wait_until_childless(process.pid)
    assert process.returncode == 130, rest.err
    assert [t.status for t in stored(tmp_path)] == [TrialStatus.OK]  # the stock config; no word on the hanging one


def test_a_study_killed_after_its_last_trial_still_answers_the_same(home: Path, tmp_path: Path) -> None:
    slow = {**SCRIPT, "outcomes": {**SCRIPT["outcomes"], "stock": {"sample_s": 0.01}}}  # finals that take a while
    process, _ = start_until(tmp_path, f"[{HEADS + 1}/{HEADS + 1}]", slow)
    process.kill()
    the_rest(process)
    wait_until_childless(process.pid)
    before = stored(tmp_path)
    assert variants(before) == ALL
    resumed = tune(tmp_path, "--json")
    assert resumed.measured == set()
    assert same_execution(before, stored(tmp_path))
    assert winner(resumed.answer) == winner(tune(home, "--json").answer)


def test_two_tunes_of_one_workload_at_once_agree(tmp_path: Path) -> None:
    options = faked(tmp_path, SCRIPT)
    both = [start(tmp_path, "tune", *WORKLOAD, *options, "--json") for _ in range(2)]
    for process in both:
        assert winner(finish(process).answer) == {"variant": BEST}
    trials = stored(tmp_path)  # of one study: the second goes on with the first one's
    assert variants(trials) == ALL
    assert len(trials) == HEADS + 1
    assert run(tmp_path, "lookup", *WORKLOAD, "--target", "fake", "--json").answer["config"]["params"] == {
        "variant": BEST
    }


def test_two_runs_in_fresh_databases_publish_the_same_or_declare_the_tie(tmp_path: Path) -> None:
    near = {"1": {"speedup": 1.100}, "5": {"speedup": 1.102}, "8": {"speedup": 1.06}}
    answers = []
    for n in range(2):
        place = tmp_path / str(n)
        place.mkdir()
        script = {"seed": 1, "run": n, "noise": {"sigma": 0.004, "ar": 0.5}, "outcomes": near}
        (outcome,) = tune(place, "--json", script=script).answer["outcomes"]
        answers.append(outcome["tuned"])
    a, b = answers
    assert a["finalists"] != b["finalists"]  # other noise
    assert a["verdict"] == b["verdict"] == "published"
    assert a["config"] == b["config"] or (b["config"] in a["ties"] and a["config"] in b["ties"])
    assert {json.dumps(x["config"]["params"]) for x in answers} <= {'{"variant": 1}', '{"variant": 5}'}


FILE = f"""
[defaults]
batch = 1
heads = {HEADS}
head_dim = 64

[[workload]]
name = "short"
seqlen = [256, 512]
pattern = "causal"

[[workload]]
name = "window"
seqlen = 1024
pattern = "sliding_window(128)"
"""


def test_a_file_of_workloads_gives_one_outcome_each_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "many.toml").write_text(FILE)
    answer = run(tmp_path, "tune", "many.toml", *faked(tmp_path, SCRIPT), "--json").answer
    assert set(answer) == {"date", "target", "toolchain", "policy", "settings", "rate", "outcomes"}
    assert (answer["target"]["arch"], answer["policy"], answer["settings"]["max_trials"]) == ("fake", "graph", 48)
    assert answer["toolchain"]["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert [o["name"] for o in answer["outcomes"]] == ["short[seqlen=256]", "short[seqlen=512]", "window"]
    assert [o["workload"]["seqlen_q"] for o in answer["outcomes"]] == [256, 512, 1024]
    assert [o["workload"]["pattern"] for o in answer["outcomes"]] == ["causal"] * 2 + ["sliding_window(window=128)"]
    for outcome in answer["outcomes"]:
        assert (outcome["error"], outcome["from_database"]) == ("", False)
        assert outcome["tuned"]["config"]["params"] == {"variant": BEST}
        assert outcome["stats"]["trials_new"] == HEADS + 1
    rate = answer["rate"]
    assert rate["trials"] == 3 * (HEADS + 1)
    assert rate["trials_per_s"] == pytest.approx(rate["trials"] / rate["wall_s"])
    assert 0 <= rate["device_idle_share"] < 1


def test_where_nothing_is_faster_the_default_is_kept(tmp_path: Path) -> None:
    done = tune(tmp_path, script={"seed": 2, "noise": {"sigma": 0.01, "ar": 0.5, "drift": 0.02}})
    assert "kept default (fake stock)" in " ".join(done.out.split())
    found = run(tmp_path, "lookup", *WORKLOAD, "--target", "fake", "--json").answer
    assert (found["kind"], found["config"]["params"], found["verdict"]) == ("exact", {}, "kept default")


def test_a_default_that_is_wrong_ends_its_workload_with_an_error(tmp_path: Path) -> None:
    script = {**SCRIPT, "outcomes": {"stock": {"does": "nan"}}}
    done = tune(tmp_path, "--json", script=script, code=1)
    (outcome,) = done.answer["outcomes"]
    assert outcome["tuned"] is None
    assert "the default fake does not work here" in outcome["error"]
    assert outcome["error"] in done.err
    assert run(tmp_path, "lookup", *WORKLOAD, "--target", "fake", "--json").answer["kind"] == "default"
