"""What ``flashtune doctor`` says of a fleet: database, broker, shared folder, clock, workers and service.

Servers are real where the test is about what they say; small ones of our own where they must misbehave.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, text

from api import checks, checks_fleet, checks_service
from api.checks import Check, Level
from api.http.server import Server
from db.store import Store
from db.values import WorkerInfo
from tests.integration.services import empty_schema, rabbitmqctl, virtual_host
from tuner.errors import InputError, Unavailable
from tuner.job import JobRequest
from tuner.target import Target, Toolchain, named
from workers import broker
from workers.dispatch import Dispatcher
from workers.identity import class_key, compile_key, identify
from workers.settings import Settings

FLASHTUNE = Path(sys.executable).with_name("flashtune")
RABBITMQ = os.environ.get("FLASHTUNE_TEST_RABBITMQ", "127.0.0.1:5672")
REDIS = os.environ.get("FLASHTUNE_TEST_REDIS", "redis://127.0.0.1:6379/13")
PASSWORD = "hunter2-of-nobody"
H200 = Target("NVIDIA H200", "sm_90a", 132, power_cap_w=700, uuid="GPU-1")
TOOLS = Toolchain(driver="580.1", torch="2.13.0", flash_attn_4="4.0:abc", cutlass_dsl="4.8.1", python="3.12")


def doctor(home: Path, *options: str, **env: str) -> tuple[int, dict[str, dict[str, str]], str]:
    """Run the command; return its status, the checks by name, and everything that it printed."""
    done = subprocess.run(
        [FLASHTUNE, "doctor", "--json", *options],
        cwd=home,
        env={**os.environ, "FLASHTUNE_HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    report = json.loads(done.stdout) if done.stdout else {"checks": []}
    found = {c["name"]: c for c in report["checks"]}
    assert all(c["next_step"] for c in found.values() if c["level"] != "ok")
    return done.returncode, found, done.stdout + done.stderr


@pytest.fixture
def schema() -> Iterator[URL]:
    with empty_schema() as url:
        yield url


@pytest.fixture
def rabbit() -> Iterator[str]:
    with virtual_host(PASSWORD) as name:
        yield name


@pytest.fixture
def place(tmp_path: Path) -> Iterator[str]:
    """A SQLite database without anything in it."""
    place = str(tmp_path / "fleet.db")
    Store.open(place).close()
    yield place


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def levels(found: list[Check]) -> dict[str, Level]:
    assert all(c.next_step for c in found if c.level is not Level.OK)
    return {c.name: c.level for c in found}


# The command as a whole


@pytest.mark.service
def test_a_sound_fleet_passes(tmp_path: Path, schema: URL, rabbit: str) -> None:
    database = schema.render_as_string(hide_password=False)
    (tmp_path / "shared").mkdir()
    with Store.open(database) as store, serving(store) as url:
        _, key = store.keys.create("doctor", ["read"])
        status, found, printed = doctor(
            tmp_path,
            FLASHTUNE_DATABASE_URL=database,
            FLASHTUNE_BROKER_URL=f"amqp://{rabbit}:{PASSWORD}@{RABBITMQ}/{rabbit}",
            FLASHTUNE_ARTIFACT_DIR=str(tmp_path / "shared"),
            FLASHTUNE_URL=url,
            FLASHTUNE_API_KEY=key,
        )
    names = ("database", "clock", "fleet", "broker", "artifact folder", "service")
    assert {n: found[n]["level"] for n in names} == dict.fromkeys(names, "ok")
    assert "quorum" in found["broker"]["seen"]
    assert "takes the key" in found["service"]["seen"]
    assert "not used" not in "".join(found[n]["seen"] for n in names)
    assert status == (1 if any(c["level"] == "fail" for c in found.values()) else 0)
    assert PASSWORD not in printed
    assert key not in printed


def test_everything_away_is_said_at_once_and_no_secret_is_shown(tmp_path: Path) -> None:
    port, key = closed_port(), "ft_" + "k" * 43
    status, found, printed = doctor(
        tmp_path,
        FLASHTUNE_DATABASE_URL=f"postgresql://ann:{PASSWORD}@127.0.0.1:{port}/fleet",
        FLASHTUNE_BROKER_URL=f"amqp://ann:{PASSWORD}@127.0.0.1:{port}/fleet",
        FLASHTUNE_ARTIFACT_DIR="/sys",  # root cannot write there, either
        FLASHTUNE_URL=f"http://127.0.0.1:{port}",
        FLASHTUNE_API_KEY=key,
    )
    assert status == 1
    names = ("database", "broker", "artifact folder", "service")
    assert {n: found[n]["level"] for n in names} == dict.fromkeys(names, "fail")
    for name in ("database", "broker", "service"):
        assert f"127.0.0.1:{port}" in found[name]["seen"]
    assert "/sys" in found["artifact folder"]["seen"]
    assert "not looked at" in found["fleet"]["seen"]
    assert "clock" not in found
    assert PASSWORD not in printed
    assert key not in printed


def test_what_is_not_configured_is_no_fault(tmp_path: Path) -> None:
    _, found, _ = doctor(tmp_path)
    for name in ("broker", "artifact folder", "service", "clock"):
        assert found[name]["level"] == "ok"
        assert found[name]["seen"].startswith("not used")
    assert found["fleet"]["level"] == "ok"


def test_a_wrong_option_is_no_finding(tmp_path: Path) -> None:
    status, found, printed = doctor(tmp_path, "--db", f"mysql://ann:{PASSWORD}@host/x")
    assert (status, found) == (2, {})
    assert "'mysql'" in printed
    assert PASSWORD not in printed


# The broker


@pytest.mark.service
def test_the_broker_makes_quorum_queues_and_keeps_none(rabbit: str) -> None:
    seen = broker.check(f"amqp://{rabbit}:{PASSWORD}@{RABBITMQ}/{rabbit}")
    assert "RabbitMQ" in seen
    assert "quorum" in seen
    assert f"{rabbit}:***@" in seen
    assert PASSWORD not in seen
    assert rabbitmqctl("list_queues", "-p", rabbit, "name").split() in ([], ["name"])


@pytest.mark.service
@pytest.mark.parametrize(
    ("user", "password", "vhost", "says"),
    [("{0}", "wrong-" + PASSWORD, "{0}", "ACCESS_REFUSED"), ("{0}", PASSWORD, "no-such-host", "NOT_ALLOWED")],
)
def test_a_broker_that_refuses_names_its_reason(rabbit: str, user: str, password: str, vhost: str, says: str) -> None:
    url = f"amqp://{user.format(rabbit)}:{password}@{RABBITMQ}/{vhost.format(rabbit)}"
    with pytest.raises(InputError, match=says) as caught:
        broker.check(url)
    assert not isinstance(caught.value, Unavailable)  # waiting would not help
    assert password not in str(caught.value)


@pytest.mark.service
def test_a_user_who_may_not_make_queues_is_told_so(rabbit: str) -> None:
    rabbitmqctl("set_permissions", "-p", rabbit, rabbit, "^nothing$", ".*", ".*")
    with pytest.raises(InputError, match=r"ACCESS_REFUSED.*configure"):
        broker.check(f"amqp://{rabbit}:{PASSWORD}@{RABBITMQ}/{rabbit}")


def test_a_broker_that_is_away_or_silent_is_given_up() -> None:
    with pytest.raises(Unavailable, match="refused") as caught:
        broker.check(f"amqp://ann:{PASSWORD}@127.0.0.1:{closed_port()}/x")
    assert PASSWORD not in str(caught.value)
    # one that takes connections, and says nothing
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unavailable) as caught:
        broker.check(f"amqp://ann:{PASSWORD}@127.0.0.1:{silent.getsockname()[1]}/x")
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("url", [f"amqp://ann:{PASSWORD}/x@host/y", "memory://"])
def test_a_url_of_no_use_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InputError) as caught:
        broker.check(url)
    assert "amqp://" in str(caught.value)
    assert PASSWORD not in str(caught.value)


@pytest.mark.service
def test_redis_is_tolerated() -> None:
    redis = pytest.importorskip("redis")
    try:
        redis.Redis.from_url(REDIS).ping()
    except redis.exceptions.ConnectionError as e:
        pytest.skip(f"no Redis: {e}")
    assert "Redis" in broker.check(REDIS)


# The clock


@pytest.mark.service
@pytest.mark.parametrize(("ahead_s", "level"), [(None, Level.OK), (4, Level.OK), (7, Level.FAIL), (-7, Level.FAIL)])
def test_the_servers_clock_is_compared(schema: URL, ahead_s: int | None, level: Level) -> None:
    """The server's clock_timestamp() is replaced, for this schema, by one that is wrong by some seconds."""
    place = schema.render_as_string(hide_password=False)
    if ahead_s is not None:
        engine = create_engine(schema)
        with engine.begin() as connection:
            body = f"SELECT pg_catalog.clock_timestamp() + interval '{ahead_s} seconds'"
            connection.execute(
                text(f"CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $${body}$$")
            )
        engine.dispose()
    (found,) = checks_service.clock(place)
    assert found.level is level
    if level is Level.FAIL:
        assert "7.0 s " + ("behind" if (ahead_s or 0) > 0 else "ahead of") in found.seen
        assert "NTP" in found.next_step


