"""The Celery side without a broker: what it is told, what it refuses, what a dead broker costs."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tuner.errors import InputError
from tuner.target import named, probe, toolchain
from workers.celery_app import HARD_LIMIT_S, SOFT_LIMIT_S, Bells, bell_queue, make_app
from workers.device_lock import lock_device
from workers.identity import class_key, compile_key
from workers.member import Member
from workers.settings import Settings
from workers.tasks import PoolChild

POSTGRES = "postgresql://host/database"
RABBITMQ_PATIENCE_S = 1800  # consumer_timeout, https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    environ = {
        "FLASHTUNE_HOME": str(tmp_path),
        "FLASHTUNE_BROKER_URL": "amqp://tuner:hunter2@127.0.0.1:1/fleet",
        "FLASHTUNE_DATABASE_URL": POSTGRES,
    }
    return Settings.from_env(environ)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def bells_to(settings: Settings, port: int) -> Bells:
    return Bells(make_app(replace(settings, broker_url=f"amqp://tuner:hunter2@127.0.0.1:{port}/fleet")))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_without_a_broker_the_variable_is_named(settings: Settings) -> None:
    with pytest.raises(InputError, match="FLASHTUNE_BROKER_URL"):
        make_app(replace(settings, broker_url=None))
    with pytest.raises(InputError, match="FLASHTUNE_BROKER_URL"):
        Member.find(replace(settings, broker_url=None), "control")


def test_a_broker_url_that_cannot_be_read_keeps_its_password(settings: Settings) -> None:
    with pytest.raises(InputError) as error:
        make_app(replace(settings, broker_url="amqp://tuner:hun/ter2@host/fleet"))
    assert "FLASHTUNE_BROKER_URL" in str(error.value)
    assert "%2F" in str(error.value)
    assert "hun" not in str(error.value)
    assert error.value.__cause__ is None


def test_messages_are_json_and_results_do_not_exist(settings: Settings) -> None:
    for role in ("control", "compile", "measure"):
        app = make_app(settings, Member(role, "control", "name"))
        assert app.conf.accept_content == ["json"]
        assert app.conf.task_serializer == app.conf.result_serializer == app.conf.event_serializer == "json"
        assert type(app.backend).__name__ == "DisabledBackend"


def test_limits_lie_within_what_rabbitmq_allows(settings: Settings) -> None:
    app = make_app(settings, Member("control", "control", "name"))
    assert SOFT_LIMIT_S < HARD_LIMIT_S < RABBITMQ_PATIENCE_S
    assert (app.conf.task_soft_time_limit, app.conf.task_time_limit) == (SOFT_LIMIT_S, HARD_LIMIT_S)
    assert app.conf.broker_transport_options["visibility_timeout"] > HARD_LIMIT_S


def test_queues_are_declared_alike_whatever_the_settings(settings: Settings) -> None:
    """RabbitMQ refuses the second of two declarations that differ, and nodes may have other ticks."""
    for tick_s in (0.05, 2.0, 60.0):
        (queue,) = make_app(replace(settings, tick_s=tick_s), Member("measure", "measure.sm_90a", "n")).conf.task_queues
        assert queue == bell_queue("measure.sm_90a")
    assert bell_queue("measure.sm_90a").queue_arguments["x-queue-type"] == "quorum"


def test_a_pool_child_knows_its_member_and_the_tasks(settings: Settings) -> None:
    """Celery sends the application to its child, a fresh interpreter, in this way."""
    import pickle

    member = Member("measure", "measure.fake", "name", device="GPU-1")
    app: Celery = pickle.loads(pickle.dumps(make_app(settings, member)))
    assert Member(**app.conf.flashtune_member) == member
    app.loader.init_worker()
    assert {t for t in app.tasks if t.startswith("flashtune.")} == {
        "flashtune.compile", "flashtune.measure", "flashtune.tick",
    }  # fmt: skip


def test_a_broker_that_is_away_costs_one_line(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    bells = bells_to(settings, free_port())
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            bells.ring("measure.sm_90a")
    (record,) = caplog.records
    assert "measure.sm_90a" in record.getMessage()
    assert "refused" in record.getMessage()
    assert "hunter2" not in record.getMessage()


@pytest.mark.timeout(30)
def test_a_broker_that_says_nothing_is_not_waited_for(
    settings: Settings, silent_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        bells_to(settings, silent_port).ring("control")
    assert len(caplog.records) == 1


def test_a_bell_is_sent_and_says_nothing_but_which(settings: Settings) -> None:
    app = make_app(replace(settings, broker_url="memory://"))
    Bells(app).ring("compile.sm_90a")
    with app.connection_for_read() as connection:
        message = bell_queue("compile.sm_90a")(connection.default_channel).get()
        assert message is not None
        assert message.headers["task"] == "flashtune.compile"
        assert message.content_type == "application/json"
        assert message.decode()[:2] == [[], {}]


def test_members_are_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [replace(named("sm_90a"), device_index=i, uuid=f"GPU-{i}abc") for i in range(2)]
    monkeypatch.setattr("tuner.target._gpus", lambda: gpus)
    second = Member.find(settings, "measure", device="cuda:1", name="node7-1")
    assert (second.queue, second.device, second.name) == ("measure.sm_90a", "GPU-1abc", "node7-1")
    assert second.key == class_key(gpus[1], toolchain())
    assert Member.find(settings, "measure", device="GPU-0a").device == "GPU-0abc"
    assert Member.find(settings, "measure").device == "GPU-0abc"
    compiler = Member.find(settings, "compile", arch="sm_100", compile_workers=7)
    assert (compiler.queue, compiler.arch) == ("compile.sm_100a", "sm_100a")
    assert compiler.key == compile_key("sm_100a", toolchain())
    monkeypatch.setenv("FLASHTUNE_COMPILE_WORKERS", "3")
    assert compiler.settings().compile_workers == 7
    assert replace(compiler, compile_workers=0).settings().compile_workers == 3
    assert Member.find(settings, "control").queue == "control"


@pytest.mark.parametrize(
    ("role", "options", "said"),
    [
        ("measures", {}, "'measures' does not exist; give one of compile, measure, control"),
        ("compile", {}, "needs --arch"),
        ("compile", {"arch": "sm_42"}, "'sm_42'"),
        ("compile", {"arch": "sm_90a", "device": "cuda:0"}, "--device cuda:0 is for --role measure"),
        ("measure", {"arch": "sm_90a"}, "--arch sm_90a is for --role compile"),
        ("measure", {"device": "cuda:77"}, "'cuda:77' does not exist"),
        ("measure", {"device": "gpu"}, "unknown device 'gpu'"),
        ("measure", {"device": "cpu", "compile_workers": 2}, "--compile-workers 2 is for --role compile"),
        ("control", {"device": "cpu"}, "--device cpu is for --role measure"),
        ("control", {"name": "a b"}, "'a b'"),
        ("control", {"name": "a\n"}, "'a\\n'"),
        ("control", {"name": "x" * 65}, "up to 64"),
    ],
)
def test_options_that_make_no_member(settings: Settings, role: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        Member.find(settings, role, **options)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("database_url", "sqlite:////tmp/flashtune.db", "FLASHTUNE_DATABASE_URL is 'sqlite:////tmp/flashtune.db'"),
        ("broker_url", "memory://", "'memory://', which reaches no other process"),
        ("cache_dir", Path("/dev/null"), "/dev/null is not a folder"),
    ],
)
def test_settings_that_make_no_member(settings: Settings, name: str, value: Any, said: str) -> None:
    with pytest.raises(InputError) as error:
        Member.find(replace(settings, **{name: value}), "control")
    assert said in str(error.value)


def test_a_device_in_use_is_said_and_tried_again(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("HOME", str(tmp_path)), ("DATABASE_URL", f"sqlite:///{tmp_path}/f.db"), ("CACHE_DIR", "")):
        monkeypatch.setenv(f"FLASHTUNE_{name}", value)
    child = PoolChild(make_app(settings, Member("measure", "measure.cpu", "name", device="cpu")))
    (tmp_path / "artifacts").mkdir()
    other = lock_device(tmp_path / "artifacts", probe("cpu"))
    assert other is not None
    with caplog.at_level(logging.ERROR):
        assert not child.open()
        child.bell()
    assert len(caplog.records) == 2
    assert all("is measuring on" in r.getMessage() for r in caplog.records)
    os.close(other)
    assert child.open()
    child.close()


def test_the_celery_side_imports_neither_torch_nor_the_search_nor_the_database() -> None:
    """The pool's parent lives as long as the worker; its child needs all but torch."""
    code = "import sys, workers.tasks; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "celery" in loaded
    assert not {"torch", "cutlass", "optuna", "sqlalchemy", "numpy", "typer"} & loaded
    code = "import sys, workers.tasks, workers.engine, workers.dispatch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "cutlass", "flash_attn", "triton"} & set(done.stdout.split())
