"""From a submission to its end in one process: what waits, what is refused, what fails, and whose turn it is."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from db.values import Job
from tuner.job import JobRequest
from workers import embedded
from workers.settings import Settings

LONG_S = 90.0


def workload(variants: int, **more: Any) -> dict[str, Any]:
    """Return a workload of the fake family: it has as many variants as query heads."""
    return {"batch": 1, "heads_q": variants, "heads_kv": variants, "seqlen_q": 1, "seqlen_k": 1, "head_dim": 8, **more}


def submit(store: Store, *workloads: dict[str, Any], **more: Any) -> Job:
    document = {"arch": "fake", "settings": {"max_trials": 8}, "workloads": list(workloads), **more}
    return store.jobs.submit(JobRequest.from_dict(document))[0]


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not what():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def ended(store: Store, job: Job) -> Job:
    wait_for(lambda: store.jobs.get(job.id).state.ended)
    return store.jobs.get(job.id)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"objects": True, "outcomes": {"2": {"speedup": 1.25}, "3": {"does": "nan"}}}))
    return replace(
        Settings.from_env({"FLASHTUNE_HOME": str(tmp_path)}), fake_script=script, tick_s=0.1, compile_workers=1
    )


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with Store.open(settings.database_url) as opened:
        yield opened


@contextmanager
def service(settings: Settings, store: Store) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=embedded.run, args=(settings, store, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LONG_S)


def test_a_job_ends_with_its_winner_and_a_second_one_is_answered_from_the_database(
    settings: Settings, store: Store
) -> None:
    with service(settings, store):
        first = ended(store, submit(store, workload(6)))
        again = ended(store, submit(store, workload(6)))
    (item,), (known,) = first.items, again.items
    assert item.tuned is not None and known.tuned is not None
    assert item.tuned.config["variant"] == 2
    assert item.tuned.speedup == pytest.approx(1.25, rel=0.01)
    assert (known.study_id, known.tuned) == (item.study_id, item.tuned)
    assert [e.kind for e in store.jobs.events(again.id)] == ["submitted", "item_done", "done"]
    statuses = {e.data["config"]: e.data["status"] for e in store.jobs.events(first.id) if e.kind == "trial"}
    assert len(statuses) == 7 and statuses["variant=3"] == "incorrect"


def test_a_workload_that_nothing_computes_is_refused_with_the_reason_and_the_others_go_on(
    settings: Settings, store: Store
) -> None:
    job = submit(store, workload(4, name="good"), workload(5, name="bad", batch=2), families=["fake"])
    odd = submit(store, workload(4), families=["cudnn"])
    with service(settings, store):
        job, odd = ended(store, job), ended(store, odd)
    assert job.state == "done"
    assert odd.state == "failed" and "cudnn" in odd.items[0].error


def test_a_job_for_a_machine_that_is_not_there_waits_and_can_be_cancelled(settings: Settings, store: Store) -> None:
    waiting = submit(store, workload(4), arch="sm_90a")
    with service(settings, store):
        ended(store, submit(store, workload(4)))
        assert store.jobs.get(waiting.id).state == "queued"
        assert store.jobs.cancel(waiting.id).state == "cancelled"


def test_a_study_whose_default_is_wrong_fails_and_says_so(settings: Settings, store: Store) -> None:
    assert settings.fake_script is not None
    settings.fake_script.write_text(json.dumps({"outcomes": {"stock": {"does": "nan"}}}))
    with service(settings, store):
        job = ended(store, submit(store, workload(3)))
    assert job.state == "failed"
    assert "the default fake does not work here" in job.items[0].error


def test_the_higher_priority_is_served_first(settings: Settings, store: Store) -> None:
    low = [submit(store, workload(6 + n), priority=-5) for n in range(6)]
    high = submit(store, workload(5), priority=5)
    with service(settings, store):
        wait_for(lambda: all(store.jobs.get(j.id).state.ended for j in [*low, high]))
    order = [e.job_id for e in store.jobs.events(limit=10_000) if e.kind == "trial"]
    ends = [e.job_id for e in store.jobs.events(limit=10_000) if e.kind == "done"]
    assert high.id in order[: len(order) // 2] and ends.index(high.id) < len(ends) - 1


def test_a_cancelled_job_stops_and_its_trials_serve_the_next(settings: Settings, store: Store) -> None:
    assert settings.fake_script is not None
    slow = {"outcomes": {str(n): {"sample_s": 0.02} for n in range(40)}}
    settings.fake_script.write_text(json.dumps(slow))
    with service(settings, store):
        job = submit(store, workload(40), settings={"max_trials": 40})
        wait_for(lambda: store.jobs.get(job.id).items[0].trials >= 3)
        store.jobs.cancel(job.id)
        study_id = store.jobs.get(job.id).items[0].study_id
        assert study_id is not None
        kept = {t.config.key for t in store.study(study_id).trials()}
        settings.fake_script.write_text("{}")
        again = submit(store, workload(40), settings={"max_trials": 5})
        done = ended(store, again)
    assert done.items[0].study_id == study_id
    assert kept <= {t.config.key for t in store.study(study_id).trials()}
