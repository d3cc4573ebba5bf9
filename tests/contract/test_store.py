"""The store's contract, on SQLite and on PostgreSQL alike.

PostgreSQL is taken from FLASHTUNE_TEST_POSTGRES, by default the database ``test`` on this machine;
every test has a schema of its own there, dropped at the end.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier
from typing import IO, Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.command import downgrade, upgrade
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, func, inspect, make_url, select, text, update
from sqlalchemy.exc import OperationalError

from db import engine as engines
from db import migrations
from db.models import Base, StudyModel, TunedConfigModel
from db.store import Store, StudyHandle
from tuner.config import Config
from tuner.errors import InputError, StorageError
from tuner.families import load
from tuner.families.joint import Joint
from tuner.spec import StudySettings, StudySpec
from tuner.target import Target, Toolchain
from tuner.trial import Finalist, Measurement, Resources, Trial, TrialStatus, TunedConfig, Verdict, Verification
from tuner.workload import Workload

POSTGRES = os.environ.get("FLASHTUNE_TEST_POSTGRES", "postgresql+psycopg://127.0.0.1:5432/test")
SETTINGS = StudySettings(max_trials=7, margin=0.03)
TARGET = Target("NVIDIA H200", "sm_90a", 132, power_cap_w=700, device_index=1, uuid="GPU-1f")
TOOLCHAIN = Toolchain(driver="580.1", torch="2.13.0", python="3.11")
WORKLOAD = Workload.from_dict(
    {"batch": 1, "heads_q": 4, "heads_kv": 2, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64, "pattern": "causal"}
)
SPEC = StudySpec(WORKLOAD, TARGET, TOOLCHAIN, "graph", ("fake/1", "flex_cpu/2"))


def config(tile: int) -> Config:
    return Config.make("fake", 1, tile_m=tile, swap=True, mode="a-b.1")


def ok(tile: int, ratio: float = 1.5) -> Trial:
    measured = Measurement("graph", (10.125, 1e-9, 0.1 + 0.2), (15.0, 2e17, 1 / 3), ratio, 10.125)
    return Trial(config(tile), TrialStatus.OK, "", 1.25, 2.5, Resources(168, 0, 227 << 10, 1), None, measured)


def answer(tile: int = 128, verdict: Verdict = Verdict.PUBLISHED) -> TunedConfig:
    finals = (Finalist(config(tile), 10.5, 1.25, 1.2, 1.3, (10.5, 10.25), True),)
    return TunedConfig(
        config=config(tile),
        default=Config.make("fake", 1),
        verdict=verdict,
        speedup=1.25,
        low=1.2,
        high=float("inf"),
        confidence=0.95,
        margin=0.02,
        ties=(config(64), config(96)),
        finalists=finals,
        verification=Verification(1e-3, 2e-3, 1e-3, 2e-3, 3, 1 << 60, True),
        reason="faster 'by far' \N{SNOWMAN}",
        rounds=40,
        rounds_dropped=2,
        extras={"block_size": [128, 64], "nested": {"nan": "nan"}},
    )


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.service)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/deep/er/flash tune#%1.db"
        return
    schema = f"flashtune_test_{uuid.uuid4().hex}"
    server = create_engine(POSTGRES, isolation_level="AUTOCOMMIT", connect_args={"connect_timeout": 3})
    try:
        connection = server.connect()
    except OperationalError as e:
        if "refused" not in str(e) and "timeout" not in str(e):
            raise
        pytest.skip(f"no PostgreSQL answers at {server.url}: start one, or set FLASHTUNE_TEST_POSTGRES")
    connection.execute(text(f"CREATE SCHEMA {schema}"))
    yield f"{POSTGRES}?options=-csearch_path%3D{schema}"
    connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    connection.close()
    server.dispose()


@contextmanager
def raw_connection(url: str) -> Iterator[Connection]:
    """Look at the tables, or change them, behind the store's back."""
    engine = create_engine(url)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