# Jobs, work and workers


def worker(host: str, roles: tuple[str, ...], target: Target = H200, tools: Toolchain = TOOLS) -> WorkerInfo:
    """A worker that is heard of now, on another host."""
    return replace(
        identify(roles, target, tools),
        host=host,
        class_key=class_key(target, tools) if "measure" in roles else "",
        compile_key=compile_key(target.arch, tools),
    )


def submit(store: Store, arch: str) -> str:
    shape = {"batch": 1, "heads_q": 5, "heads_kv": 5, "seqlen_q": 1, "seqlen_k": 1, "head_dim": 8}
    job, _ = store.jobs.submit(JobRequest.from_dict({"arch": arch, "workloads": [shape]}))
    return job.id


def fleet(place: str) -> dict[str, Check]:
    seen = checks_fleet.look(place)
    assert seen is not None
    found = checks_fleet.fleet(seen)
    levels(found)
    return {c.name: c for c in found}


def test_an_empty_database_has_nothing_amiss(place: str) -> None:
    found = fleet(place)
    assert set(found) == {"fleet"}
    assert "workers alive: none" in found["fleet"].seen


def test_a_database_without_tables_is_not_looked_at(tmp_path: Path) -> None:
    assert checks_fleet.look(str(tmp_path / "missing.db")) is None
    assert not list(tmp_path.iterdir())


