"""A fleet of real processes: Celery workers, a broker and PostgreSQL, with the fake family.

RabbitMQ is taken from FLASHTUNE_TEST_RABBITMQ (every test has a virtual host and a user of its own, made
with rabbitmqctl), Redis from FLASHTUNE_TEST_REDIS, PostgreSQL from FLASHTUNE_TEST_POSTGRES (a schema
of its own). Every worker has its own cache folder, and starts in a folder full of traps.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Exchange
from sqlalchemy import URL, create_engine, text

from db.store import Store
from db.values import Job, WorkerInfo
from tests.integration.services import empty_schema, virtual_host
from tuner.job import JobRequest
from workers.celery_app import bell_queue

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(240)]

RABBITMQ = os.environ.get("FLASHTUNE_TEST_RABBITMQ", "127.0.0.1:5672")
REDIS = os.environ.get("FLASHTUNE_TEST_REDIS", "redis://127.0.0.1:6379/13")
PASSWORD = "hunter2-of-the-broker"
DATABASE_PASSWORD = "hunter2-of-the-database"
WORKER = ("-m", "api.cli", "worker")
MEASURED = "SELECT DISTINCT worker_id FROM trials"
TRAPS = ("api", "db", "tuner", "workers", "celery", "kombu", "billiard", "psycopg", "logging")


class Fleet:
    """Workers as subprocesses, and the database that they share."""

    def __init__(self, folder: Path, broker: str, database: URL) -> None:
        self.folder, self.broker = folder, broker
        self.database = database.render_as_string(hide_password=False)
        self.store = Store.open(self.database)
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.script = folder / "script.json"
        self.trap = folder / "trap"
        for name in TRAPS:
            (self.trap / name).mkdir(parents=True)
            (self.trap / name / "__init__.py").write_text(f"raise SystemExit('the trap {name} was imported')\n")

    def start(self, name: str, *options: str, **environ: str) -> subprocess.Popen[bytes]:
        """Start a worker; what it prints is in ``log(name)``."""
        settings = {
            "FLASHTUNE_BROKER_URL": self.broker,
            "FLASHTUNE_DATABASE_URL": self.database,
            "FLASHTUNE_CACHE_DIR": str(self.cache(name)),
            "FLASHTUNE_COMPILE_WORKERS": "1",
            "FLASHTUNE_FAKE_SCRIPT": str(self.script),
            "FLASHTUNE_TICK_S": "0.5",
            **environ,
        }
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.workers[name] = subprocess.Popen(
                [sys.executable, "-P", *WORKER, "--role", *options, "--name", name, "--json"],
                cwd=self.trap,
                env={**inherited, **settings},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.workers[name]

    def cache(self, name: str) -> Path:
        return self.folder / f"cache-{name}"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def info(self, name: str) -> WorkerInfo | None:
        """Return how a worker is registered: under the process id of its pool child."""
        children = children_of(self.workers[name].pid)
        return next((w for w in self.store.fleet.workers(alive_only=True) if w.pid in children), None)

    def wait_for(self, *names: str) -> None:
        wait(lambda: all(self.info(n) for n in names), self)

    def submit(self, *heads: int, trials: int = 30, **settings: float) -> str:
        shape = {"batch": 1, "seqlen_q": 1, "seqlen_k": 1, "head_dim": 8}
        workloads = [{**shape, "heads_q": h, "heads_kv": h} for h in heads]
        request = {"arch": "fake", "settings": {"max_trials": trials, **settings}, "workloads": workloads}
        return self.store.jobs.submit(JobRequest.from_dict(request))[0].id

    def trials(self, job_id: str) -> int:
        return sum(item.trials for item in self.store.jobs.get(job_id).items)

    def finish(self, job_id: str) -> Job:
        wait(lambda: self.store.jobs.get(job_id).state.ended, self)
        return self.store.jobs.get(job_id)

    def rows(self, query: str) -> list[Any]:
        engine = create_engine(self.database)
        try:
            with engine.connect() as connection:
                return list(connection.execute(text(query)).scalars())
        finally:
            engine.dispose()

    def close(self) -> None:
        for process in self.workers.values():
            process.kill()  # its children die with it
            process.wait()
        self.store.close()


def wait(condition: Callable[[], Any], fleet: Fleet) -> None:
    """Wait for what must come; pytest's own timeout is for what does not."""
    deadline = time.monotonic() + 120
    while not condition():
        dead = [n for n, p in fleet.workers.items() if p.poll() not in (None, 0, -signal.SIGKILL)]
        assert not dead, f"{dead[0]} ended:\n{fleet.log(dead[0])}"
        assert time.monotonic() < deadline, "\n".join(f"--- {n}\n{fleet.log(n)}" for n in fleet.workers)
        time.sleep(0.1)