@contextmanager
def again(store: Store, url: str, study: StudyHandle) -> Iterator[StudyHandle]:
    """Close everything and read the study from a fresh connection."""
    store.close()
    with Store.open(url, create=False, read_only=True) as fresh:
        yield fresh.study(study.id)


def test_a_study_comes_back_as_it_was_begun(store: Store, url: str) -> None:
    before = datetime.now(UTC)
    with again(store, url, store.begin_study(SPEC, SETTINGS)) as study:
        spec = StudySpec(study.workload, study.target, study.toolchain, study.policy, study.families)
        assert spec == SPEC
        assert (study.run, study.done, study.tuned(), study.stats()) == (1, False, None, {})
        assert study.settings == SETTINGS.to_dict()
    assert before <= study.created_at <= datetime.now(UTC)
    assert study.created_at.utcoffset() == timedelta(0)


def test_trials_of_every_status_come_back_in_order(store: Store, url: str) -> None:
    nan = Verification(float("nan"), float("inf"), float("-inf"), 0.5, 2, 7, False, "NaN in the output")
    odd = "line\n\"quoted\" 'it' \0 \ud800 \N{PILE OF POO}" + "x" * 100_000
    wanted = [ok(1), replace(ok(2, float("nan")), notes=("compiled again", "")), ok(3, float("inf"))]
    wanted += [Trial(config(20 - i), s, odd, verification=nan) for i, s in enumerate(TrialStatus) if s != "ok"]
    wanted += [Trial(Config.make("flex_cpu", 2), TrialStatus.OK)]
    study = store.begin_study(SPEC, SETTINGS)
    for trial in wanted:
        study.add_trial(trial)
    # as text, where NaN equals NaN and every float has all its digits
    with again(store, url, study) as study:
        assert repr(study.trials()) == repr(wanted)


def test_a_second_trial_of_a_config_replaces_the_first_in_its_place(store: Store) -> None:
    study, other = store.begin_study(SPEC, SETTINGS), store.begin_study(replace(SPEC, policy="eager"), SETTINGS)
    for trial in (ok(1), ok(2), ok(3)):
        study.add_trial(trial)
    other.add_trial(ok(2))
    failed = Trial(config(2), TrialStatus.RUN_CRASH, "died")
    study.add_trial(failed)
    assert study.trials() == [ok(1), failed, ok(3)]
    assert other.trials() == [ok(2)]
    assert {(row.id, row.trials, row.ok) for row in store.studies()} == {(study.id, 3, 2), (other.id, 1, 1)}


def test_begin_goes_on_with_the_newest_run_and_force_makes_another_only_after_an_answer(store: Store) -> None:
    first = store.begin_study(SPEC, SETTINGS)
    later = replace(SETTINGS, max_trials=9)
    assert store.begin_study(SPEC, later, force=True).id == first.id
    assert first.settings == later.to_dict()
    first.finish(answer(), {})
    assert store.begin_study(SPEC, SETTINGS).id == first.id
    assert first.settings == later.to_dict()  # those that it was answered under
    second = store.begin_study(SPEC, SETTINGS, force=True)
    assert (second.run, second.trials(), second.done, first.done) == (2, [], False, True)
    assert second.id != first.id
    assert store.begin_study(SPEC, SETTINGS).id == second.id
    for other in (replace(SPEC, families=("fake/1",)), replace(SPEC, toolchain=Toolchain())):
        assert store.begin_study(other, SETTINGS).run == 1
    assert len(store.studies()) == 4


def test_finish_stores_the_answer_and_the_state(store: Store, url: str) -> None:
    study = store.begin_study(SPEC, SETTINGS)
    study.finish(answer(), {"compile_s": 1.5, "by_status": {"ok": 3}})
    with again(store, url, study) as study:
        assert study.done
        assert study.tuned() == answer()
        assert study.stats() == {"compile_s": 1.5, "by_status": {"ok": 3}}


