"""What is forgotten and what never is, on both databases."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from db.store import Store
from db.values import Keep
from tests.contract.service import (
    CLASS,
    COMPILE,
    bind,
    claim,
    column,
    config,
    events_of,
    finish,
    good,
    plan,
    request,
    started,
)
from tests.contract.test_backup import rows
from tests.contract.test_fleet_store import WORKER
from tests.contract.test_store import raw_connection, store, url  # noqa: F401
from tuner.artifact import Artifact
from tuner.compile import Compiled
from tuner.target import named
from tuner.trial import Resources, TrialStatus
from workers.dispatch import Dispatcher
from workers.heart import Heart

# ruff: noqa: F811

COMPILED = Compiled(TrialStatus.OK, 2.5, "", Resources(168, 0, 1024, 2048))


def days(count: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=count)


def test_what_ended_long_ago_goes_but_for_the_answer_and_the_last_event(store: Store, url: str) -> None:
    job, (study_id,) = started(store, 1, configs=4)
    finish(store, study_id, variant=2)
    before = rows(url)
    assert store.prune(Keep(), days(29.9)) == {}
    assert rows(url) == before
    events = events_of(store, url, job.id)
    assert store.prune(Keep(), days(30.1)) == {"events": len(events) - 1, "work": 4}
    assert column(url, "SELECT config_key FROM work") == [config(2).key]
    left = events_of(store, url, job.id)
    assert left == events[-1:]
    assert left[0].kind == "done"
    after = rows(url)
    assert {t for t in before if before[t] != after[t]} == {"events", "work"}
    assert store.prune(Keep(), days(30.1)) == {}
    answered = store.jobs.get(job.id).items[0]
    assert (answered.state, answered.tuned and answered.tuned.config) == ("done", config(2))


def test_what_a_live_job_needs_stays_however_old_it_is(store: Store, url: str) -> None:
    started(store, 1, 2, configs=2)
    known, (shared,) = started(store, 3, configs=2)
    finish(store, shared)
    bind(store, store.jobs.submit(request(3, 4))[0])  # live, with an item that the first job's study answers
    before = rows(url)
    gone = store.prune(Keep(), days(400))
    assert set(gone) == {"events"}
    assert {r for t, found in rows(url).items() if t != "events" for r in found} == {
        r for t, found in before.items() if t != "events" for r in found
    }
    assert {e.kind for e in events_of(store, url) if e.job_id == known.id} == {"done"}


def test_a_study_whose_work_was_forgotten_goes_on_from_its_trials(store: Store, url: str) -> None:
    job, (study_id,) = started(store, 1, configs=3)
    found = claim(store)
    store.work.commit_trial(found, good(found.config), 2.0)
    held = claim(store)  # by a worker that has not heard yet
    store.jobs.cancel(job.id)
    assert store.prune(Keep(), days(31))["work"] == 2
    store.work.commit_trial(held, good(held.config), 2.0)
    assert store.prune(Keep(), days(31)) == {"work": 1}
    again = bind(store, store.jobs.submit(request(1))[0])
    assert again == [study_id]
    assert len(store.study(study_id).trials()) == 2
    plan(store, study_id, range(3))
    assert claim(store).study_id == study_id


def test_a_call_forgets_a_bounded_number_and_the_next_goes_on(store: Store, url: str) -> None:
    job, _ = started(store, 1, configs=1)
    store.jobs.cancel(job.id)
    with raw_connection(url) as raw:
        for _ in range(1500):
            raw.execute(
                text("INSERT INTO events (job_id, kind, at, data) VALUES (:job, 'trial', :at, '{}')"),
                {"job": job.id, "at": datetime.now(UTC)},
            )
    assert store.prune(Keep(), days(31))["events"] == 1000
    assert store.prune(Keep(), days(31))["events"] == 502  # submitted and bound as well
    assert column(url, "SELECT kind FROM events") == ["cancelled"]


def test_an_object_goes_once_no_work_names_it_and_nobody_publishes_it(store: Store, url: str) -> None:
    ours, other, again = (Artifact.of(f"fake/{n}.o", n.encode()) for n in ("ours", "other", "again"))
    for artifact, data in ((ours, b"ours"), (other, b"other"), (again, b"again")):
        store.artifacts_put(artifact.sha256, data)
    started(store, 1, configs=1, stage="compile")
    store.work.commit_compiled(claim(store, stage="compile"), COMPILED, [ours])
    with raw_connection(url) as raw:
        raw.execute(text("UPDATE artifacts SET created_at = :at"), {"at": days(-31).strftime("%Y-%m-%d %H:%M:%S.%f")})
    store.artifacts_put(again.sha256, b"again")  # as a compiler does before it names it
    assert store.prune(Keep()) == {"artifacts": 1}
    assert [store.artifacts_get(a.sha256) for a in (ours, other, again)] == [b"ours", None, b"again"]


def test_silent_workers_go_unless_they_hold_something(store: Store) -> None:
    now = datetime.now(UTC)
    for name, seen in (("gone", 8), ("holds", 8), ("lately", 6)):
        store.fleet.register(replace(WORKER, id=name, heartbeat_at=now - timedelta(days=seen)))
    started(store, 1, configs=1)
    claim(store, "holds")
    assert store.prune(Keep()) == {"workers": 1}
    assert {w.id for w in store.fleet.workers()} == {"holds", "lately"}
    assert [w.id for w in store.fleet.workers(limit=1)] == ["holds"]


def test_a_worker_that_slept_for_days_is_known_again_with_its_next_heartbeat(store: Store) -> None:
    assert not store.fleet.beat("w1")
    with Heart(store, WORKER, lease_s=0.03):
        deadline = datetime.now(UTC) + timedelta(seconds=30)
        while not store.fleet.workers(alive_only=True) and datetime.now(UTC) < deadline:
            pass
    assert [w.id for w in store.fleet.workers(alive_only=True)] == ["w1"]


def test_the_dispatcher_forgets_as_it_was_told(store: Store, url: str) -> None:
    started(store, 1, configs=1)
    (study_id,) = column(url, "SELECT id FROM studies")
    finish(store, str(study_id))
    Dispatcher(store).tick()
    assert len(column(url, "SELECT id FROM events")) > 1
    Dispatcher(store, keep=Keep(records=timedelta(0))).tick()
    assert column(url, "SELECT kind FROM events") == ["done"]


# -- what cannot be read


@pytest.mark.parametrize("broken", ["workload", "settings"])
def test_a_job_of_a_newer_version_is_set_aside_and_the_others_go_on(store: Store, url: str, broken: str) -> None:
    odd, _ = store.jobs.submit(request(1, priority=5))
    even, _ = store.jobs.submit(request(2))
    with raw_connection(url) as raw:
        table, name, where = ("job_items", "workload", "job_id") if broken == "workload" else ("jobs", "request", "id")
        (stored,) = raw.scalars(text(f"SELECT {name} FROM {table} WHERE {where} = '{odd.id}'"))

        document = json.loads(stored) if isinstance(stored, str) else stored
        document.update({"warp": 9} if broken == "workload" else {"settings": {**document["settings"], "warp": 9}})
        changed = text(f"UPDATE {table} SET {name} = :new WHERE {where} = '{odd.id}'")
        raw.execute(changed, {"new": json.dumps(document)})
    now = datetime.now(UTC)
    worker = replace(WORKER, class_key=CLASS, compile_key=COMPILE, heartbeat_at=now, started_at=now)

    store.fleet.register(replace(worker, target=named("fake")))
    Dispatcher(store).tick()
    assert store.jobs.get(even.id).state == "running"
    failed = store.jobs.get(odd.id)
    assert (failed.state, failed.items[0].state) == ("failed", "failed")
    assert "warp" in failed.items[0].error
    assert "upgrade flashtune if a newer one wrote it" in failed.items[0].error
    assert failed.items[0].workload["batch"] == 1