def test_a_job_without_workers_says_which_to_start(place: str) -> None:
    with Store.open(place) as store:
        submit(store, "sm_90a")
        submit(store, "auto")
        found = fleet(place)
        assert {n for n, c in found.items() if c.level is Level.FAIL} == {
            "worker [control]",
            "worker [measure.sm_90a]",
            "worker [measure.auto]",
        }
        assert all("`flashtune up`" in c.next_step for c in found.values() if c.level is Level.FAIL)  # it is SQLite
        store.fleet.register(worker("a", ("control",)))
        store.fleet.register(worker("b", ("measure",), named("fake")))
        found = fleet(place)
        assert set(found) == {"fleet", "worker [measure.sm_90a]"}  # the other takes what there is
        store.fleet.register(worker("c", ("measure",)))
        assert set(fleet(place)) == {"fleet"}
        assert "2 queued" in fleet(place)["fleet"].seen
        assert "compile 0, measure 2, control 1" in fleet(place)["fleet"].seen


def test_dead_workers_do_not_count(place: str) -> None:
    with Store.open(place) as store:
        submit(store, "sm_90a")
        store.fleet.register(worker("a", ("control", "measure")))
        assert set(fleet(place)) == {"fleet"}
        silent = datetime.now(UTC) - timedelta(minutes=5)
        store.fleet.register(replace(worker("b", ("control", "measure")), heartbeat_at=silent))
        for known in store.fleet.workers(alive_only=True):
            store.fleet.stop(known.id)
        assert set(fleet(place)) == {"fleet", "worker [control]", "worker [measure.sm_90a]"}