@pytest.mark.parametrize("broken", ["answer", "stats"])
def test_finish_stores_both_or_neither(store: Store, broken: str) -> None:
    study = store.begin_study(SPEC, SETTINGS)
    tuned = replace(answer(), extras={"bad": object()}) if broken == "answer" else answer()
    with pytest.raises(TypeError, match="not JSON serializable"):
        study.finish(tuned, {"bad": object()} if broken == "stats" else {})
    assert (study.done, study.tuned(), study.stats(), store.published()) == (False, None, {}, [])


def test_a_reopened_study_keeps_trials_and_answer_and_publishes_a_new_version(store: Store) -> None:
    study = store.begin_study(SPEC, SETTINGS)
    study.add_trial(ok(1))
    study.finish(answer(64), {"n": 1})
    study.reopen(replace(SETTINGS, max_trials=99))
    assert not study.done
    assert study.settings["max_trials"] == 99
    assert store.studies()[0].finished_at is None
    assert (study.trials(), study.tuned()) == ([ok(1)], answer(64))
    assert store.begin_study(SPEC, SETTINGS, force=True).id == study.id
    study.finish(answer(96), {"n": 2})
    assert (study.done, study.tuned(), study.stats()) == (True, answer(96), {"n": 2})
    assert [(p.version, p.tuned) for p in store.published()] == [(2, answer(96))]


def test_the_incumbent_is_the_answer_of_the_newest_earlier_done_run(store: Store) -> None:
    runs = []
    for tile in (32, 64, 96):
        runs.append(store.begin_study(SPEC, SETTINGS, force=True))
        runs[-1].finish(answer(tile), {})
    fourth = store.begin_study(SPEC, SETTINGS, force=True)
    assert [run.incumbent() for run in (*runs, fourth)] == [None, config(32), config(64), config(96)]
    runs[2].reopen(SETTINGS)
    assert fourth.incumbent() == config(64)
    assert store.begin_study(replace(SPEC, policy="eager"), SETTINGS).incumbent() is None


def test_studies_are_listed_newest_first_with_what_came_of_them(store: Store) -> None:
    specs = [replace(SPEC, workload=WORKLOAD.with_(batch=b)) for b in (1, 2, 3)]
    first, second, third = (store.begin_study(spec, SETTINGS) for spec in specs)
    first.finish(answer(64, Verdict.KEPT_DEFAULT), {})
    rows = store.studies()
    assert [(r.id, r.workload.batch, r.state) for r in rows] == [
        (third.id, 3, "running"),
        (second.id, 2, "running"),
        (first.id, 1, "done"),
    ]
    assert (rows[2].verdict, rows[2].config, rows[2].speedup) == (Verdict.KEPT_DEFAULT, config(64), 1.25)
    assert (rows[0].verdict, rows[0].config, rows[0].speedup, rows[0].finished_at) == (None, None, None, None)
    assert rows[2].finished_at is not None
    assert rows[2].finished_at >= rows[2].created_at == first.created_at
    assert (rows[0].target, rows[0].policy, rows[0].run) == (TARGET, "graph", 1)
    assert store.studies(limit=2) == rows[:2]
    with pytest.raises(InputError, match="limit is 0"):
        store.studies(limit=0)


def wrong(tile: int) -> Trial:
    return replace(ok(tile), status=TrialStatus.INCORRECT, error="relative error 1", measurement=None)


def test_a_withdrawn_answer_its_trial_and_the_record_change_together(store: Store) -> None:
    study = store.begin_study(SPEC, SETTINGS)
    study.add_trial(ok(128))
    study.finish(answer(128), {"n": 1})
    mark = store.published_mark()
    assert study.withdraw(answer(128), wrong(128), answer(96), {"why": "wrong"})
    assert (study.trials(), study.tuned(), study.done) == ([wrong(128)], answer(96), True)
    assert study.stats() == {"n": 1, "withdrawn": [{"why": "wrong"}]}
    assert [(p.version, p.tuned) for p in store.published()] == [(2, answer(96))]
    assert store.published_mark() != mark  # or nobody who keeps answers would look again
    assert study.withdraw(answer(96), wrong(96), answer(64), {"why": "too"})
    assert study.stats()["withdrawn"] == [{"why": "wrong"}, {"why": "too"}]


