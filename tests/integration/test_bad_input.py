"""Whatever a person gets wrong costs one line that names it, exit code 2, and changes nothing.

Most cases call the command line's ``main`` in this process, where imports are paid for once.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from api import cli
from db.store import Store
from tuner.config import Config
from tuner.spec import StudySettings, StudySpec
from tuner.target import Toolchain, named
from tuner.trial import Trial, TrialStatus
from tuner.workload import Workload

FLASHTUNE = Path(sys.executable).with_name("flashtune")
HEADS = 3  # variants of the fake family, should a tune run after all

Case = tuple[list[str], list[str]]  # the command line, and what its error must contain


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("database") / "flashtune.db"
    workload = Workload(batch=1, heads_q=HEADS, heads_kv=HEADS, seqlen_q=64, seqlen_k=64, head_dim=64)
    with Store.open(str(path)) as store:
        study = store.begin_study(
            StudySpec(workload, named("fake"), Toolchain(), "graph", ("fake/1",)), StudySettings()
        )
        study.add_trial(Trial(Config.make("fake", 1, variant=0), TrialStatus.COMPILE_ERROR, "no"))
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with nothing of flashtune's yet; ``home`` below it is where its things would go."""
    (tmp_path / "file").write_text("a regular file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "script.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHTUNE_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def full_home(home: Path, database: Path) -> Path:
    """The same with a database that has a study."""
    (home / "home").mkdir()
    (home / "home" / "flashtune.db").write_bytes(database.read_bytes())
    return home


def tree(folder: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def assert_refused(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: list[str],
    says: list[str],
) -> None:
    before = tree(home)
    monkeypatch.setattr(sys, "argv", ["flashtune", *command])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capfd.readouterr()
    assert_one_line(ended.value.code, out, err, says)
    assert tree(home) == before


def assert_one_line(code: Any, out: str, err: str, says: list[str]) -> None:
    assert (code, out) == (2, ""), err
    (line,) = err.splitlines()
    assert line.startswith("flashtune: ")
    for text in says:
        assert text in line


FAKE = ["--fake-script", "script.json", "--heads", str(HEADS)]  # what runs, if anything does, is over soon

WORKLOADS: dict[str, tuple[dict[str, str | int], list[str]]] = {
    "unknown pattern": ({"pattern": "causl"}, ["'causl'", "did you mean causal?"]),
    "window 0": ({"pattern": "sliding_window(0)"}, ["window is 0", "at least 1"]),
    "softcap without a number": ({"pattern": "causal + softcap(much)"}, ["softcap(much)", "softcap(30)"]),
    "prefix beyond the end": ({"pattern": "prefix_lm(600)", "seqlen": 512}, ["600", "seqlen_k 512"]),
    "documents that do not add up": ({"pattern": "document([100,100])", "seqlen": 512}, ["200", "512"]),
    "head_dim 7": ({"head_dim": 7}, ["head_dim is 7", "multiple of 8"]),
    "heads not a multiple": ({"heads": 6, "heads_kv": 4}, ["heads_q 6", "heads_kv 4"]),
    "batch 0": ({"batch": 0}, ["batch is 0", "at least 1"]),
    "negative seqlen": ({"seqlen": -5}, ["seqlen_q is -5", "at least 1"]),
    "unknown dtype": ({"dtype": "int4"}, ["'int4'", "bfloat16"]),
    "unknown op": ({"op": "sideways"}, ["'sideways'", "fwd"]),
}


def in_options(fields: dict[str, str | int]) -> list[str]:
    return [word for name, value in fields.items() for word in ("--" + name.replace("_", "-"), str(value))]


def in_toml(fields: dict[str, str | int]) -> str:
    """Write one workload; a number is JSON's and TOML's alike, and so is a text without escapes."""
    given: dict[str, str | int] = {"batch": 1, "heads": HEADS, "seqlen": 64, "head_dim": 64, **fields}
    if "heads_kv" in given:
        given["heads_q"] = given.pop("heads")
    return '[[workload]]\nname = "mine"\n' + "".join(f"{k} = {json.dumps(v)}\n" for k, v in given.items())


@pytest.mark.parametrize("command", ["tune", "lookup", "compile"])
@pytest.mark.parametrize(("fields", "says"), WORKLOADS.values(), ids=WORKLOADS)
def test_a_workload_in_options(
    full_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    fields: dict[str, str | int],
    says: list[str],
) -> None:
    words = [command, *(FAKE if command == "tune" else []), *in_options(fields)]
    assert_refused(full_home, monkeypatch, capfd, words, says)


@pytest.mark.parametrize(("fields", "says"), WORKLOADS.values(), ids=WORKLOADS)
def test_a_workload_in_a_file(
    full_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fields: dict[str, str | int],
    says: list[str],
) -> None:
    (full_home / "mine.toml").write_text(in_toml(fields))
    words = ["tune", "mine.toml", "--fake-script", "script.json"]
    assert_refused(full_home, monkeypatch, capfd, words, [*says, "mine.toml", "'mine'"])


FILES: dict[str, tuple[bytes, list[str]]] = {
    "typo": (in_toml({"patern": "causal"}).encode(), ["'patern'", "did you mean pattern?"]),
    "typo in a table": (b"[[wrkload]]\n", ["'wrkload'", "did you mean workload?"]),
    "syntax error": (b"[[workload]]\nname = mine\n", ["not TOML", "line 2"]),
    "text for a number": (in_toml({"head_dim": "64"}).encode(), ["head_dim is '64'", "whole number"]),
    "not UTF-8": (b"# \xff\n", ["UTF-8", "byte 2"]),
    "empty": (b"", ["no workload", "[[workload]]"]),
    "the same twice": ((in_toml({}) + in_toml({})).encode(), ["'mine'", "the same"]),
}


@pytest.mark.parametrize(("content", "says"), FILES.values(), ids=FILES)
def test_a_workload_file(
    full_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    content: bytes,
    says: list[str],
) -> None:
    (full_home / "mine.toml").write_bytes(content)
    words = ["tune", "mine.toml", "--fake-script", "script.json"]
    assert_refused(full_home, monkeypatch, capfd, words, ["mine.toml", *says])


COMMANDS: dict[str, Case] = {
    "no such file": (["tune", "gone.toml", *FAKE[:2]], ["gone.toml", "does not exist"]),
    "a folder for a file": (["tune", "folder", *FAKE[:2]], ["folder", "Is a directory"]),
    "both file and options": (["tune", "file", *FAKE, "--head-dim", "64"], ["file and --heads", "not both"]),
    "two files": (["tune", "a.toml", "b.toml"], ["b.toml"]),
    "no such script": (["tune", "--fake-script", "gone.json"], ["gone.json", "No such file"]),
    "script is no JSON": (["tune", "--fake-script", "file"], ["file", "not JSON"]),
    "no such GPU": (["tune", *FAKE, "--device", "cuda:99"], ["'cuda:99'", "does not exist"]),
    "no such device": (["tune", *FAKE, "--device", "tpu"], ["'tpu'", "cuda:N"]),
    "no such target to look up": (["lookup", "--target", "sm_12"], ["'sm_12'", "sm_90a"]),
    "no such GPU to look up": (["lookup", "--target", "cuda:99"], ["'cuda:99'"]),
    "no such target to compile": (["compile", "--target", "sm_12"], ["'sm_12'", "sm_90a"]),
    "nothing compiles for it": (["compile", "--target", "sm_90a", "--dtype", "float32"], ["sm_90a", "float32"]),
    "no such family": (["tune", *FAKE, "--family", "fa5"], ["'fa5'", "flex_cpu"]),
    "no such family to compile": (["compile", "--family", "fa5"], ["'fa5'", "fa4_fwd_sm90"]),
    "a family of another target": (["compile", "--family", "flex_cpu"], ["flex_cpu", "sm_90a"]),
    "a family of another device": (["tune", *FAKE, "--family", "flex_cpu"], ["flex_cpu needs a CPU", "fake"]),
    "an op that nothing computes": (
        ["tune", "--device", "cpu", "--op", "bwd", "--pattern", "sliding_window(64)"],
        ["flex_cpu computes fwd, not bwd", "sdpa_cpu has no argument for sliding_window"],
    ),
    "an op that nothing compiles": (
        ["compile", "--op", "bwd", "--head-dim", "80"],
        ["fa4_bwd_sm90 pads head_dim to 80", "fa4_fwd_sm90 computes fwd, not bwd"],
    ),
    "graph on a CPU": (["tune", "--device", "cpu", "--policy", "graph"], ["policy graph", "use eager"]),
    "graph on a CPU, looked up": (["lookup", "--target", "cpu", "--policy", "graph"], ["policy graph", "eager"]),
    "no such policy": (["tune", *FAKE, "--policy", "fast"], ["'fast'", "graph or eager"]),
    "no such policy, looked up": (["lookup", "--target", "fake", "--policy", "fast"], ["'fast'", "graph or eager"]),
    "no trials": (["tune", *FAKE, "--trials", "0"], ["max_trials is 0", "from 1"]),
    "trials is no number": (["tune", *FAKE, "--trials", "many"], ["--trials", "'many'"]),
    "half a head": (["lookup", "--heads", "1.5"], ["--heads", "'1.5'"]),
    "negative margin": (["tune", *FAKE, "--margin", "-1"], ["margin is -1", "from 0"]),
    "margin is not a number": (["tune", *FAKE, "--margin", "nan"], ["margin is nan", "from 0"]),
    "negative seed": (["tune", *FAKE, "--seed", "-1"], ["seed is -1", "from 0"]),
    "negative seed to compile": (["compile", "--seed", "-1"], ["seed is -1", "from 0"]),
    "no time to run": (["tune", *FAKE, "--run-timeout", "0"], ["run_timeout_s is 0", "from 0.1"]),
    "no time to compile": (["tune", *FAKE, "--compile-timeout", "-3"], ["compile_timeout_s is -3", "from 0.1"]),
    "no time to cross-compile": (["compile", "--timeout", "-3"], ["compile_timeout_s is -3", "from 0.1"]),
    "no configs": (["compile", "--count", "0"], ["--count", "'0'"]),
    "no such option": (["tune", "--trails", "3"], ["--trails", "--trials"]),
    "an option without its value": (["tune", "--trials"], ["--trials", "argument"]),
    "no such command": (["tuna"], ["'tuna'", "'tune'"]),
    "no study": (["show"], ["study", "flashtune show --help"]),
    "database below a file": (["tune", *FAKE, "--db", "file/x.db"], ["file/x.db", "choose another path"]),
    "database is a folder": (["tune", *FAKE, "--db", "folder"], ["folder", "not a regular file"]),
    "database is something else": (["tune", *FAKE, "--db", "file"], ["file", "not a database"]),
    "no database to look up in": (["lookup", "--target", "fake", "--db", "gone.db"], ["gone.db", "no such file"]),
    "database of another kind": (["tune", *FAKE, "--db", "mysql://me@host/x"], ["mysql", "not supported"]),
}


@pytest.mark.parametrize("where", ["home", "full_home"])
@pytest.mark.parametrize(("command", "says"), COMMANDS.values(), ids=COMMANDS)
def test_a_command(
    where: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: list[str],
    says: list[str],
) -> None:
    assert_refused(request.getfixturevalue(where), monkeypatch, capfd, command, says)


TUNE, LOOKUP = ["tune", *FAKE], ["lookup", "--target", "fake"]
VARIABLES: dict[str, tuple[list[str], str, str, list[str]]] = {
    "workers": (TUNE, "FLASHTUNE_COMPILE_WORKERS", "many", ["FLASHTUNE_COMPILE_WORKERS is 'many'", "whole number"]),
    "workers, compiling": (["compile"], "FLASHTUNE_COMPILE_WORKERS", "0", ["'0'", "from 1"]),
    "workers, looking up": (LOOKUP, "FLASHTUNE_COMPILE_WORKERS", "many", ["'many'", "whole number"]),
    "cache is a file": (TUNE, "FLASHTUNE_CACHE_DIR", "file", ["FLASHTUNE_CACHE_DIR is 'file'", "not a folder"]),
    "cache below a file": (
        TUNE,
        "FLASHTUNE_CACHE_DIR",
        "file/cache",
        ["file/cache", "file is not a folder", "set FLASHTUNE_CACHE_DIR"],
    ),
    "cache below a file, compiling": (["compile"], "FLASHTUNE_CACHE_DIR", "file/x", ["file/x", "is not a folder"]),
    "home is a file": (["studies"], "FLASHTUNE_HOME", "file", ["FLASHTUNE_HOME", "'file'"]),
    "database URL": (TUNE, "FLASHTUNE_DATABASE_URL", "mysql://host/x", ["mysql://host/x", "sqlite:"]),
    "database below a file": (TUNE, "FLASHTUNE_DATABASE_URL", "sqlite:///file/x.db", ["file/x.db", "another path"]),
}


@pytest.mark.parametrize(("command", "variable", "value", "says"), VARIABLES.values(), ids=VARIABLES)
def test_a_variable(
    full_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: list[str],
    variable: str,
    value: str,
    says: list[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert_refused(full_home, monkeypatch, capfd, command, says)


def newer_schema(path: Path) -> str:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999_future'")
    connection.close()
    return "9999_future"


def torn(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-5000])
    return "truncated"


def scribbled(path: Path) -> str:
    path.write_bytes(b"scribble" + path.read_bytes()[8:])
    return "not a database"


def of_something_else(path: Path) -> str:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    return "recipes"


@pytest.mark.parametrize("command", [TUNE, LOOKUP, ["studies"], ["show", "abc"]], ids=lambda words: words[0])
@pytest.mark.parametrize("spoil", [newer_schema, torn, scribbled, of_something_else])
def test_a_database_that_cannot_be_used(
    full_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: list[str],
    spoil: Any,
) -> None:
    path = full_home / "home" / "flashtune.db"
    assert_refused(full_home, monkeypatch, capfd, command, [str(path), spoil(path)])


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["tune", "--pattern", "causl"], ["'causl'", "did you mean causal?"]),
        (["tune", *FAKE, "--trials", "many", "--json"], ["--trials", "'many'"]),
        (["tune", *FAKE, "--family", "fa5"], ["'fa5'"]),
    ],
)
def test_the_installed_command(full_home: Path, command: list[str], says: list[str]) -> None:
    before = tree(full_home)
    done = subprocess.run(
        [FLASHTUNE, *command], env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert_one_line(done.returncode, done.stdout, done.stderr, says)
    assert tree(full_home) == before


def test_the_same_command_without_the_mistake_runs(home: Path) -> None:
    """So that what refuses above is the mistake, and not the rest of the command line."""
    done = subprocess.run([FLASHTUNE, *TUNE], env=os.environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (home / "home" / "flashtune.db").exists()
