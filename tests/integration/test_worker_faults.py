"""One study that a process cannot handle holds up no other, and keeps no lease."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from db.planning import NewWork
from db.store import Store
from tuner.config import Config
from tuner.job import JobRequest
from tuner.target import named, toolchain
from workers.artifacts import open_artifacts
from workers.compile_side import CompileSide
from workers.dispatch import Dispatcher
from workers.heart import Heart
from workers.identity import ROLES, identify
from workers.measure_side import MeasureSide
from workers.settings import Settings

INFO = identify(ROLES, named("fake"), toolchain())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({}))
    return replace(Settings.from_env({"FLASHTUNE_HOME": str(tmp_path)}), fake_script=script, compile_workers=1)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with Store.open(settings.database_url) as opened:
        opened.fleet.register(replace(INFO, heartbeat_at=datetime.now(UTC)))  # INFO may be older than a silence
        yield opened


def bound(store: Store, variants: int) -> str:
    """Submit a workload, let the dispatcher begin its study, and return the study's id."""
    shape = {"batch": 1, "heads_q": variants, "heads_kv": variants, "seqlen_q": 1, "seqlen_k": 1, "head_dim": 8}
    job, _ = store.jobs.submit(JobRequest.from_dict({"arch": "fake", "workloads": [shape]}))
    Dispatcher(store).tick()
    study_id = store.jobs.get(job.id).items[0].study_id
    assert study_id is not None
    return study_id


def forget_plans(settings: Settings, study_id: str, families: str | None = None) -> None:
    """Take all work of a study away, and let it name families of another version of flashtune."""
    with sqlite3.connect(settings.database_url.removeprefix("sqlite:///")) as raw:
        raw.execute("DELETE FROM work WHERE study_id = ?", (study_id,))
        if families is not None:
            raw.execute("UPDATE studies SET families = ? WHERE id = ?", (families, study_id))


Half = type[CompileSide] | type[MeasureSide]


@contextmanager
def half(kind: Half, settings: Settings, store: Store) -> Iterator[tuple[CompileSide | MeasureSide, Heart]]:
    heart = Heart(store, INFO, settings.lease_s)
    made = kind(settings, store, INFO, heart, open_artifacts(settings, store), lambda queue: None, threading.Lock())
    try:
        yield made, heart
    finally:
        made.close()


def test_a_study_that_cannot_be_planned_holds_up_no_other(settings: Settings, store: Store) -> None:
    bad, good = bound(store, 3), bound(store, 4)
    forget_plans(settings, bad, '["from_the_future/7"]')
    forget_plans(settings, good)
    Dispatcher(store).tick()
    assert store.planning.planned(bad).open == 0
    assert store.planning.planned(good).open == 5


@pytest.mark.parametrize("kind", [CompileSide, MeasureSide])
def test_a_config_of_another_version_is_given_back_and_its_lease_is_not_kept(
    settings: Settings, store: Store, kind: Half
) -> None:
    study_id = bound(store, 3)
    forget_plans(settings, study_id)
    stage = "compile" if kind is CompileSide else "measure"
    future = NewWork(Config.make("from_the_future", 7, tile=1), stage, 0)
    assert store.planning.plan(study_id, store.planning.planned(study_id).guard, [future])
    with half(kind, settings, store) as (made, heart):
        made.step()
        assert heart._held == set()
    assert [c.attempts for c in store.work.claim("w", stage=stage, keys=[INFO.class_key, INFO.compile_key])] == [2]


@pytest.mark.parametrize("kind", [CompileSide, MeasureSide])
def test_a_fault_of_ours_leaves_the_lease_to_run_out(
    settings: Settings,
    store: Store,
    kind: Half,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study_id = bound(store, 3)
    forget_plans(settings, study_id)
    stage = "compile" if kind is CompileSide else "measure"
    work = NewWork(Config.make("fake", 1, variant=1), stage, 0)
    assert store.planning.plan(study_id, store.planning.planned(study_id).guard, [work])

    def fault(self: object, study: str) -> None:
        raise ZeroDivisionError(study)

    with half(kind, settings, store) as (made, heart):
        monkeypatch.setattr("workers.studies.Studies.get", fault)
        with pytest.raises(ZeroDivisionError):
            made.step()
        assert heart._held == set()
