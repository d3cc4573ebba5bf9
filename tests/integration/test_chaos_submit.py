"""The API is killed while it takes a submission: the job is there whole, or not at all, and never twice.

A server process kills itself at a named moment, so that every moment is met, and another one is
killed at random ones.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.chaos_checks import reading, rows
from benchmarks.chaos_site import free_port, services_missing
from benchmarks.chaos_site import own_database as own_postgresql

ITEMS = 20
KEY = "the-same-key"
# Where a server kills itself: a function of the submission, and whether before or after it. `events.add` is the last
# thing in the transaction but for the key; `Jobs.get` reads the job for the answer, once it is committed.
MOMENTS = {
    "before the transaction": ("db.jobs:Jobs.submit", "before"),
    "in the transaction": ("db.events:add", "before"),
    "before the commit": ("db.jobs:Jobs._take_key", "after"),
    "after the commit": ("db.jobs:Jobs.get", "before"),
    "before the answer": ("db.jobs:Jobs.submit", "after"),
}
COMMITTED = ("after the commit", "before the answer")
SERVER = """
import importlib, os, signal, sys
from functools import reduce
from api.http.server import Server
from api.serving import log_to_stderr
from db.store import Store
url, port, moment, when = sys.argv[1:]
if moment:
    module, _, path = moment.partition(":")
    *owner, name = path.split(".")
    owner = reduce(getattr, owner, importlib.import_module(module))
    real = getattr(owner, name)
    def killed(*args, **kwargs):
        if when == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, killed)
log_to_stderr(quiet=True)
with Store.open(url) as store, Server(store, "127.0.0.1", int(port)) as server:
    server.run()
"""


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.service)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/submit.db"
        return
    missing = services_missing()
    if missing:
        pytest.skip(missing)
    with own_postgresql() as url:
        yield url


class Api:
    """A server process, which may kill itself at a moment."""

    def __init__(self, url: str, port: int, moment: str = "") -> None:
        self.url = f"http://127.0.0.1:{port}"
        where, when = MOMENTS.get(moment, ("", ""))
        self.process = subprocess.Popen([sys.executable, "-c", SERVER, url, str(port), where, when])

    def __enter__(self) -> Api:
        deadline = time.monotonic() + 60
        while post(self.url, "GET", "/healthz") is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def post(url: str, method: str, path: str, key: str = "", body: Any = None) -> tuple[int, Any] | None:
    """Send one request; None if no whole answer came."""
    where = urlsplit(url)
    connection = HTTPConnection(str(where.hostname), where.port, timeout=30)
    headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


def job(heads: int = 4) -> dict[str, Any]:
    shape = {"heads_q": heads, "heads_kv": 1, "seqlen_k": 8, "head_dim": 8, "batch": 1}
    return {"arch": "fake", "workloads": [{**shape, "seqlen_q": 1 + n} for n in range(ITEMS)]}


def stored(url: str) -> list[str]:
    """Return the ids of the jobs, each of which must be whole."""
    with reading(url) as c:
        ids = [r["id"] for r in rows(c, "SELECT id FROM jobs ORDER BY id")]
        for table, each in (("job_items", ITEMS), ("events", 1)):
            counts = {
                r["job_id"]: r["n"] for r in rows(c, f"SELECT job_id, count(*) AS n FROM {table} GROUP BY job_id")
            }
            assert counts == dict.fromkeys(ids, each), table
        keyed = [r["job_id"] for r in rows(c, "SELECT job_id FROM idempotency_keys")]
        assert sorted(keyed) == ids
    return ids


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_of_a_submission_the_same_key_makes_one_job(url: str, moment: str) -> None:
    port = free_port()
    with Api(url, port, moment) as api:
        assert post(api.url, "POST", "/v1/jobs", KEY, job()) is None
        assert api.process.wait(timeout=30) == -signal.SIGKILL
    assert len(stored(url)) == (moment in COMMITTED)
    with Api(url, port) as api:
        first, second = (post(api.url, "POST", "/v1/jobs", KEY, job()) for _ in range(2))
        other = post(api.url, "POST", "/v1/jobs", KEY, job(heads=5))
    assert first is not None and second is not None and other is not None
    assert (first[0], second[0], other[0]) == (202, 202, 422)
    assert [first[1]["id"]] == [second[1]["id"]] == stored(url)


def test_killed_at_random_moments_each_key_has_one_whole_job(url: str) -> None:
    port, kills, clients = free_port(), 4, 6
    answers: dict[str, set[str]] = {}
    stop = threading.Event()

    def client(name: int) -> None:
        n = 0
        while not stop.is_set():
            key, n = f"key-{name}-{n}", n + 1
            mine = answers.setdefault(key, set())
            while len(mine) == 0 or n % 3 == 0:  # every third is sent again though it was answered
                answer = post(f"http://127.0.0.1:{port}", "POST", "/v1/jobs", key, job())
                if answer is None:
                    time.sleep(0.05)
                    continue
                assert answer[0] == 202, answer
                again = bool(mine)
                mine.add(answer[1]["id"])
                if again:
                    break

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    for kill in range(kills + 1):
        with Api(url, port):
            if kill == 0:
                for thread in threads:
                    thread.start()
            if kill == kills:
                stop.set()
                for thread in threads:
                    thread.join(timeout=60)
                    assert not thread.is_alive()
            else:
                time.sleep(0.4 + 0.17 * kill)
    assert all(len(ids) == 1 for ids in answers.values()), answers
    assert sorted(next(iter(ids)) for ids in answers.values()) == stored(url)
    assert len(answers) > kills