@pytest.mark.service
def test_work_planned_for_a_class_that_left_is_named_with_what_differs(schema: URL) -> None:
    place = schema.render_as_string(hide_password=False)
    fake, newer = named("fake"), replace(TOOLS, driver="590.2", cutlass_dsl="4.9.0")
    with Store.open(place) as store:
        control, first = worker("a", ("control",), fake), worker("b", ("measure",), fake)
        for known in (control, first):
            store.fleet.register(known)
        submit(store, "fake")
        Dispatcher(store).tick()  # binds it to the class of b, and plans
        (stage,) = {stage for stage, _ in store.work.ready()}
        store.fleet.register(worker("c", ("compile",), fake))
        assert set(fleet(place)) == {"fleet"}
        store.fleet.stop(first.id)
        for known in store.fleet.workers(alive_only=True):
            if "compile" in known.roles:
                store.fleet.stop(known.id)
        found = fleet(place)
        name = f"worker [{stage}.fake]"
        assert set(found) == {"fleet", name}
        command = "--role measure" if stage == "measure" else "--role compile --arch fake"
        assert f"`flashtune worker {command}`" in found[name].next_step
        store.fleet.register(worker("d", (stage,), fake, newer))
        found = fleet(place)
        assert set(found) == {"fleet", name}
        old, new = ("580.1", "590.2") if stage == "measure" else ("4.8.1", "4.9.0")
        assert f"on {'b' if stage == 'measure' else 'c'}: " in found[name].seen
        assert old in found[name].seen
        assert f"d ({'driver' if stage == 'measure' else 'flash'}" in found[name].seen
        assert new in found[name].seen
        assert "cancel" in found[name].next_step


def seen_with(*workers: WorkerInfo) -> checks_fleet.Fleet:
    return checks_fleet.Fleet(embedded=False, workers=list(workers), jobs={}, ready={}, waiting=[])


def test_machines_of_one_class_are_fine() -> None:
    two = (worker("a", ("measure",)), worker("b", ("measure",), replace(H200, uuid="GPU-2", device_index=1)))
    (found,) = checks_fleet.versions(seen_with(*two, worker("c", ("compile",))), H200, TOOLS)
    assert found.level is Level.OK
    assert "sm_90a" in found.seen


def test_differing_classes_are_told_with_what_differs_and_nothing_else() -> None:
    capped = worker("b", ("measure",), replace(H200, power_cap_w=600), replace(TOOLS, driver="590.2"))
    (found,) = checks_fleet.versions(seen_with(worker("a", ("measure",)), capped), H200, TOOLS)
    assert (found.name, found.level) == ("versions [sm_90a]", Level.WARN)
    for part in ("580.1", "590.2", "700 W", "600 W", "2 classes"):
        assert part in found.seen
    assert "torch" not in found.seen
    assert "power cap, driver" in found.next_step


def test_this_machine_is_compared_with_the_others_of_its_architecture() -> None:
    others = seen_with(worker("a", ("measure",)))
    mine = replace(TOOLS, torch="2.11.0")
    (found,) = checks_fleet.versions(others, H200, mine)
    assert found.level is Level.WARN
    assert f"{socket.gethostname()} (this machine): torch 2.11.0" in found.seen
    assert [c.level for c in checks_fleet.versions(others, named("cpu"), mine)] == [Level.OK]  # another architecture
    assert [c.level for c in checks_fleet.versions(seen_with(), H200, mine)] == [Level.OK]


