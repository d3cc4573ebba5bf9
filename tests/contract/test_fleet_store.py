"""Workers, API keys, messages, compiled objects, and the way from the first schema to this one."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any

import pytest
from alembic.command import downgrade, upgrade
from sqlalchemy import Connection, MetaData, inspect, text

from db import engine as engines
from db import migrations
from db.models import Base
from db.store import Store
from db.values import SILENT_AFTER, WorkerInfo
from tests.contract.service import column, finish, request, started
from tests.contract.test_backup import rows
from tests.contract.test_store import SETTINGS, SPEC, TARGET, TOOLCHAIN, answer, ok, raw_connection, store, url  # noqa: F401
from tuner.errors import InputError, NotFound, Unavailable

# ruff: noqa: F811

NOW = datetime(2026, 6, 1, 12, 30, 15, 123456, tzinfo=UTC)
WORKER = WorkerInfo("w1", "host", 7, ("compile", "measure"), "a.class", "a.compile", TARGET, TOOLCHAIN, NOW, NOW)


# -- workers


def test_a_worker_comes_back_as_it_registered(store: Store) -> None:
    compiler = replace(WORKER, id="w2", target=None, class_key="", roles=("compile",), doing="\0odd \ud800")
    store.fleet.register(WORKER)
    store.fleet.register(compiler)
    assert store.fleet.workers() == [WORKER, replace(compiler, doing="\\0odd \\ud800")]
    again = replace(WORKER, pid=8, started_at=NOW + timedelta(hours=1))
    store.fleet.register(again)
    assert store.fleet.workers()[0] == again
    assert len(store.fleet.workers()) == 2


def test_a_worker_lives_while_it_is_heard_of(store: Store) -> None:
    store.fleet.register(WORKER)
    store.fleet.register(replace(WORKER, id="w2"))
    assert store.fleet.workers(alive_only=True) == []  # both were heard of long ago
    before = datetime.now(UTC)
    store.fleet.beat("w1", "b1: variant=3")
    (alive,) = store.fleet.workers(alive_only=True)
    assert (alive.id, alive.doing, alive.alive()) == ("w1", "b1: variant=3", True)
    assert before <= alive.heartbeat_at <= datetime.now(UTC)
    assert not alive.alive(alive.heartbeat_at + SILENT_AFTER)
    assert alive.alive(alive.heartbeat_at + SILENT_AFTER - timedelta(seconds=1))
    store.fleet.stop("w1")
    stopped = next(w for w in store.fleet.workers() if w.id == "w1")
    assert stopped.stopped_at is not None
    assert (stopped.doing, stopped.alive(), store.fleet.workers(alive_only=True)) == ("", False, [])
    store.fleet.beat("w1")
    assert [w.id for w in store.fleet.workers(alive_only=True)] == ["w1"]


def test_a_heartbeat_of_an_unknown_worker_changes_nothing(store: Store, url: str) -> None:
    started(store, configs=1)
    before = rows(url)
    store.fleet.beat("nobody", held=[1])
    store.fleet.stop("nobody")
    assert rows(url) == before


# -- keys


def test_a_key_is_found_by_its_text_and_kept_as_its_digest_alone(store: Store, url: str) -> None:
    key, shown = store.keys.create("ci", ["submit", "read", "read"], 30)
    assert re.fullmatch(r"ft_[A-Za-z0-9_-]{43}", shown)
    assert (key.name, key.scopes, key.rate_per_minute, key.prefix) == ("ci", ("read", "submit"), 30, shown[:8])
    found = store.keys.find(shown)
    assert found == key
    stored = repr(rows(url))
    assert hashlib.sha256(shown.encode()).hexdigest() in stored
    assert shown[8:] not in stored
    assert shown[3:] not in stored
    store.close()
    if url.startswith("sqlite"):
        path = url.removeprefix("sqlite:///")
        with open(path, "rb") as file:
            content = file.read()
        assert shown[:8].encode() in content
        assert shown[3:].encode() not in content


def test_keys_that_are_none_are_not_found(store: Store) -> None:
    _, shown = store.keys.create("ci", ["read"])
    other = shown[:-1] + ("A" if shown[-1] != "A" else "B")
    for wrong in ("", "ft_", shown[:-1], shown + "x", other, shown.upper(), " " + shown, shown + "\n", "\0", "%"):
        assert store.keys.find(wrong) is None


def test_a_revoked_key_is_not_found_and_stays_revoked(store: Store) -> None:
    assert not store.keys.any()
    key, shown = store.keys.create("ci", ["admin"])
    _, other = store.keys.create("bob", ["read"])
    assert store.keys.any()
    revoked = store.keys.revoke("ci")
    assert revoked.revoked_at is not None
    assert store.keys.find(shown) is None
    assert store.keys.find(other) is not None
    assert store.keys.revoke(key.id[:6]).revoked_at == revoked.revoked_at
    store.keys.revoke("bob")
    assert not store.keys.any()
    assert [k.name for k in store.keys.list()] == ["ci", "bob"]


@pytest.mark.parametrize("ref", ["", "nobody", "%", "_", "a\0", "\ud800"])
def test_a_key_that_is_not_there_cannot_be_revoked(store: Store, ref: str) -> None:
    _, shown = store.keys.create("ci", ["read"])
    with pytest.raises(NotFound, match="no API keys are"):
        store.keys.revoke(ref)
    assert store.keys.find(shown) is not None


def test_a_name_that_was_rotated_means_the_key_that_lives(store: Store) -> None:
    _, old = store.keys.create("ci", ["read"])
    store.keys.revoke("ci")
    _, new = store.keys.create("ci", ["read"])
    assert store.keys.find(new) is not None
    store.keys.revoke("ci")
    assert store.keys.find(old) is None and store.keys.find(new) is None


def test_an_ambiguous_name_revokes_nothing(store: Store) -> None:
    for _ in range(2):
        store.keys.create("ci", ["read"])
    with pytest.raises(NotFound, match="2 API keys are 'ci'"):
        store.keys.revoke("ci")
    assert all(k.revoked_at is None for k in store.keys.list())


@pytest.mark.parametrize(
    ("name", "scopes", "rate", "wrong"),
    [
        ("ci", [], None, "scope ''"),
        ("ci", ["read", "root"], None, "'root'"),
        ("ci", ["Read"], None, "'Read'"),
        ("", ["read"], None, "key name ''"),
        ("  ", ["read"], None, "key name"),
        ("a\nb", ["read"], None, "key name"),
        ("x" * 101, ["read"], None, "key name"),
        ("ci", ["read"], 0, "rate_per_minute is 0"),
        ("ci", ["read"], 10**6 + 1, "rate_per_minute is 1000001"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused(
    store: Store, name: str, scopes: list[str], rate: int | None, wrong: str
) -> None:
    with pytest.raises(InputError, match=wrong):
        store.keys.create(name, scopes, rate)
    assert store.keys.list() == []


def test_admin_may_do_everything_and_others_what_they_are_for(store: Store) -> None:
    admin, _ = store.keys.create("a", ["admin"])
    reader, _ = store.keys.create("r", ["read"])
    assert [admin.allows(s) for s in ("read", "submit", "admin")] == [True] * 3
    assert [reader.allows(s) for s in ("read", "submit", "admin")] == [True, False, False]


def test_the_last_use_of_a_key_is_kept_to_the_minute(store: Store, url: str) -> None:
    before = datetime.now(UTC)
    _, shown = store.keys.create("ci", ["read"])
    store.keys.find(shown)
    (used,) = store.keys.list()
    assert used.last_used_at is not None
    assert before <= used.last_used_at <= datetime.now(UTC)
    seen = rows(url)
    for _ in range(3):
        store.keys.find(shown)
    assert rows(url) == seen


# -- compiled objects


@pytest.mark.parametrize("data", [b"", bytes(range(256)) * 5000], ids=["empty", "1.28 MB"])
def test_objects_come_back_byte_for_byte(store: Store, url: str, data: bytes) -> None:
    digest = hashlib.sha256(data).hexdigest()
    assert store.artifacts_get(digest) is None
    store.artifacts_put(digest, b"damaged on its way")
    store.artifacts_put(digest, data)
    store.close()
    with Store.open(url, read_only=True) as fresh:
        assert fresh.artifacts_get(digest) == data


def test_an_object_that_many_put_at_once_is_kept_once(store: Store, url: str) -> None:
    barrier = Barrier(6)

    def put(_: int) -> None:
        barrier.wait(timeout=30)
        store.artifacts_put("ab" * 32, b"object")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(put, range(6)))
    assert column(url, "SELECT sha256 FROM artifacts") == ["ab" * 32]


# -- from the first schema

FIRST = {"studies", "trials", "tuned_configs"}


@contextmanager
def strict(url: str) -> Iterator[Connection]:
    """Connect with SQLite's foreign keys enforced, as the store does."""
    with raw_connection(url) as raw:
        if raw.dialect.name == "sqlite":
            raw.exec_driver_sql("COMMIT") if raw.connection.in_transaction else None
            raw.exec_driver_sql("PRAGMA foreign_keys=ON")
            assert raw.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
        yield raw


