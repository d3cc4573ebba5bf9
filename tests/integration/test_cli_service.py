"""``submit``, ``jobs``, ``watch``, ``cancel`` and ``keys``, on the database and through a server.

The installed command as a person runs it; refusals call its ``main`` in this process, where imports are paid for once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api import cli
from db import events as events_table
from db.store import Store

FLASHTUNE = Path(sys.executable).with_name("flashtune")
HEADS = 6  # variants of the fake family
SCRIPT = {"seed": 3, "noise": {"sigma": 0.002}, "outcomes": {"2": {"speedup": 1.25}, "4": {"does": "nan"}}}
WORKLOADS = "".join(
    f'[[workload]]\nname = "{name}"\nbatch = 1\nheads = {HEADS}\nseqlen = {n}\nhead_dim = 64\n'
    for name, n in (("short", 64), ("long", 128))
)
WORKER = """
import threading
from db.store import Store
from workers import embedded
from workers.settings import Settings
settings = Settings.from_env()
embedded.run(settings, Store.open(settings.database_url), threading.Event())
"""
NOT_A_KEY = "ft_" + "x" * 43

_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Kill what a test has left running."""
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.communicate()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "two.toml").write_text(WORKLOADS)
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    return tmp_path


def environ(home: Path, **env: str) -> dict[str, str]:
    return {**os.environ, "FLASHTUNE_HOME": str(home), **env}


def run(home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FLASHTUNE, *args], cwd=home, env=environ(home, **env), capture_output=True, text=True, timeout=120, check=False
    )