def test_an_answer_that_is_another_by_now_is_not_withdrawn(store: Store) -> None:
    study = store.begin_study(SPEC, SETTINGS)
    study.add_trial(ok(128))
    study.finish(answer(96), {"n": 1})
    assert not study.withdraw(answer(128), wrong(128), answer(64), {"why": "wrong"})
    assert (study.trials(), study.tuned(), study.stats()) == ([ok(128)], answer(96), {"n": 1})


def test_a_withdrawal_that_fails_halfway_changes_nothing(store: Store) -> None:
    study = store.begin_study(SPEC, SETTINGS)
    study.add_trial(ok(128))
    study.finish(answer(128), {"n": 1})
    with pytest.raises(TypeError):
        study.withdraw(answer(128), wrong(128), replace(answer(96), extras={"no": {1, 2}}), {"why": "wrong"})
    assert (study.trials(), study.tuned(), study.stats()) == ([ok(128)], answer(128), {"n": 1})
    assert [p.version for p in store.published()] == [1]


def test_an_older_answer_stays_older_when_it_is_withdrawn(store: Store) -> None:
    older = store.begin_study(SPEC, SETTINGS)
    older.finish(answer(128), {})
    newer = store.begin_study(SPEC, SETTINGS, force=True)
    newer.finish(answer(96), {})
    assert older.withdraw(answer(128), wrong(128), answer(64), {})
    assert [(p.version, p.tuned) for p in store.published()] == [(2, answer(96))]
    found = store.answer(older)
    assert found is not None
    assert (found.version, found.tuned, found.study_id) == (1, answer(64), older.id)


def test_published_has_the_newest_version_of_each_answer(store: Store) -> None:
    twin = replace(SPEC, families=("fake/1",))  # other families, the same question
    for spec, tile in ((SPEC, 64), (twin, 96), (replace(SPEC, policy="eager"), 32)):
        store.begin_study(spec, SETTINGS).finish(answer(tile), {})
    long = Workload.from_dict(  # about 7 kB of key: more than a PostgreSQL B-tree takes
        {**WORKLOAD.to_dict(), "seqlen_q": 4_501_500, "seqlen_k": 4_501_500}
        | {"pattern": f"document(lengths={[*range(3000, 1, -1), 1]})"}
    )
    store.begin_study(replace(SPEC, workload=long), SETTINGS).finish(answer(16), {})
    found = store.published(workload_key=WORKLOAD.key)
    assert [(p.policy, p.version, p.tuned) for p in found] == [("eager", 1, answer(32)), ("graph", 2, answer(96))]
    assert {(p.workload, p.target, p.toolchain) for p in found} == {(WORKLOAD, TARGET, TOOLCHAIN)}
    assert found[1].study_id == store.begin_study(twin, SETTINGS).id
    assert abs((datetime.now(UTC) - found[1].published_at).total_seconds()) < 60
    assert [p.tuned for p in store.published(workload_key=long.key)] == [answer(16)]
    assert sorted(p.version for p in store.published()) == [1, 1, 2]
    assert store.published(workload_key="w1|nothing") == []


def test_a_study_is_found_by_its_id_or_the_beginning_of_it(store: Store, url: str) -> None:
    first, second = (store.begin_study(replace(SPEC, policy=p), SETTINGS) for p in ("graph", "eager"))
    with raw_connection(url) as raw:
        for study, new in ((first, "abc100000000"), (second, "abc200000000")):
            raw.execute(update(StudyModel).where(StudyModel.id == study.id).values(id=new))
    assert store.study("abc100000000").policy == "graph"
    assert store.study(" ABC2 ").policy == "eager"
    with pytest.raises(InputError, match=r"'abc'.*abc100000000, abc200000000.*flashtune studies"):
        store.study("abc")
    for missing in ("abc3", "", "%", "abc_", "abc1000000001", "x\0"):
        with pytest.raises(InputError, match="flashtune studies") as caught:
            store.study(missing)
        assert repr(missing) in str(caught.value)


