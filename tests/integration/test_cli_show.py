"""``flashtune studies``, ``show`` and ``doctor``, as a person runs them: the installed command in a fresh home."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from api.checks_keeping import available_memory_bytes
from db.store import Store
from tuner.spec import StudySettings, StudySpec
from tuner.target import Toolchain, named
from tuner.workload import Workload

FLASHTUNE = Path(sys.executable).with_name("flashtune")
HEADS = 10  # the fake family has as many variants
SCRIPT = {
    "seed": 3,
    "noise": {"sigma": 0.002},
    "outcomes": {
        "2": {"speedup": 1.25},
        "4": {"does": "nan"},
        "5": {"does": "compile_error"},
        "7": {"does": "fault"},
        "8": {"speedup": 0.7},
    },
}


def flashtune(home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "FLASHTUNE_HOME": str(home), **env}
    return subprocess.run(
        [FLASHTUNE, *args], cwd=home, env=environ, capture_output=True, text=True, timeout=200, check=False
    )


def answer(home: Path, *args: str) -> Any:
    done = flashtune(home, *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with one finished study of the fake family."""
    home = tmp_path_factory.mktemp("home")
    (home / "script.json").write_text(json.dumps(SCRIPT))
    done = flashtune(home, "tune", "--fake-script", "script.json", "--heads", str(HEADS), "--json")
    assert done.returncode == 0, done.stderr
    return home


@pytest.fixture(scope="module")
def study_id(home: Path) -> str:
    (row,) = answer(home, "studies")
    return str(row["id"])


def test_studies_lists_the_answer(home: Path) -> None:
    (row,) = answer(home, "studies")
    assert (row["state"], row["policy"], row["verdict"]) == ("done", "graph", "published")
    assert (row["trials"], row["ok"]) == (HEADS + 1, HEADS + 1 - 3)  # the stock config besides; three fail
    assert row["config"]["params"] == {"variant": 2}
    assert row["speedup"] == pytest.approx(1.25, rel=0.01)
    text = flashtune(home, "studies").stdout
    assert row["id"] in text
    assert row["label"] in " ".join(text.split())


def test_show_tells_every_trial_and_the_finals(home: Path, study_id: str) -> None:
    shown = answer(home, "show", study_id)
    statuses = {t["config"]["params"].get("variant", "stock"): t["status"] for t in shown["trials"]}
    expected = {4: "incorrect", 5: "compile_error", 7: "run_crash"}
    assert statuses == {v: expected.get(v, "ok") for v in ("stock", *range(HEADS))}
    assert shown["tuned"]["config"]["params"] == {"variant": 2}
    assert shown["stats"]["trials_new"] == HEADS + 1
    text = flashtune(home, "show", study_id).stdout
    for word in ("configs/s", "on the device", "incorrect", "compile_error", "run_crash", "variant=2", "winner"):
        assert word in text


@pytest.mark.parametrize(("name", "start"), [("x.png", b"\x89PNG\r\n\x1a\n"), ("x.html", b"<!doctype html>")])
def test_show_plots_by_the_beginning_of_an_id_and_says_where(
    home: Path, study_id: str, tmp_path: Path, name: str, start: bytes
) -> None:
    done = flashtune(home, "show", study_id[:3], "--plot", str(tmp_path / name))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name).read_bytes().startswith(start)
    assert str(tmp_path / name) in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [name]


def assert_refused(done: subprocess.CompletedProcess[str], *values: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    for value in values:
        assert value in line


def test_a_study_that_does_not_exist_is_named(home: Path) -> None:
    assert_refused(flashtune(home, "show", "not-an-id"), "'not-an-id'", "flashtune studies")
    assert_refused(flashtune(home, "show", "000000000000"), "'000000000000'", "flashtune studies")


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_printed(home: Path, study_id: str) -> None:
    assert_refused(flashtune(home, "show", study_id, "--plot", "x.jpeg"), "'x.jpeg'", ".png or .html")
    missing = str(home / "missing" / "x.png")
    assert_refused(flashtune(home, "show", study_id, "--plot", missing), missing, "No such file or directory")
    assert_refused(flashtune(home, "show", study_id, "--plot", missing, "--json"), missing)


def test_limit_must_be_positive(home: Path) -> None:
    assert_refused(flashtune(home, "studies", "--limit", "0"), "0", "at least 1")


@pytest.mark.parametrize("command", [["studies"], ["show", "abc"]])
def test_a_missing_database_is_named_and_not_made(tmp_path: Path, command: list[str]) -> None:
    assert_refused(flashtune(tmp_path, *command), str(tmp_path / "flashtune.db"), "no such file")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["studies"], ["show", "abc"]])