def start(home: Path, *command: str | Path, **env: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command,
        cwd=home,
        env=environ(home, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in a shell's background ignores SIGINT, and hands that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    _started.append(process)
    return process


def serve(home: Path, port: int = 0) -> tuple[subprocess.Popen[str], str]:
    """Start a server; return it and its URL once it answers."""
    process = start(home, FLASHTUNE, "serve", "--port", str(port), "--quiet")
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"serving (http://\S+)", line)
    assert found, line + process.stderr.read()
    return process, found[1]


def answer(home: Path, *args: str, **env: str) -> Any:
    done = run(home, *args, "--json", **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stored_events(home: Path, job_id: str) -> list[dict[str, Any]]:
    with Store.open(str(home / "flashtune.db"), read_only=True) as store:
        return [e.to_dict() for e in store.jobs.events(job_id)]


@pytest.fixture
def assert_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Run a command in this process: one line of error that says all of ``says``, and no secret."""

    def check(home: Path, command: list[str], code: int, *says: str, **env: str) -> None:
        monkeypatch.chdir(home)
        monkeypatch.setattr(sys, "argv", ["flashtune", *command])
        for name, value in {"FLASHTUNE_HOME": str(home), **env}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        assert (ended.value.code, out) == (code, ""), err
        (line,) = err.splitlines()
        assert line.startswith("flashtune: ")
        for text in says:
            assert text in line
        assert env.get("FLASHTUNE_API_KEY", "\n") not in line

    return check


@pytest.fixture(params=["database", "server"])
def way(request: pytest.FixtureRequest, home: Path) -> dict[str, str]:
    """The environment of the commands: nothing, or a server with a key."""
    if request.param == "database":
        return {}
    key = run(home, "keys", "create", "test", "--scope", "submit", "--scope", "read").stdout.strip()
    return {"FLASHTUNE_URL": serve(home)[1], "FLASHTUNE_API_KEY": key}


def test_a_job_from_submission_to_its_cancelling(home: Path, way: dict[str, str]) -> None:
    done = run(home, "submit", "two.toml", "--name", "mine", "--priority", "7", "--trials", "9", **way)
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    assert f"submitted 2 workload(s); follow it by `flashtune watch {job_id}`" in done.stderr

    (listed,) = answer(home, "jobs", **way)["items"]
    assert (listed["id"], listed["name"], listed["state"], listed["priority"]) == (job_id, "mine", "queued", 7)
    assert (listed["settings"]["max_trials"], listed["counts"]) == (9, {"queued": 2})
    table = run(home, "jobs", **way).stdout
    for text in (job_id, "mine", "queued", "0 of 2"):
        assert text in table

    shown = answer(home, "jobs", job_id[:6], **way)
    assert [(i["name"], i["workload"]["seqlen_q"]) for i in shown["items"]] == [("short", 64), ("long", 128)]
    assert "short" in run(home, "jobs", job_id, **way).stdout

    assert answer(home, "cancel", job_id, **way)["state"] == "cancelled"
    assert f"job {job_id} is cancelled" in run(home, "cancel", job_id, **way).stdout
    assert answer(home, "jobs", "--state", "queued", **way) == {"items": [], "next": None}

    watched = run(home, "watch", job_id, "--json", **way)
    assert watched.returncode == 1, watched.stderr  # it was not done
    assert [json.loads(line) for line in watched.stdout.splitlines()] == stored_events(home, job_id)
    text = run(home, "watch", job_id, **way)
    assert text.returncode == 1
    assert [line.partition(" ")[2] for line in text.stdout.splitlines()[:2]] == [
        "submitted with 2 workload(s)",
        "cancelled",
    ]


def test_one_idempotency_key_makes_one_job(
    home: Path, way: dict[str, str], assert_refused: Callable[..., None]
) -> None:
    submission = ["submit", "two.toml", "--idempotency-key", "k1"]
    first, second = (answer(home, *submission, **way) for _ in range(2))
    assert (first["created"], second["created"]) == (True, False)
    assert first["id"] == second["id"]
    assert "submitted before under this key" in run(home, *submission, **way).stderr
    assert len(answer(home, "jobs", **way)["items"]) == 1
    assert_refused(home, [*submission, "--priority", "1"], 2, "'k1'", "another request", **way)


def test_a_long_list_comes_in_pages(home: Path, way: dict[str, str]) -> None:
    ids = [answer(home, "submit", "--heads", str(HEADS), **way)["id"] for _ in range(3)]
    first = run(home, "jobs", "--limit", "2", **way)
    assert ids[2] in first.stdout
    assert ids[0] not in first.stdout
    found = re.search(r"more with --after (\S+)", first.stderr)
    assert found
    rest = answer(home, "jobs", "--after", found[1], **way)
    assert [job["id"] for job in rest["items"]] == ids[:1]
    assert rest["next"] is None


def test_a_job_is_watched_to_its_answers(home: Path, way: dict[str, str]) -> None:
    worker = start(home, sys.executable, "-c", WORKER, FLASHTUNE_FAKE_SCRIPT="script.json", FLASHTUNE_TICK_S="0.1")
    done = run(home, "submit", "two.toml", "--arch", "fake", "--watch", **way)
    assert done.returncode == 0, done.stderr + str(worker.poll())
    job_id, *lines = done.stdout.splitlines()
    said = [line.partition(" ")[2] for line in lines]
    for name in ("short", "long"):
        assert sum(bool(re.match(rf"{name}: fake variant=\d+: ", line)) for line in said) == HEADS
        assert sum(line.startswith(f"{name}: fake variant=2: ok 1.2") for line in said) == 1
        assert sum(line.startswith(f"{name}: fake variant=4: incorrect") for line in said) == 1
        assert sum(line.startswith(f"{name}: fake variant=2 1.2") for line in said) == 1  # the answer
    assert "done: 2 done" in said

    again = run(home, "submit", "two.toml", "--arch", "fake", "--watch", "--json", **way)
    assert again.returncode == 0, again.stderr
    job, *events = [json.loads(line) for line in again.stdout.splitlines()]
    assert job["created"] is True
    assert events == stored_events(home, job["id"])
    assert [e["data"]["known"] for e in events if e["kind"] == "item_done"] == [True, True]
    table = run(home, "jobs", job_id, **way).stdout
    assert len(re.findall(r"fake variant=2 1\.2\d\dx \[1\.2", table)) == 2


def test_watching_goes_on_after_the_server_was_restarted(home: Path) -> None:
    server, url = serve(home)
    job_id = answer(home, "submit", "two.toml", "--url", url)["id"]
    watching = start(home, FLASHTUNE, "watch", job_id, "--json", "--url", url)
    assert watching.stdout is not None
    lines = [watching.stdout.readline()]
    server.kill()
    server.communicate()
    with Store.open(str(home / "flashtune.db")) as store:
        with store._database.write() as session:
            events_table.add(session, job_id, "trial", {"study": "x", "while": "away"})
        store.jobs.cancel(job_id)
    serve(home, int(url.rpartition(":")[2]))
    rest, err = watching.communicate(timeout=120)
    assert (watching.returncode, err) == (1, "")
    assert [json.loads(line) for line in [*lines, *rest.splitlines()]] == stored_events(home, job_id)


def test_ctrl_c_leaves_the_job_alone(home: Path, way: dict[str, str]) -> None:
    job_id = answer(home, "submit", "two.toml", **way)["id"]
    watching = start(home, FLASHTUNE, "watch", job_id, **way)
    assert watching.stdout is not None
    watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 130
    (line,) = err.splitlines()
    assert f"job {job_id} goes on" in line
    assert answer(home, "jobs", job_id, **way)["state"] == "queued"


def test_a_reader_that_goes_away_is_no_error(home: Path) -> None:
    job_id = answer(home, "submit", "two.toml")["id"]
    watching = start(home, FLASHTUNE, "watch", job_id, "--json")
    assert watching.stdout is not None
    watching.stdout.readline()
    watching.stdout.close()
    run(home, "cancel", job_id)
    assert watching.wait(timeout=60) == 0
    assert watching.stderr is not None
    assert watching.stderr.read() == ""


def test_a_key_from_its_making_to_its_end(home: Path, assert_refused: Callable[..., None]) -> None:
    made = answer(home, "keys", "create", "ann", "--scope", "read", "--rate-per-minute", "90")
    assert re.fullmatch(r"ft_[A-Za-z0-9_-]{43}", made["key"])
    assert (made["name"], made["scopes"], made["rate_per_minute"]) == ("ann", ["read"], 90)
    text = run(home, "keys", "create", "bob", "--scope", "submit", "--scope", "read")
    assert re.fullmatch(r"ft_[A-Za-z0-9_-]{43}\n", text.stdout)
    assert "bob (read, submit); it is not shown again" in text.stderr

    listed = run(home, "keys", "list")
    for known in (made["id"], "ann", "bob", "90"):
        assert known in listed.stdout
    as_json = run(home, "keys", "list", "--json").stdout
    for secret in (made["key"], text.stdout.strip()):
        assert secret not in listed.stdout + as_json

    url = serve(home)[1]
    asks = {"FLASHTUNE_URL": url, "FLASHTUNE_API_KEY": made["key"]}
    assert answer(home, "jobs", **asks) == {"items": [], "next": None}
    assert_refused(home, ["submit", "two.toml"], 2, "scope submit", **asks)
    assert run(home, "keys", "revoke", "ann").stdout == f"key {made['id']} of ann is revoked\n"
    deadline = time.monotonic() + 60  # the server believes a key for some seconds
    while run(home, "jobs", **asks).returncode == 0 and time.monotonic() < deadline:
        pass
    assert_refused(home, ["jobs"], 2, url, "does not accept the key", "FLASHTUNE_API_KEY", **asks)


COMMANDS: dict[str, list[str]] = {
    "submit": ["submit", "two.toml"],
    "jobs": ["jobs"],
    "one job": ["jobs", "abc"],
    "watch": ["watch", "abc"],
    "cancel": ["cancel", "abc"],
}


@pytest.fixture
def nobody() -> Iterator[str]:
    """The URL of a service that is not there."""
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port, and nobody answers
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_service_that_is_not_there(
    home: Path, nobody: str, command: list[str], assert_refused: Callable[..., None]
) -> None:
    says = (f"cannot reach {nobody}: Connection refused", "flashtune serve")
    assert_refused(home, [*command, "--url", nobody], 3, *says, FLASHTUNE_API_KEY=NOT_A_KEY)
    assert not (home / "flashtune.db").exists()


def test_a_wrong_key_is_refused_everywhere(home: Path, assert_refused: Callable[..., None]) -> None:
    run(home, "keys", "create", "somebody", "--scope", "read")
    url = serve(home)[1]
    for command in COMMANDS.values():
        says = (url, "does not accept the key in FLASHTUNE_API_KEY")
        assert_refused(home, [*command, "--url", url], 2, *says, FLASHTUNE_API_KEY=NOT_A_KEY)


def test_a_job_that_does_not_exist(home: Path, way: dict[str, str], assert_refused: Callable[..., None]) -> None:
    answer(home, "submit", "two.toml", **way)  # so that there is a database
    for command in ("jobs", "watch", "cancel"):
        for ref, says in (("abcdef123456", "no job has the id"), ("x/../y", "is no job id")):
            assert_refused(home, [command, ref], 2, f"'{ref}'", says, **way)


BAD: dict[str, tuple[list[str], list[str]]] = {
    "pattern": (["submit", "--pattern", "causl"], ["'causl'", "did you mean causal?"]),
    "file and options": (["submit", "two.toml", "--heads", "3"], ["two.toml", "--heads"]),
    "no file": (["submit", "three.toml"], ["three.toml"]),
    "arch": (["submit", "two.toml", "--arch", "hopper"], ["'hopper'", "sm_90a"]),
    "policy": (["submit", "two.toml", "--policy", "fast"], ["'fast'", "graph"]),
    "family": (["submit", "two.toml", "--family", "fa5"], ["'fa5'"]),
    "trials": (["submit", "two.toml", "--trials", "0"], ["max_trials is 0"]),
    "margin": (["submit", "two.toml", "--margin", "nan"], ["margin is nan"]),
    "priority": (["submit", "two.toml", "--priority", "101"], ["priority is 101", "-100 to 100"]),
    "name": (["submit", "two.toml", "--name", "x" * 201], ["name 'xxx", "200"]),
    "idempotency key": (["submit", "two.toml", "--idempotency-key", "two words"], ["'two words'", "1 to 255"]),
    "no such state": (["jobs", "--state", "lost"], ["lost", "cancelled"]),
    "no jobs": (["jobs", "--limit", "0"], ["--limit", "'0'"]),
    "cursor": (["jobs", "--after", "nonsense"], ["'nonsense'", "newest"]),
    "one job and a state": (["jobs", "abc", "--state", "done"], ["'abc'", "--state"]),
    "scope": (["keys", "create", "ann", "--scope", "root"], ["'root'", "admin"]),
    "no scope": (["keys", "create", "ann"], ["--scope"]),
    "key name": (["keys", "create", " ", "--scope", "read"], ["' '", "1 to 100"]),
    "rate": (["keys", "create", "ann", "--scope", "read", "--rate-per-minute", "0"], ["rate_per_minute is 0", "1"]),
    "no such key": (["keys", "revoke", "nobody"], ["'nobody'", "flashtune keys list"]),
    "URL and database": (["jobs", "--url", "http://localhost:1", "--db", "x.db"], ["--url", "--db x.db"]),
    "URL": (["jobs", "--url", "localhost:8000"], ["'localhost:8000'", "http://host:port"]),
    "a database that is not there": (["jobs", "--db", "gone.db"], ["gone.db", "no such file"]),
}


@pytest.fixture(scope="module")
def used_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "two.toml").write_text(WORKLOADS)
    answer(home, "submit", "two.toml")
    return home


@pytest.mark.parametrize(("command", "says"), BAD.values(), ids=BAD)
def test_bad_input(used_home: Path, command: list[str], says: list[str], assert_refused: Callable[..., None]) -> None:
    assert_refused(used_home, command, 2, *says)
    assert not (used_home / "x.db").exists()
    with Store.open(str(used_home / "flashtune.db"), read_only=True) as store:
        assert len(store.jobs.list().items) == 1
        assert store.keys.list() == []


def test_the_installed_command_ends_alike(used_home: Path, nobody: str) -> None:
    for command, code in ((BAD["priority"][0], 2), (["jobs", "--url", nobody], 3)):
        done = run(used_home, *command)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("FLASHTUNE_URL", "ftp://host", "FLASHTUNE_URL is 'ftp://host'"),
        ("FLASHTUNE_API_KEY", "two words", "FLASHTUNE_API_KEY is no API key"),
    ],
)
def test_a_bad_variable(used_home: Path, name: str, value: str, says: str, assert_refused: Callable[..., None]) -> None:
    assert_refused(used_home, ["jobs"], 2, says, **{name: value})


def test_what_the_server_refuses_is_said(home: Path, assert_refused: Callable[..., None]) -> None:
    url = serve(home)[1]
    assert_refused(home, ["jobs", "--url", url, "--after", "nonsense"], 2, "'nonsense'")