def test_a_study_deleted_meanwhile_is_said(store: Store, url: str) -> None:
    study = store.begin_study(SPEC, SETTINGS)
    with raw_connection(url) as raw:
        raw.execute(text("DELETE FROM studies"))
    with pytest.raises(StorageError, match=f"study {study.id} is no longer there"):
        study.add_trial(ok(1))


# -- several processes: each runs a function of this file and talks in lines


def child(function: str, url: str) -> subprocess.Popen[str]:
    code = "import runpy, sys; runpy.run_path(sys.argv[1])[sys.argv[2]](sys.argv[3])"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", code, __file__, function, url]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def open_and_begin_when_told(url: str) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    with Store.open(url) as store:
        study = store.begin_study(SPEC, SETTINGS, force=True)
        print(study.id, study.run, flush=True)


def add_trials_for_ever(url: str) -> None:
    study = Store.open(url).begin_study(SPEC, SETTINGS)
    for tile in itertools.count():
        study.add_trial(ok(tile))
        print(tile, flush=True)


def at_once(url: str, count: int = 4) -> set[str]:
    children = [child("open_and_begin_when_told", url) for _ in range(count)]
    for process in children:
        assert pipe(process.stdout).readline() == "ready\n"
    for process in children:
        pipe(process.stdin).write("go\n")
        pipe(process.stdin).flush()
    answers = {process.communicate(timeout=60)[0] for process in children}
    assert [process.returncode for process in children] == [0] * count
    return answers


def test_processes_that_open_a_fresh_database_at_once_share_one_study(url: str) -> None:
    begun = at_once(url)
    with Store.open(url) as store:
        assert begun == {f"{row.id} 1\n" for row in store.studies()}
        assert len(begun) == 1
        store.begin_study(SPEC, SETTINGS).finish(answer(), {})
        begun = at_once(url)
        assert begun == {f"{store.studies()[0].id} 2\n"}
        assert len(store.studies()) == 2


def test_connections_that_begin_and_finish_at_once_neither_collide_nor_share_a_version(store: Store, url: str) -> None:
    barrier = Barrier(4)

    def worker(number: int) -> list[str]:
        ids = []
        with Store.open(url) as own:
            mine = own.begin_study(replace(SPEC, families=(f"fake/{number}",)), SETTINGS)
            for batch in range(2, 8):
                barrier.wait(timeout=30)
                ids.append(own.begin_study(replace(SPEC, workload=WORKLOAD.with_(batch=batch)), SETTINGS).id)
                barrier.wait(timeout=30)
                mine.finish(answer(batch), {})
        return ids

    with ThreadPoolExecutor(4) as pool:
        begun = list(pool.map(worker, range(4)))
    assert begun[0] == begun[1] == begun[2] == begun[3]
    assert len(store.studies()) == 6 + 4
    with raw_connection(url) as raw:
        versions = raw.scalars(select(TunedConfigModel.version)).all()
    assert len(set(versions)) == 4  # each study kept only its last
    assert max(versions) == 6 * 4


def test_a_killed_process_loses_nothing_that_was_acknowledged(url: str) -> None:
    with child("add_trials_for_ever", url) as process:
        said = [pipe(process.stdout).readline() for _ in range(30)]
        process.kill()
        said += pipe(process.stdout).readlines()
    assert process.returncode == -9
    done = len([line for line in said if line.endswith("\n")])
    with Store.open(url, create=False) as store:
        study = store.begin_study(SPEC, SETTINGS)
        stored = study.trials()
        assert stored == [ok(tile) for tile in range(len(stored))]
        assert done <= len(stored) <= done + 1  # the last may have been stored and not yet said
        assert (study.run, study.done, len(store.studies())) == (1, False, 1)
        study.add_trial(ok(len(stored)))
        assert len(study.trials()) == len(stored) + 1