def children_of(pid: int) -> set[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return {int(child) for task in tasks for child in (task / "children").read_text().split()}
    except FileNotFoundError:
        return set()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


class Line:
    """A TCP line to a server that can be cut and mended."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.mend()

    def mend(self) -> None:
        if self._server.fileno() < 0:
            self._server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def cut(self) -> None:
        """Refuse connections, and end those that there are."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets.clear()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                near, _ = server.accept()
                far = socket.create_connection(self._to)
            except OSError:
                return
            self._sockets += [near, far]
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def database() -> Iterator[URL]:
    """An empty schema of its own."""
    with empty_schema() as url:
        if url.password is None:  # the server trusts: any password will do, and none may be seen
            url = url.set(username=url.username or getpass.getuser(), password=DATABASE_PASSWORD)
        yield url


@pytest.fixture
def rabbit() -> Iterator[str]:
    """A user with a virtual host of the same name; the fixture is that name."""
    with virtual_host(PASSWORD) as name:
        yield name


def broker(name: str, place: str = RABBITMQ) -> str:
    return f"amqp://{name}:{PASSWORD}@{place}/{name}"


@pytest.fixture
def fleet(tmp_path: Path, database: URL, rabbit: str) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, broker(rabbit), database)
    fleet.script.write_text(script())
    yield fleet
    fleet.close()


def script(sample_s: float = 0.0) -> str:
    """A winner, variant 3, and objects that must travel; every sample of the default takes ``sample_s``."""
    outcomes = {"3": {"speedup": 1.25}, "5": {"does": "nan"}, "stock": {"sample_s": sample_s}}
    return json.dumps({"objects": True, "base_us": 100, "noise": {"sigma": 0.002}, "outcomes": outcomes})


def winners(job: Job) -> list[Any]:
    assert {item.state.value for item in job.items} == {"done"}, job
    return [item.tuned.config["variant"] for item in job.items if item.tuned]


class Trap:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_a_job_goes_through_a_fleet(fleet: Fleet, tmp_path: Path) -> None:
    """Two workloads of 30 configs, three measuring workers, one of them late; queues purged all the while."""
    fleet.script.write_text(script(sample_s=0.01))
    fleet.start("control", "control")
    fleet.start("compile", "compile", "--arch", "fake")
    fleet.start("first", "measure")
    fleet.start("second", "measure", "--device", "fake")
    fleet.wait_for("control", "compile", "first", "second")
    with Connection(fleet.broker) as connection:
        unpickled = tmp_path / "unpickled"
        content = {"content_type": "application/x-python-serialize", "content_encoding": "binary"}
        for queue in ("control", "measure.fake", "compile.fake"):
            connection.Producer().publish(
                pickle.dumps(Trap(unpickled)), exchange=Exchange(""), routing_key=queue, **content
            )
        job_id = fleet.submit(29, 30)
        wait(lambda: len(fleet.rows(MEASURED)) == 2, fleet)
        early = [info.pid for n in ("first", "second") if (info := fleet.info(n))]
        for pid in early:
            os.kill(pid, signal.SIGSTOP)  # or they might be done before the third has begun
        fleet.start("late", "measure")
        purged = 0
        while len(fleet.rows(MEASURED)) < 3:
            purged += sum(connection.default_channel.queue_purge(q) or 0 for q in ("measure.fake", "compile.fake"))
            wait(lambda: True, fleet)
            time.sleep(0.1)
        for pid in early:
            os.kill(pid, signal.SIGCONT)
    job = fleet.finish(job_id)
    assert purged > 0
    assert winners(job) == [3, 3]
    assert [item.trials for item in job.items] == [30, 31]  # each config once, with the stock one
    measured = set(fleet.rows(MEASURED))
    assert measured == {fleet.info(n).id for n in ("first", "second", "late")}  # type: ignore[union-attr]
    objects = {n: {p.name for p in (fleet.cache(n) / "fake").iterdir()} for n in ("compile", "first", "second")}
    assert objects["first"] and objects["second"]
    assert objects["first"] | objects["second"] <= objects["compile"]
    assert not unpickled.exists()
    for name in fleet.workers:
        assert not list(fleet.cache(name).glob("*beat*"))  # the shelf, which is pickle, of Celery's usual scheduler
        log = fleet.log(name)
        assert f"{name}: listens to" in log
        assert PASSWORD not in log
        assert DATABASE_PASSWORD not in log
        assert "Traceback" not in log or "ContentDisallowed" in log, log
        first = json.loads(log.splitlines()[0])
        assert first["name"] == name
        assert first["queue"] == {"control": "control", "compile": "compile.fake"}.get(name, "measure.fake")