def contents(raw: Connection) -> dict[str, list[dict[str, Any]]]:
    """Return the first schema's tables, by what the database itself says of them."""
    found = MetaData()
    found.reflect(raw, only=sorted(FIRST))
    return {t.name: [dict(r) for r in raw.execute(t.select().order_by(t.c.id)).mappings()] for t in found.sorted_tables}


def test_a_database_of_the_first_schema_is_brought_here_and_back_with_its_data(url: str) -> None:
    with Store.open(url) as store:
        study = store.begin_study(SPEC, SETTINGS)
        study.add_trial(ok(1))
        study.finish(answer(), {"n": 1})
    with raw_connection(url) as raw:
        wanted = contents(raw)
        downgrade(migrations.config(raw), "base")
        upgrade(migrations.config(raw), "0001")
        first = MetaData()
        first.reflect(raw, only=sorted(FIRST))
        for table in first.sorted_tables:
            wanted[table.name] = [{k: v for k, v in row.items() if k in table.c} for row in wanted[table.name]]
            raw.execute(table.insert(), wanted[table.name])
            if raw.dialect.name == "postgresql" and table.name != "studies":
                raw.execute(
                    text(f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), max(id)) FROM {table.name}")
                )
        schema = {t.name: {c.name: str(c.type) for c in t.c} for t in first.sorted_tables}
    assert set(schema) == FIRST
    with Store.open(url) as store:
        kept = store.study(study.id)
        assert (kept.trials(), kept.tuned(), kept.stats(), kept.done) == ([ok(1)], answer(), {"n": 1}, True)
        assert store.fleet.workers() == []
        job, (study_id,) = started(store, 3)
        finish(store, study_id)
        assert store.jobs.get(job.id).state == "done"
        with raw_connection(url) as raw:
            raw.execute(text("DELETE FROM tuned_configs WHERE study_id = :s"), {"s": study_id})
            raw.execute(text("DELETE FROM trials WHERE study_id = :s"), {"s": study_id})
    with strict(url) as raw:
        downgrade(migrations.config(raw), "0001")
        raw.execute(text("DELETE FROM studies WHERE id = :s"), {"s": study_id})
        assert contents(raw) == wanted
        assert set(inspect(raw).get_table_names()) == {"alembic_version", *FIRST}
        again = MetaData()
        again.reflect(raw, only=sorted(FIRST))
        assert {t.name: {c.name: str(c.type) for c in t.c} for t in again.sorted_tables} == schema
    with Store.open(url) as store:
        assert store.study(study.id).tuned() == answer()
    with raw_connection(url) as raw:
        assert set(inspect(raw).get_table_names()) == {"alembic_version", *Base.metadata.tables}


# -- a server that was restarted


@pytest.mark.parametrize("url", [pytest.param("postgresql", marks=pytest.mark.service)], indirect=True)
@pytest.mark.parametrize("idle_s", [0.0, 1e9], ids=["idle", "busy"])
def test_connections_that_the_server_closed_are_replaced(
    url: str, idle_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause the loss is not noticed; in the midst of work one call says to try again, and the next succeeds."""
    monkeypatch.setattr(engines, "PING_AFTER_S", idle_s)
    name = f"flashtune-test-{uuid.uuid4().hex[:12]}"
    with Store.open(f"{url}%20-capplication_name%3D{name}") as store:
        job, _ = store.jobs.submit(request(1))
        with raw_connection(url) as raw:
            mine = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :n"
            assert raw.scalars(text(mine), {"n": name}).all()
        if idle_s:
            with pytest.raises(Unavailable):
                store.jobs.get(job.id)
        assert store.jobs.get(job.id) == job