# -- the schema


def test_the_models_and_the_migrations_agree(store: Store, url: str) -> None:
    options: dict[str, Any] = {"compare_type": True, "compare_server_default": True}
    with raw_connection(url) as raw:
        assert compare_metadata(MigrationContext.configure(raw, opts=options), Base.metadata) == []


def test_the_schema_can_be_taken_down_and_built_again(store: Store, url: str) -> None:
    with raw_connection(url) as raw:
        downgrade(migrations.config(raw), "base")
        assert inspect(raw).get_table_names() == ["alembic_version"]
        upgrade(migrations.config(raw), "head")
        assert set(inspect(raw).get_table_names()) == {"alembic_version", *Base.metadata.tables}


def test_an_installed_copy_finds_its_migrations(tmp_path: Path) -> None:
    site = tmp_path / "100%d site"
    for package in ("db", "tuner"):
        source = Path(__file__).parents[2] / package
        shutil.copytree(source, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import db, db.store; print(db.__file__, db.store.Store.open('new.db').studies())"
    environ = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == f"{site / 'db' / '__init__.py'} []\n", done.stderr


@pytest.mark.parametrize("versions", [["9999"], ["0001", "77aa"]])
def test_a_newer_schema_is_refused_and_left_alone(store: Store, url: str, versions: list[str]) -> None:
    store.begin_study(SPEC, SETTINGS)
    with raw_connection(url) as raw:
        raw.execute(text("DELETE FROM alembic_version"))
        for version in versions:
            raw.execute(text("INSERT INTO alembic_version VALUES (:v)"), {"v": version})
    for read_only in (False, True):
        with pytest.raises(StorageError, match=r"is newer than this flashtune knows \(0003\); upgrade flashtune") as e:
            Store.open(url, read_only=read_only)
        assert all(version in str(e.value) for version in versions)
    with raw_connection(url) as raw:
        assert sorted(raw.scalars(text("SELECT version_num FROM alembic_version"))) == versions
        assert raw.scalar(select(func.count()).select_from(StudyModel)) == 1


def test_an_older_schema_is_not_upgraded_read_only(store: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "revisions", lambda _: ["0004", "0003", "0002", "0001"])
    with pytest.raises(StorageError, match="older flashtune; open it for writing once"):
        Store.open(url, read_only=True)


def test_tables_of_another_program_are_refused(url: str) -> None:
    with Store.open(url), raw_connection(url) as raw:  # only to have the place made
        downgrade(migrations.config(raw), "0001")
        raw.execute(text("DROP TABLE alembic_version"))
        raw.execute(text("DROP TABLE trials"))
    with pytest.raises(StorageError, match=r"tables of something else \(studies\); choose another database"):
        Store.open(url)
    with raw_connection(url) as raw:
        assert set(inspect(raw).get_table_names()) == {"studies", "tuned_configs"}


def test_missing_tables_are_made_only_when_asked(url: str) -> None:
    with Store.open(url), raw_connection(url) as raw:
        downgrade(migrations.config(raw), "base")
        raw.execute(text("DROP TABLE alembic_version"))
    for read_only in (False, True):
        with pytest.raises(StorageError, match="holds no flashtune tables yet"):
            Store.open(url, create=False, read_only=read_only)
    with Store.open(url) as store:
        assert store.studies() == []


# -- what else goes wrong


def test_read_only_reads_and_refuses_to_write(store: Store, url: str) -> None:
    study = store.begin_study(SPEC, SETTINGS)
    study.add_trial(ok(1))
    with Store.open(url, read_only=True) as reader:
        assert reader.study(study.id).trials() == [ok(1)]
        with pytest.raises(StorageError, match="opened read-only; open it for writing"):
            reader.study(study.id).add_trial(ok(2))
        with pytest.raises(StorageError, match="opened read-only"):
            reader.begin_study(SPEC, SETTINGS)
    assert study.trials() == [ok(1)]


def test_a_lock_held_too_long_is_said_and_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "LOCK_WAIT_S", 0.2)
    with Store.open(url) as store:
        study = store.begin_study(SPEC, SETTINGS)
        with raw_connection(url) as raw:
            sqlite = raw.dialect.name == "sqlite"
            raw.exec_driver_sql("BEGIN IMMEDIATE" if sqlite else "LOCK TABLE trials IN SHARE MODE")
            with pytest.raises(StorageError, match=r"lock.*another process keeps it locked: wait") as caught:
                study.add_trial(ok(1))
        assert "\n" not in str(caught.value)
        assert store.location in str(caught.value)
        assert study.trials() == []
        study.add_trial(ok(2))
        assert study.trials() == [ok(2)]