@pytest.mark.parametrize("to", ["worker", "group"])
def test_sigterm_gives_claims_back_at_once(fleet: Fleet, to: str) -> None:
    """The lease is an hour: who waited for its end would not see the end of this test."""
    fleet.script.write_text(script(sample_s=0.03))
    fleet.start("control", "control", FLASHTUNE_LEASE_S="3600")
    fleet.start("compile", "compile", "--arch", "fake", FLASHTUNE_LEASE_S="3600")
    first = fleet.start("first", "measure", FLASHTUNE_LEASE_S="3600")
    fleet.wait_for("control", "compile", "first")
    job_id = fleet.submit(12, trials=12)
    wait(lambda: fleet.trials(job_id) >= 3, fleet)
    inside = children_of(first.pid)
    if to == "worker":
        first.terminate()
    else:
        os.killpg(first.pid, signal.SIGTERM)
    assert first.wait(timeout=60) == 0
    wait(lambda: all(gone(pid) for pid in inside), fleet)
    assert fleet.rows("SELECT stopped_at IS NOT NULL FROM workers WHERE roles::text LIKE '%measure%'") == [True]
    assert "leased" not in fleet.rows("SELECT state FROM work WHERE stage = 'measure'")
    done = fleet.trials(job_id)
    assert done < 13
    fleet.start("second", "measure", FLASHTUNE_LEASE_S="3600")
    job = fleet.finish(job_id)
    assert winners(job) == [3]
    assert [item.trials for item in job.items] == [13]
    deaths = fleet.rows("SELECT deaths FROM work")
    assert set(deaths) <= {0}


def test_a_second_sigterm_does_not_wait(fleet: Fleet) -> None:
    """The kernel being measured hangs, and would be given an hour."""
    fleet.script.write_text(json.dumps({"outcomes": {"0": {"does": "hang"}}}))
    for name, *options in (("control", "control"), ("compile", "compile", "--arch", "fake"), ("first", "measure")):
        fleet.start(name, *options, FLASHTUNE_LEASE_S="2")
    fleet.wait_for("control", "compile", "first")
    fleet.submit(1, trials=1, run_timeout_s=900)
    wait(lambda: (info := fleet.info("first")) is not None and "variant=0" in info.doing, fleet)
    first = fleet.workers.pop("first")
    inside = children_of(first.pid)
    inside |= {grandchild for child in inside for grandchild in children_of(child)}
    first.terminate()
    wait(lambda: "Warm shutdown" in fleet.log("first"), fleet)
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(timeout=3)
    first.terminate()
    assert first.wait(timeout=60) == 1
    wait(lambda: all(gone(pid) for pid in inside), fleet)
    assert "Traceback" not in fleet.log("first")


def test_killed_processes(fleet: Fleet) -> None:
    """A killed pool child is replaced, and a killed worker takes its children along; the job does not mind."""
    fleet.script.write_text(script(sample_s=0.02))
    for name, *options in (("control", "control"), ("compile", "compile", "--arch", "fake"), ("first", "measure")):
        fleet.start(name, *options, FLASHTUNE_LEASE_S="2")
    fleet.wait_for("control", "compile", "first")
    job_id = fleet.submit(12, trials=12)
    wait(lambda: fleet.trials(job_id) >= 2, fleet)
    before = fleet.info("first")
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    wait(lambda: (now := fleet.info("first")) is not None and now.id != before.id, fleet)
    done = fleet.trials(job_id)
    wait(lambda: fleet.trials(job_id) > done, fleet)
    inside = children_of(fleet.workers["first"].pid)
    inside |= {grandchild for child in inside for grandchild in children_of(child)}
    assert len(inside) >= 3  # Celery's semaphore tracker, the pool child, the measuring child
    fleet.workers["first"].kill()
    wait(lambda: all(gone(pid) for pid in inside), fleet)
    fleet.start("second", "measure", FLASHTUNE_LEASE_S="2")
    assert winners(fleet.finish(job_id)) == [3]