def test_a_compiler_whose_objects_fit_nobody_is_told() -> None:
    stray = worker("c", ("compile",), H200, replace(TOOLS, cutlass_dsl="4.7.0"))
    (found,) = checks_fleet.versions(seen_with(worker("a", ("measure",)), stray), H200, TOOLS)
    assert found.level is Level.WARN
    assert "c compiles with" in found.seen
    assert "4.7.0" in found.seen
    assert "4.8.1" in found.next_step


# The shared folder


def test_a_folder_is_shared_if_the_other_hosts_markers_are_there(tmp_path: Path) -> None:
    others = [worker("a", ("compile",)), worker("b", ("measure",)), worker("c", ("control",))]
    (found,) = checks_service.artifact_folder(tmp_path, others)
    assert found.level is Level.WARN
    assert "a, b" in found.seen
    assert "flashtune doctor" in found.next_step
    here = tmp_path / checks_service.MARKERS / socket.gethostname()
    assert socket.gethostname() in here.read_text()
    for host in ("a", "b"):  # as their doctors do
        (here.parent / host).write_text("")
    (found,) = checks_service.artifact_folder(tmp_path, others)
    assert (found.level, "shared with a, b" in found.seen) == (Level.OK, True)
    assert {p.name for p in here.parent.iterdir()} == {"a", "b", socket.gethostname()}  # nothing half-written
    (found,) = checks_service.artifact_folder(tmp_path, [])
    assert found.level is Level.OK


def test_a_folder_that_is_missing_is_not_made(tmp_path: Path) -> None:
    (found,) = checks_service.artifact_folder(tmp_path / "mount", [])
    assert found.level is Level.FAIL
    assert str(tmp_path / "mount") in found.next_step
    assert not list(tmp_path.iterdir())


# The service


@contextlib.contextmanager
def serving(store: Store) -> Iterator[str]:
    with Server(store, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        yield server.url
        server.stop()
        thread.join(timeout=20)


def service(url: str, key: str | None = None) -> Check:
    settings = replace(Settings.from_env({}), url=url, api_key=key)
    (found,) = checks_service.service(settings)
    levels([found])
    return found


def test_the_service_takes_the_right_key_only(place: str) -> None:
    with Store.open(place) as store:
        with serving(store) as url:
            assert (service(url).level, "no key is needed" in service(url).seen) == (Level.OK, True)
        _, reader = store.keys.create("reader", ["read"])
        _, other = store.keys.create("other", ["submit"])
        with serving(store) as url:
            assert service(url, reader).level is Level.OK
            assert "may not read" in service(url, other).seen
            assert "wants a key" in service(url).seen
            wrong = service(url, "ft_" + "x" * 43)
            assert wrong.level is Level.FAIL
            assert "FLASHTUNE_API_KEY" in wrong.next_step
            assert "xxx" not in wrong.seen + wrong.next_step


@contextlib.contextmanager
def answering(status: int, headers: dict[str, str]) -> Iterator[tuple[str, list[Any]]]:
    """Serve this status for every path; give the URL and the keys that were sent."""
    keys: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", keys
        server.shutdown()


def test_a_service_that_is_not_ready_fails_and_is_given_no_key() -> None:
    with answering(503, {}) as (url, keys):
        found = service(url, "ft_secret")
    assert (found.level, "database" in found.seen) == (Level.FAIL, True)
    assert keys == [None]


def test_a_redirect_is_not_followed() -> None:
    with answering(200, {}) as (elsewhere, keys), answering(302, {"Location": elsewhere}) as (url, _):
        found = service(url, "ft_secret")
    assert found.level is Level.FAIL
    assert "302" in found.seen
    assert keys == []


# The GPU


@pytest.mark.parametrize(("modes", "level"), [(("Enabled", "Disabled"), Level.WARN), (("Enabled",) * 2, Level.OK)])
def test_a_driver_that_does_not_stay_loaded_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: tuple[str, ...], level: Level
) -> None:
    lines = "".join(f"{i}, {mode}\\n" for i, mode in enumerate(modes))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (found,) = checks.persistence()
    assert found.level is level
    assert ("GPU 1:" in found.seen) == (level is Level.WARN)