def test_a_value_that_cannot_be_read_is_said(store: Store, url: str) -> None:
    study = store.begin_study(SPEC, SETTINGS)
    study.finish(answer(), {})
    with raw_connection(url) as raw:
        raw.execute(update(TunedConfigModel).values(tuned={"config": 1}))
        raw.execute(update(StudyModel).values(workload={"batch": 0}))
    for read in (study.tuned, store.studies, store.published, lambda: store.study(study.id)):
        with pytest.raises(
            StorageError, match=r"a value that cannot be read .*; upgrade flashtune .*, or restore a backup"
        ):
            read()


@pytest.mark.parametrize("url", [pytest.param("postgresql", marks=pytest.mark.service)], indirect=True)
def test_a_database_that_the_server_does_not_have(url: str) -> None:
    missing = make_url(url).set(database="flashtune_missing", username="ann", password="hunter2")
    with pytest.raises(StorageError, match="check the URL, and that the server runs") as caught:
        Store.open(missing.render_as_string(hide_password=False))
    assert "FATAL" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert f"ann:***@{missing.host}" in str(caught.value)


NEIGHBOURS_OF = replace(SPEC, families=("fake/1",))


def begun(store: Store, *trials: Trial, target: Target = TARGET, policy: str = "graph", **sizes: Any) -> StudyHandle:
    """A study of another workload, or elsewhere, with trials."""
    spec = replace(NEIGHBOURS_OF, workload=WORKLOAD.with_(**sizes), target=target, policy=policy)
    study = store.begin_study(spec, SETTINGS)
    for trial in trials:
        study.add_trial(trial)
    return study


def test_neighbours_are_the_measured_studies_most_alike(store: Store) -> None:
    near, far = ok(1), ok(2)
    other = Trial(Config.make("sdpa_cpu", 1), TrialStatus.OK, measurement=near.measurement)
    begun(store, far, batch=1024)
    begun(store, near, other, batch=2)
    begun(store, batch=4)  # nothing measured
    begun(store, Trial(config(3), TrialStatus.RUN_CRASH, "died"), batch=8)
    begun(store, ok(4), batch=2, policy="eager")
    begun(store, ok(5), batch=2, target=Target("NVIDIA B200", "sm_100a", 148))
    begun(store, ok(6), batch=2, op="bwd")
    begun(store, ok(7))  # the study itself
    h100 = Target("NVIDIA H100", "sm_90a", 132)
    begun(store, ok(8), target=h100)  # the same workload on another GPU
    found = store.neighbours(NEIGHBOURS_OF)
    assert [(n.workload.batch, n.target.model) for n in found] == [
        (2, "NVIDIA H200"),
        (1, "NVIDIA H100"),
        (1024, "NVIDIA H200"),
    ]
    assert [n.trials for n in found] == [(near,), (ok(8),), (far,)]
    assert store.neighbours(NEIGHBOURS_OF) == found