def test_a_broker_and_a_database_that_go_away(tmp_path: Path, database: URL, rabbit: str) -> None:
    """Both are away when the workers start, and again in the middle."""
    host, _, port = RABBITMQ.rpartition(":")
    to_broker, to_database = Line(host, int(port)), Line(database.host or "127.0.0.1", database.port or 5432)
    fleet = Fleet(tmp_path, broker(rabbit, f"127.0.0.1:{to_broker.port}"), database)
    try:
        fleet.script.write_text(script(sample_s=0.02))
        fleet.database = database.set(host="127.0.0.1", port=to_database.port).render_as_string(hide_password=False)
        to_broker.cut()
        to_database.cut()
        fleet.start("control", "control")
        wait(lambda: "control: database " in fleet.log("control"), fleet)
        to_database.mend()
        fleet.start("compile", "compile", "--arch", "fake")
        fleet.start("first", "measure")
        fleet.wait_for("compile", "first")
        to_broker.mend()
        fleet.wait_for("control")
        job_id = fleet.submit(20, trials=20)
        wait(lambda: fleet.trials(job_id) >= 3, fleet)
        to_broker.cut()
        to_database.cut()
        time.sleep(3)
        to_database.mend()
        to_broker.mend()
        job = fleet.finish(job_id)
        assert winners(job) == [3]
        assert [item.trials for item in job.items] == [21]
        logs = "".join(fleet.log(n) for n in fleet.workers)
        assert logs.count("Connection refused") >= 6  # all noticed that, of both
        assert "Traceback" not in logs
        assert PASSWORD not in logs
        assert DATABASE_PASSWORD not in logs
    finally:
        fleet.close()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch on this machine")
def test_celery_processes_do_not_load_torch(fleet: Fleet) -> None:
    worker = fleet.start("cpu", "measure", "--device", "cpu")
    fleet.wait_for("cpu")
    info = fleet.info("cpu")
    assert info is not None
    wait(lambda: any(maps_torch(child) for child in children_of(info.pid)), fleet)  # the measuring child does
    assert not maps_torch(worker.pid)
    assert not maps_torch(info.pid)


def test_redis_will_do(tmp_path: Path, database: URL) -> None:
    redis = pytest.importorskip("redis")
    server = redis.Redis.from_url(REDIS)
    try:
        server.flushdb()
    except redis.exceptions.ConnectionError as e:
        pytest.skip(f"no Redis: {e}")
    fleet = Fleet(tmp_path, REDIS, database)
    try:
        fleet.script.write_text(script())
        for name, *options in (("control", "control"), ("compile", "compile", "--arch", "fake"), ("first", "measure")):
            fleet.start(name, *options)
        fleet.wait_for("control", "compile", "first")
        job_id = fleet.submit(12, trials=12)
        wait(lambda: fleet.trials(job_id) >= 3, fleet)
        server.flushdb()
        assert winners(fleet.finish(job_id)) == [3]
        fleet.workers["first"].terminate()
        assert fleet.workers["first"].wait(timeout=60) == 0
    finally:
        fleet.close()
        server.flushdb()


def test_queues_are_quorum_queues_and_every_member_declares_the_same(rabbit: str) -> None:
    """RabbitMQ refuses to declare a queue again in another way."""
    with Connection(broker(rabbit)) as connection:
        for name in ("control", "measure.sm_90a", "compile.sm_90a"):
            bell_queue(name)(connection.default_channel).declare()
            bell_queue(name)(connection.default_channel).declare()
    assert shutil.which("rabbitmqctl")
    listed = subprocess.run(
        ["rabbitmqctl", "--quiet", "list_queues", "-p", rabbit, "name", "type", "--formatter", "json"],
        capture_output=True,
        check=True,
    )
    assert {(q["name"], str(q["type"]).rpartition("_")[2]) for q in json.loads(listed.stdout)} == {
        (name, "quorum") for name in ("control", "measure.sm_90a", "compile.sm_90a")
    }