def test_a_corrupt_database_is_named_and_left_alone(tmp_path: Path, command: list[str]) -> None:
    broken = tmp_path / "broken.db"
    broken.write_bytes(bytes(range(256)) * 40)
    assert_refused(flashtune(tmp_path, *command, "--db", str(broken)), str(broken), "not a database")
    assert broken.read_bytes() == bytes(range(256)) * 40


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with 17 studies that have begun: two ids must begin with the same of 16 digits."""
    home = tmp_path_factory.mktemp("running")
    with Store.open(str(home / "flashtune.db")) as store:
        for seqlen in range(1, 18):
            workload = Workload(batch=1, heads_q=1, heads_kv=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=8)
            spec = StudySpec(workload, named("fake"), Toolchain(), "graph", ("fake/1",))
            store.begin_study(spec, StudySettings())
    return home


def test_an_ambiguous_beginning_names_the_candidates(running: Path) -> None:
    ids = [row["id"] for row in answer(running, "studies")]
    assert len(ids) == 17
    first = next(d for d in "0123456789abcdef" if sum(i.startswith(d) for i in ids) > 1)
    among = sorted(i for i in ids if i.startswith(first))[:5]
    assert_refused(flashtune(running, "show", first), f"'{first}'", *among)


def test_a_study_without_trials_is_shown_and_plotted(running: Path, tmp_path: Path) -> None:
    newest, *_ = answer(running, "studies", "--limit", "1")
    shown = answer(running, "show", newest["id"], "--plot", str(tmp_path / "x.png"))
    assert (shown["state"], shown["tuned"], shown["trials"], shown["stats"]) == ("running", None, [], {})
    assert (tmp_path / "x.png").exists()
    assert "running" in flashtune(running, "show", newest["id"]).stdout


def doctor(home: Path, **env: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = flashtune(home, "doctor", "--json", **env)
    report = json.loads(done.stdout)
    checks = {c["name"]: c for c in report["checks"]}
    assert report["ok"] == (done.returncode == 0) == all(c["level"] != "fail" for c in checks.values())
    assert all(c["next_step"] for c in checks.values() if c["level"] != "ok")
    return done.returncode, checks


def test_doctor_finds_nothing_broken_here_and_makes_nothing(tmp_path: Path) -> None:
    status, checks = doctor(tmp_path)
    expected = set() if shutil.which("g++") else {"C++ compiler"}
    assert {name for name, c in checks.items() if c["level"] == "fail"} == expected
    assert status == (1 if expected else 0)
    assert str(tmp_path / "flashtune.db") in checks["database"]["seen"]
    assert "does not exist yet" in checks["database"]["seen"]
    assert not list(tmp_path.iterdir())


def test_doctor_names_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, checks = doctor(tmp_path, FLASHTUNE_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert status == 1
    assert checks["cache folder"]["level"] == "fail"
    assert f"{tmp_path / 'file'} is not a folder" in checks["cache folder"]["seen"]


def test_doctor_sees_strangers_code_a_running_tune_and_a_broken_database(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o770)
    (tmp_path / "flashtune.db").write_text("not a database at all")
    with (cache / "device-GPU-1.lock").open("w") as lock:
        lock.write("4321")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, checks = doctor(tmp_path, FLASHTUNE_CACHE_DIR=str(cache), FLASHTUNE_COMPILE_WORKERS="9999")
    assert status == 1
    assert {n: c["level"] for n, c in checks.items() if n in ("cache folder", "database", "device lock", "memory")} == {
        "cache folder": "fail",
        "database": "fail",
        "device lock": "warn",
        "memory": "warn",
    }
    assert "0770" in checks["cache folder"]["seen"]
    assert "process 4321 is measuring on GPU-1" in checks["device lock"]["seen"]
    assert str(tmp_path / "flashtune.db") in checks["database"]["seen"]


def test_doctor_accepts_what_a_tune_left(home: Path) -> None:
    _, checks = doctor(home)
    assert {n: checks[n]["level"] for n in ("database", "cache folder", "device lock")} == {
        "database": "ok",
        "cache folder": "ok",
        "device lock": "ok",
    }
    assert "writable" in checks["database"]["seen"]


def test_doctor_reports_an_unusable_setting_as_a_finding(tmp_path: Path) -> None:
    status, checks = doctor(tmp_path, FLASHTUNE_COMPILE_WORKERS="many")
    assert status == 1
    assert "'many'" in checks["settings"]["seen"]
    assert "python" in checks  # what does not depend on the settings is still looked at


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "available_mib"),
    [("max", 900, 0, 1000), (600, 500, 200, 300), (4000, 100, 0, 1000), (600, 700, 0, 0)],
)
def test_memory_is_that_of_the_container_where_it_is_less(
    tmp_path: Path, limit: int | str, used: int, inactive: int, available_mib: int
) -> None:
    mib = 1 << 20
    (tmp_path / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {1000 * 1024} kB\n")
    (tmp_path / "memory.max").write_text(f"{limit if limit == 'max' else int(limit) * mib}\n")
    (tmp_path / "memory.current").write_text(f"{used * mib}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {inactive * mib}\n")
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path) == available_mib * mib
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path / "no-cgroup") == 1000 * mib