def test_studies_of_each_direction_are_a_neighbour_of_one_of_both(store: Store) -> None:
    joint = load("fa4_joint_sm90")
    assert isinstance(joint, Joint)
    both = WORKLOAD.with_(op="fwd+bwd")
    spec = replace(SPEC, workload=both, families=("flex_flash_stock/1", f"{joint.name}/{joint.version}"))

    def timed(config: Config, default_us: float, us: float) -> Trial:
        measured = Measurement("graph", (us,), (default_us,), default_us / us, us)
        return Trial(config, TrialStatus.OK, measurement=measured)

    def halves(workload: Workload) -> tuple[Config, Config]:
        return joint.split(joint.first(workload)[0], workload)

    mine, theirs = halves(both)
    begun(store, timed(mine, 100.0, 80.0), timed(Config.make("flex_flash_stock", 1), 100.0, 100.0), op="fwd")
    assert store.neighbours(spec) == []  # one direction says nothing about both
    begun(store, timed(theirs, 250.0, 240.0), op="bwd")
    begun(store, timed(theirs, 250.0, 230.0), op="bwd", policy="eager")
    begun(store, timed(theirs, 250.0, 220.0), op="bwd", batch=2)  # whose forward was not studied
    (found,) = store.neighbours(spec)
    assert (found.workload, found.target) == (both, TARGET)
    assert found.trials == (timed(joint.first(both)[0], 350.0, 320.0),)
    begun(store, timed(mine, 100.0, 90.0), op="fwd", batch=2)
    assert [n.workload.batch for n in store.neighbours(spec)] == [1, 2]
    begun(store, timed(joint.first(both)[0], 700.0, 650.0), op="fwd+bwd", batch=2)
    second = store.neighbours(spec)[1]
    assert second.trials == (timed(joint.first(both)[0], 700.0, 650.0),)  # what was tried together counts instead
    assert all(n.workload.op == "fwd" for n in store.neighbours(replace(spec, workload=WORKLOAD.with_(batch=4))))


def test_another_run_of_the_study_is_no_neighbour_and_the_newest_of_others_counts(store: Store) -> None:
    mine = begun(store, ok(1))
    mine.finish(answer(), {})
    store.begin_study(NEIGHBOURS_OF, SETTINGS, force=True).add_trial(ok(2))
    assert store.neighbours(NEIGHBOURS_OF) == []
    older = begun(store, ok(3), batch=2)
    older.finish(answer(), {})
    spec = replace(NEIGHBOURS_OF, workload=WORKLOAD.with_(batch=2))
    newer = store.begin_study(spec, SETTINGS, force=True)
    assert [n.trials for n in store.neighbours(NEIGHBOURS_OF)] == [(ok(3),)]  # the newer has measured nothing yet
    newer.add_trial(ok(4))
    assert [n.trials for n in store.neighbours(NEIGHBOURS_OF)] == [(ok(4),)]
    # the same workload under another toolchain is one, too
    moved = replace(NEIGHBOURS_OF, toolchain=replace(TOOLCHAIN, driver="590.2"))
    assert store.neighbours(moved)[0].trials == (ok(2),)


@pytest.mark.parametrize(
    ("first", "second", "shared"), [(5.0, 9.0, 9.0), (9.0, 5.0, 9.0), (None, 5.0, None), (5.0, None, None)]
)
def test_a_study_that_a_job_waits_for_keeps_the_longer_of_the_budgets(
    store: Store, url: str, first: float | None, second: float | None, shared: float | None
) -> None:
    study = store.begin_study(SPEC, replace(SETTINGS, max_seconds=first))
    with raw_connection(url) as raw:
        raw.execute(update(StudyModel).values(wanted=True))
    store.begin_study(SPEC, replace(SETTINGS, max_seconds=second, max_trials=3))
    assert (study.settings["max_seconds"], study.settings["max_trials"]) == (shared, SETTINGS.max_trials)
