"""The HTTP API over a real store: what each route answers, to whom, and what it refuses.

Most tests call the app in this process; streams, chunked bodies and heads go to a real server on a port.
"""

from __future__ import annotations

import json
import logging
import pickle
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from api.http import events, security
from api.http.app import make_app
from api.http.limits import MAX_BODY_BYTES, Rates, Streams
from api.http.problems import Problem
from api.http.server import Server
from db.store import Store
from db.values import SCOPES, JobState, WorkerInfo
from tuner import lookup
from tuner.config import Config
from tuner.errors import InputError, Unavailable
from tuner.job import JobRequest
from tuner.spec import StudySettings, StudySpec
from tuner.target import Target, Toolchain
from tuner.trial import TunedConfig, Verdict
from tuner.workload import Workload

W = {"pattern": "causal", "batch": 2, "heads_q": 8, "heads_kv": 8, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64}
JOB = {"name": "a job", "arch": "fake", "workloads": [W]}
TARGET = Target("NVIDIA H200", "sm_90a", 132, power_cap_w=700)
TOOLCHAIN = Toolchain(driver="580.1", torch="2.13.0", python="3.11")
WORKLOAD = Workload.from_dict(W)
ANSWER = TunedConfig(
    config=Config.make("fake", 1, tile_m=128),
    default=Config.make("fake", 1),
    verdict=Verdict.PUBLISHED,
    speedup=1.25,
    low=1.2,
    high=float("inf"),
    confidence=0.95,
    margin=0.02,
    ties=(),
    finalists=(),
    verification=None,
    reason="faster \N{SNOWMAN}",
    rounds=40,
    rounds_dropped=0,
)
ROOT = Path(__file__).parents[2]
SERVE = [sys.executable, "-P", "-m", "api.cli", "serve"]
UNKNOWN_KEY = "ft_" + "x" * 43


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "flashtune.db")) as store:
        yield store


def client_of(store: Store, **options: Any) -> TestClient:
    app = make_app(store, **{"require_key": False, **options})
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


@pytest.fixture
def client(store: Store) -> TestClient:
    return client_of(store)


@pytest.fixture
def server(store: Store) -> Iterator[Server]:
    with Server(store, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            wait_for(lambda: httpx.get(server.url + "/healthz").status_code == 200)
            yield server
        finally:
            server.stop()
            thread.join()


def wait_for(ready: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if ready():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    pytest.fail("did not come about")


def publish(store: Store, workload: Workload = WORKLOAD, policy: str = "graph", **changes: Any) -> None:
    spec = StudySpec(workload, TARGET, TOOLCHAIN, policy, ("fake/1",))
    store.begin_study(spec, StudySettings(), force=True).finish(replace(ANSWER, **changes), {})


def is_problem(response: httpx.Response, status: int, slug: str = "") -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert body["title"] and body["detail"] and body["instance"].startswith("/")
    assert body["type"].startswith("urn:flashtune:problem:" + slug)
    return body


# -- jobs


def test_a_submitted_job_is_stored_and_shown(client: TestClient, store: Store) -> None:
    settings = {"max_trials": 5, "margin": 0.5}
    response = client.post("/v1/jobs", json={**JOB, "priority": 7, "settings": settings})
    assert response.status_code == 202
    shown = response.json()
    job = store.jobs.get(shown["id"])
    assert (job.name, job.arch, job.priority, job.owner) == ("a job", "fake", 7, "")
    assert job.settings == StudySettings(max_trials=5, margin=0.5).to_dict()
    assert [item.workload for item in job.items] == [WORKLOAD.to_dict()]
    assert response.headers["location"] == f"/v1/jobs/{job.id}"
    assert shown == client.get(response.headers["location"]).json() == job.to_dict()
    assert (shown["state"], shown["items"][0]["state"]) == ("queued", "queued")


def test_the_same_key_and_body_make_one_job_and_another_body_none(client: TestClient, store: Store) -> None:
    headers = {"Idempotency-Key": "once"}
    first, again = (client.post("/v1/jobs", json=JOB, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == first.json()
    assert ("idempotent-replayed" in first.headers, again.headers["idempotent-replayed"]) == (False, "true")
    is_problem(client.post("/v1/jobs", json={**JOB, "name": "b"}, headers=headers), 422, "idempotency-conflict")
    assert client.post("/v1/jobs", json=JOB).json()["id"] != first.json()["id"]
    assert len(store.jobs.list().items) == 2
    for bad in ("", "a b", "x" * 256):
        is_problem(client.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": bad}), 422)


def test_fifty_submissions_at_once_make_one_job(server: Server, store: Store) -> None:
    barrier = threading.Barrier(50)

    def submit(_: int) -> tuple[int, str, bool]:
        barrier.wait(timeout=60)
        r = httpx.post(server.url + "/v1/jobs", json=JOB, headers={"Idempotency-Key": "k"}, timeout=60)
        return r.status_code, r.json()["id"], "idempotent-replayed" in r.headers

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(submit, range(50)))
    (job,) = store.jobs.list().items
    assert {(status, id) for status, id, _ in answers} == {(202, job.id)}
    assert sum(not replayed for _, _, replayed in answers) == 1


def test_idempotency_keys_of_two_users_do_not_meet(store: Store) -> None:
    client = client_of(store, require_key=True)
    ids = set()
    for _ in range(2):
        _, text = store.keys.create("same name", ["submit"])
        headers = {"Authorization": f"Bearer {text}", "Idempotency-Key": "k"}
        ids.add(client.post("/v1/jobs", json=JOB, headers=headers).json()["id"])
    assert len(ids) == 2


def test_pages_of_jobs_join_to_the_whole_list(client: TestClient, store: Store) -> None:
    ids = [client.post("/v1/jobs", json={**JOB, "name": str(i)}).json()["id"] for i in range(5)]
    store.jobs.cancel(ids[2])
    pages, url = [], "/v1/jobs?limit=2"
    while url:
        response = client.get(url)
        page = response.json()
        pages.append([job["id"] for job in page["items"]])
        assert ("next" in response.links) == (page["next"] is not None)
        url = response.links.get("next", {}).get("url", "")
    assert pages == [[ids[4], ids[3]], [ids[2], ids[1]], [ids[0]]]
    queued = client.get("/v1/jobs", params={"state": "queued", "limit": 3})
    assert [job["id"] for job in queued.json()["items"]] == [ids[4], ids[3], ids[1]]
    rest = client.get(queued.links["next"]["url"])  # the link keeps the filter
    assert [job["id"] for job in rest.json()["items"]] == [ids[0]]
    for bad in ("limit=0", "limit=201", "limit=x", "state=nope", "after=zz", "page=2", "limit=1&limit=2"):
        is_problem(client.get(f"/v1/jobs?{bad}"), 422)


def test_a_job_is_sent_again_only_if_it_changed(client: TestClient) -> None:
    url = client.post("/v1/jobs", json=JOB).headers["location"]
    tag = client.get(url).headers["etag"]
    for known in (tag, f'"x", W/{tag}', "*"):
        response = client.get(url, headers={"If-None-Match": known})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", tag)
    assert client.get(url, headers={"If-None-Match": '"other"'}).status_code == 200
    client.delete(url)
    changed = client.get(url, headers={"If-None-Match": tag})
    assert (changed.status_code, changed.json()["state"]) == (200, "cancelled")
    assert changed.headers["etag"] != tag


def test_cancelling_twice_is_cancelling_once(client: TestClient, store: Store) -> None:
    url = client.post("/v1/jobs", json=JOB).headers["location"]
    first, again = client.delete(url), client.delete(url)
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json() == again.json() == client.get(url).json()
    assert store.jobs.get(url.rpartition("/")[2]).state is JobState.CANCELLED


# -- events


def test_a_page_of_events_goes_on_where_the_last_ended(client: TestClient, store: Store) -> None:
    url = client.post("/v1/jobs", json=JOB).headers["location"]
    client.delete(url)
    expected = [e.to_dict() for e in store.jobs.events(url.rpartition("/")[2])]
    assert [e["kind"] for e in expected] == ["submitted", "cancelled"]
    whole = client.get(f"{url}/events", headers={"Accept": "application/json"}).json()
    assert whole == {"items": expected, "next": expected[-1]["cursor"]}
    one = client.get(f"{url}/events?follow=false&limit=1").json()
    assert one["items"] == expected[:1]
    rest = client.get(f"{url}/events", params={"follow": "false", "after": one["next"]}).json()
    assert rest["items"] == expected[1:]
    end = client.get(f"{url}/events", params={"follow": "false", "after": rest["next"]}).json()
    assert end == {"items": [], "next": rest["next"]}


def sse(lines: Iterator[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Read events as the WHATWG's specification says: fields up to a blank line, comments left out."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields |= {name: value} if name else {}
        elif fields:
            yield fields["id"], fields["event"], json.loads(fields["data"])
            fields = {}


def test_a_stream_follows_a_job_to_its_end_and_resumes_without_loss(server: Server, store: Store) -> None:
    job, _ = store.jobs.submit(JobRequest.from_dict(JOB))
    url = f"{server.url}/v1/jobs/{job.id}/events"
    with httpx.stream("GET", url, timeout=30) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = sse(response.iter_lines())
        seen = [next(stream)]
        store.jobs.cancel(job.id)  # happens while it is followed
        seen += list(stream)  # and ends the stream
    stored = store.jobs.events(job.id)
    assert seen == [(e.cursor, e.kind, e.to_dict()) for e in stored]
    assert [kind for _, kind, _ in seen] == ["submitted", "cancelled"]
    for resumed in (
        httpx.get(url, headers={"Last-Event-ID": seen[0][0]}),
        httpx.get(url, params={"after": seen[0][0]}),
        httpx.get(url, params={"after": seen[1][0]}, headers={"Last-Event-ID": seen[0][0]}),
    ):
        assert list(sse(iter(resumed.text.splitlines()))) == seen[1:]
    # 204 tells an EventSource not to come back
    assert httpx.get(url, headers={"Last-Event-ID": seen[1][0]}).status_code == 204


def test_a_stream_outlives_a_lost_database_and_says_that_it_is_alive(
    server: Server, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.0)
    job, _ = store.jobs.submit(JobRequest.from_dict(JOB))
    with httpx.stream("GET", f"{server.url}/v1/jobs/{job.id}/events", timeout=30) as response:
        lines = response.iter_lines()
        assert next(sse(lines))[1] == "submitted"
        read = store.jobs.events

        def lost(*_: Any, **__: Any) -> Any:
            raise Unavailable("gone")

        monkeypatch.setattr(store.jobs, "events", lost)
        assert [next(lines) for _ in range(4)] == [": alive", "", ": alive", ""]
        monkeypatch.setattr(store.jobs, "events", read)
        store.jobs.cancel(job.id)
        assert [kind for _, kind, _ in sse(lines)] == ["cancelled"]


def test_a_stream_that_begins_behind_the_last_event_ends(
    server: Server, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)
    job, _ = store.jobs.submit(JobRequest.from_dict(JOB))
    with httpx.stream("GET", f"{server.url}/v1/jobs/{job.id}/events?after=9-999999", timeout=30) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line == ": alive")
        store.jobs.cancel(job.id)
        assert [kind for _, kind, _ in sse(lines)] == []


def test_a_stream_ends_when_its_client_goes_and_there_are_only_so_many(
    server: Server, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = server.app.state.parts
    streams = Streams(most=1)
    monkeypatch.setitem(parts.__dict__, "streams", streams)
    job, _ = store.jobs.submit(JobRequest.from_dict(JOB))
    url = f"{server.url}/v1/jobs/{job.id}/events"
    with httpx.stream("GET", url, timeout=30) as response:
        lines = response.iter_lines()  # kept: it closes the connection when it goes
        next(sse(lines))
        assert streams.open == 1
        refused = httpx.get(url)
        is_problem(refused, 503)
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(f"{url}?follow=false").status_code == 200
    wait_for(lambda: streams.open == 0)


def test_a_revoked_key_ends_its_stream(server: Server, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "KEY_KNOWN_S", 0.0)
    key, text = store.keys.create("reader", ["read"])
    store.keys.create("other", ["read"])  # so that keys are still needed afterwards
    job, _ = store.jobs.submit(JobRequest.from_dict(JOB))
    headers = {"Authorization": f"Bearer {text}"}
    with httpx.stream("GET", f"{server.url}/v1/jobs/{job.id}/events", headers=headers, timeout=30) as response:
        stream = sse(response.iter_lines())
        next(stream)
        store.keys.revoke(key.id)
        assert list(stream) == []


# -- lookups


def asked(workload: Workload = WORKLOAD, toolchain: Toolchain = TOOLCHAIN, **more: Any) -> dict[str, str]:
    values = {**workload.to_dict(), "arch": "sm_90a", "model": TARGET.model, "num_sms": 132, "power_cap_w": 700}
    values |= {k: v for k, v in toolchain.to_dict().items() if v} | more
    return {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in values.items()}


PACKED = WORKLOAD.with_(lengths_q=[512, 7, 7], lengths_k=[512, 7, 7])


def test_packed_sequences_are_looked_up_by_any_form_of_their_lengths(client: TestClient, store: Store) -> None:
    publish(store, PACKED)
    bare = {
        k: v for k, v in asked(PACKED).items() if k not in ("batch", "seqlen_q", "seqlen_k", "lengths_q", "lengths_k")
    }
    for more in (
        {"lengths": "512,7*2"},
        {"lengths_q": "512,7,7", "lengths_k": "[512, 7, 7]"},
        {"lengths": "512,7*2", "batch": 3},
    ):
        body = client.get("/v1/configs", params={**bare, **more}).json()
        assert (body["kind"], body["workload"]) == ("exact", PACKED.to_dict())
    for more, says in (
        ({"lengths": "512,7*2", "batch": 2}, "lengths_q has 3 lengths and batch is 2"),
        ({"lengths": "512", "layout": "dense"}, "lengths_q is given with layout dense"),
        ({"lengths": "many"}, "lengths is 'many'; write numbers as"),
        ({"lengths_q": "512"}, "lengths_k is missing beside lengths_q"),
        ({}, "workload field batch is missing"),
    ):
        answer = client.get("/v1/configs", params={**bare, "layout": "varlen", **more})
        assert answer.status_code == 422
        assert says in answer.json()["detail"]


def test_a_job_takes_packed_sequences_and_stores_their_lengths(client: TestClient) -> None:
    shape = {"heads_q": 4, "heads_kv": 4, "head_dim": 64, "pattern": "causal"}
    drawn = {**shape, "batch": 3, "lengths": "mean=512,seed=1"}
    answer = client.post("/v1/jobs", json={"arch": "sm_90a", "workloads": [drawn]})
    assert answer.status_code == 202
    stored = client.get(f"/v1/jobs/{answer.json()['id']}").json()["items"][0]["workload"]
    assert (stored["layout"], stored["lengths_q"], stored["seqlen_q"]) == ("varlen", [393, 320, 517], 517)
    many = [{**shape, "lengths": f"{n}*100000"} for n in range(1, 12)]
    answer = client.post("/v1/jobs", json={"arch": "sm_90a", "workloads": many})
    assert (answer.status_code, "more than 1000000 documents and sequences" in answer.text) == (422, True)


def test_a_lookup_gives_what_the_rules_give(client: TestClient, store: Store) -> None:
    for batch in (2, 3, 16):
        publish(store, WORKLOAD.with_(batch=batch), config=Config.make("fake", 1, tile_m=batch))
    publish(store, WORKLOAD.with_(batch=5), policy="eager")
    publish(store, PACKED)
    kinds = set()
    for workload in (
        *(WORKLOAD.with_(batch=b) for b in (2, 3, 4, 5, 64, 4096)),
        WORKLOAD.with_(head_dim=128, head_dim_v=128),
        WORKLOAD.with_(heads_kv=2),
        WORKLOAD.with_(seqlen_k=600),
        PACKED,
        PACKED.with_(lengths_q=[500, 20, 9], lengths_k=[500, 20, 9]),
    ):
        for toolchain in (TOOLCHAIN, replace(TOOLCHAIN, torch="9.9")):
            body = client.get("/v1/configs", params=asked(workload, toolchain)).json()
            # what the asker leaves empty is empty in the entries, too, so that the plain rules say the same
            match = lookup.find(workload, TARGET, toolchain, "graph", store.published())
            assert body == match.to_dict()
            kinds.add(body["kind"])
    assert kinds == {"exact", "bucket", "nearest", "default"}


def test_what_the_asker_does_not_know_is_no_warning(client: TestClient, store: Store) -> None:
    publish(store)
    bare = {k: str(v).lower() if isinstance(v, bool) else v for k, v in WORKLOAD.to_dict().items()} | {"arch": "sm_90a"}
    body = client.get("/v1/configs", params=bare).json()
    assert (body["kind"], body["warnings"]) == ("exact", [])
    (warning,) = client.get("/v1/configs", params={**bare, "torch": "9.9"}).json()["warnings"]
    assert warning == "tuned with torch 2.13.0, this has 9.9"
    (warning,) = client.get("/v1/configs", params={**bare, "model": "NVIDIA H100"}).json()["warnings"]
    assert "H200" in warning and "H100" in warning


def test_a_lookup_is_answered_from_memory_until_something_new_is_published(store: Store) -> None:
    publish(store, speedup=1.5)
    client = client_of(store)
    winners = client.app.state.parts.winners  # type: ignore[attr-defined]
    first = client.get("/v1/configs", params=asked())
    assert first.json()["speedup"] == 1.5
    publish(store, speedup=2.0)
    assert client.get("/v1/configs", params=asked()).content == first.content
    tag = {"If-None-Match": first.headers["etag"]}
    assert client.get("/v1/configs", params=asked(), headers=tag).status_code == 304
    winners.load()
    second = client.get("/v1/configs", params=asked(), headers=tag)
    assert (second.status_code, second.json()["speedup"], second.json()["version"]) == (200, 2.0, 2)
    kept = winners.snapshot
    assert winners.load() is kept  # nothing new: the answers stay remembered


def test_a_server_shows_new_answers_by_itself(server: Server, store: Store) -> None:
    assert httpx.get(server.url + "/v1/configs", params=asked()).json()["kind"] == "default"
    publish(store)
    wait_for(lambda: bool(httpx.get(server.url + "/v1/configs", params=asked()).json()["kind"] == "exact"))


@pytest.mark.parametrize(
    "change",
    [
        {"batch": "0"},
        {"batch": "1.0"},
        {"batch": " 1"},
        {"batch": "\N{ARABIC-INDIC DIGIT TWO}"},
        {"batch": "9" * 5000},
        {"deterministic": "1"},
        {"arch": "auto"},
        {"arch": "sm_90a;x"},
        {"arch": "cpu", "policy": "graph"},
        {"policy": "fast"},
        {"pattern": "lambda q, k: q"},
        {"pattern": "causal" + " & causal" * 40},
        {"pattern": "document(mean=1)", "seqlen_q": "16777216", "seqlen_k": "16777216"},
        {"pattern": "x" * 30_000},
        {"unknown": "1"},
        {"heads_kv": "3"},
    ],
)
def test_a_lookup_is_read_strictly(client: TestClient, change: dict[str, str]) -> None:
    is_problem(client.get("/v1/configs", params={**asked(), **change}), 422)


def test_a_lookup_names_every_parameter_once_and_in_utf8(client: TestClient) -> None:
    query = httpx.QueryParams(asked())
    is_problem(client.get(f"/v1/configs?{query}&batch=2"), 422)
    is_problem(client.get(f"/v1/configs?{query}&model=%FF"), 422)
    is_problem(client.get("/v1/configs"), 422)
    for name in ("batch", "head_dim", "arch"):
        is_problem(client.get("/v1/configs", params={k: v for k, v in asked().items() if k != name}), 422)


# -- fleet, health, metrics


def worker(name: str, **changes: Any) -> WorkerInfo:
    now = datetime.now(UTC)
    values = {"id": name, "host": "h", "pid": 1, "roles": ("measure",), "class_key": "k", "compile_key": "c"}
    values |= {"target": TARGET, "toolchain": TOOLCHAIN, "started_at": now, "heartbeat_at": now}
    return WorkerInfo(**{**values, **changes})


def test_the_fleet_shows_who_works_at_what(client: TestClient, store: Store) -> None:
    store.fleet.register(worker("a", doing="measuring tile_m=64"))
    old = datetime(2020, 1, 1, tzinfo=UTC)
    store.fleet.register(worker("b", started_at=old, heartbeat_at=old, target=None))
    store.fleet.register(worker("c", started_at=datetime(2019, 1, 1, tzinfo=UTC), stopped_at=datetime.now(UTC)))
    assert [w["id"] for w in client.get("/v1/fleet").json()["workers"]] == ["a"]
    assert [w["id"] for w in client.get("/v1/fleet?all=true&limit=2").json()["workers"]] == ["a", "b"]
    assert client.get("/v1/fleet?all=maybe").status_code == client.get("/v1/fleet?limit=1001").status_code == 422
    shown = client.get("/v1/fleet?all=true").json()
    assert {(w["id"], w["alive"], w["doing"]) for w in shown["workers"]} == {
        ("a", True, "measuring tile_m=64"),
        ("b", False, ""),
        ("c", False, ""),
    }
    assert sorted(shown["workers"], key=lambda w: w["id"])[0]["target"] == TARGET.to_dict()
    assert shown["ready"] == []


def test_a_broken_database_is_not_ready_and_the_process_still_lives(
    client: TestClient, store: Store, tmp_path: Path
) -> None:
    assert client.get("/readyz").json() == {"status": "ok"}
    with sqlite3.connect(tmp_path / "flashtune.db") as raw:
        raw.execute("ALTER TABLE jobs DROP COLUMN priority")
    broken = client.get("/readyz")
    assert str(tmp_path) not in str(is_problem(broken, 503))
    assert client.get("/healthz").status_code == 200
    assert str(tmp_path) not in str(is_problem(client.get("/v1/jobs"), 500))


def test_a_database_that_does_not_answer_is_worth_a_retry(
    client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise Unavailable("database postgresql://secret@host: no answer")

    monkeypatch.setattr(store.jobs, "list", lost)
    response = client.get("/v1/jobs")
    assert "secret" not in str(is_problem(response, 503, "unavailable"))
    assert int(response.headers["retry-after"]) >= 1


def test_metrics_count_what_happened(client: TestClient, store: Store) -> None:
    publish(store)
    store.fleet.register(worker("a"))
    for _ in range(2):
        client.post("/v1/jobs", json=JOB)
    store.jobs.cancel(store.jobs.list().items[0].id)
    client.get("/v1/configs", params=asked())
    client.get("/v1/configs", params=asked(WORKLOAD.with_(head_dim=128, head_dim_v=128)))
    client.get("/v1/jobs/abcdef")
    client.get("/nowhere/at-all")
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {
        (s.name, *sorted(s.labels.values())): s.value
        for family in text_string_to_metric_families(response.text)
        for s in family.samples
    }
    assert found["flashtune_jobs", "cancelled"] == found["flashtune_jobs", "queued"] == 1
    assert found["flashtune_jobs", "done"] == 0
    assert found[("flashtune_workers_alive",)] == 1
    assert found["flashtune_work_ready", "compile"] == 0
    assert found["flashtune_lookups_total", "exact"] == found["flashtune_lookups_total", "default"] == 1
    assert found["flashtune_http_requests_total", "/v1/jobs", "202", "POST"] == 2
    assert found["flashtune_http_requests_total", "/v1/jobs/{job_id}", "404", "GET"] == 1
    assert found["flashtune_http_requests_total", "(none)", "404", "GET"] == 1
    assert found["flashtune_http_request_seconds_count", "/v1/configs", "GET"] == 2


# -- who may ask

ROUTES = [
    ("GET", "/v1/configs", "read"),
    ("POST", "/v1/jobs", "submit"),
    ("GET", "/v1/jobs", "read"),
    ("GET", "/v1/jobs/{id}", "read"),
    ("GET", "/v1/jobs/{id}/events?follow=false", "read"),
    ("DELETE", "/v1/jobs/{id}", "submit"),
    ("GET", "/v1/fleet", "read"),
    ("GET", "/v1/keys", "admin"),
    ("POST", "/v1/keys", "admin"),
    ("DELETE", "/v1/keys/{key}", "admin"),
    ("GET", "/metrics", "read"),
    ("GET", "/openapi.json", "read"),
]


def test_the_table_of_routes_is_complete(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    documented = {(method.upper(), path.partition("{")[0]) for path, ops in paths.items() for method in ops}
    ours = {(method, path.partition("?")[0].partition("{")[0]) for method, path, _ in ROUTES}
    assert documented == ours - {("GET", "/openapi.json")} | {("GET", "/healthz"), ("GET", "/readyz")}


@pytest.mark.parametrize(("method", "path", "scope"), ROUTES)
def test_every_route_asks_for_a_key_with_its_scope(store: Store, method: str, path: str, scope: str) -> None:
    client = client_of(store, require_key=True)
    job, _ = store.jobs.submit(JobRequest.from_dict(JOB))
    spare, _ = store.keys.create("spare", ["read"])
    url = path.replace("{id}", job.id).replace("{key}", spare.id)
    body = {"json": {"name": "n", "scopes": ["read"]} if "keys" in path else JOB} if method == "POST" else {}
    params = {"params": asked()} if "configs" in path else {}

    def ask(headers: dict[str, str]) -> httpx.Response:
        return client.request(method, url, headers=headers, **body, **params)

    for missing in ({}, {"Authorization": "Basic YTpi"}, {"X-API-Key": UNKNOWN_KEY}, {"Authorization": "Bearer ft_x"}):
        refused = ask(missing)
        is_problem(refused, 401, "key-needed")
        assert refused.headers["www-authenticate"].startswith("Bearer")
    texts = {s: store.keys.create(s, [s])[1] for s in SCOPES}
    for other in set(SCOPES) - {scope, "admin"}:
        assert other in is_problem(ask({"X-API-Key": texts[other]}), 403, "scope-needed")["detail"]
    for enough in (scope, "admin"):
        for header in ({"Authorization": f"Bearer {texts[enough]}"}, {"X-API-Key": texts[enough]}):
            assert ask(header).status_code in (200, 201, 202)


def test_what_does_not_exist_asks_for_a_key_too_and_health_does_not(store: Store) -> None:
    client = client_of(store, require_key=True)
    for method, path in (("GET", "/nope"), ("PUT", "/v1/jobs"), ("OPTIONS", "/v1/jobs"), ("HEAD", "/v1/fleet")):
        assert client.request(method, path).status_code == 401
    assert (client.get("/healthz").status_code, client.get("/readyz").status_code) == (200, 200)


def test_on_loopback_all_is_open_until_the_first_key_exists(client: TestClient, store: Store) -> None:
    assert client.get("/v1/keys").json() == {"items": []}
    assert client.get("/v1/fleet", headers={"X-API-Key": UNKNOWN_KEY}).status_code == 200
    made = client.post("/v1/keys", json={"name": "me", "scopes": ["admin"], "rate_per_minute": 100})
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    text = made.json()["key"]
    (stored,) = store.keys.list()
    assert made.json() == {**stored.to_dict(), "key": text}
    is_problem(client.get("/v1/keys"), 401)
    listed = client.get("/v1/keys", headers={"X-API-Key": text})
    assert [k["name"] for k in listed.json()["items"]] == ["me"]
    assert text not in listed.text
    assert client.delete(f"/v1/keys/{stored.id}", headers={"X-API-Key": text}).json()["revoked_at"]


def test_keys_made_or_revoked_elsewhere_count_within_seconds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(security, "time", SimpleNamespace(monotonic=lambda: now[0]))
    client = client_of(store)
    assert client.get("/v1/fleet").status_code == 200
    key, text = store.keys.create("a", ["read"])
    store.keys.create("b", ["read"])
    now[0] += 5
    assert client.get("/v1/fleet").status_code == 401
    assert client.get("/v1/fleet", headers={"X-API-Key": text}).status_code == 200
    store.keys.revoke(key.id)
    now[0] += 5
    assert client.get("/v1/fleet", headers={"X-API-Key": text}).status_code == 401


@pytest.mark.parametrize(
    "body",
    [
        {"name": "", "scopes": ["read"]},
        {"name": "a\nb", "scopes": ["read"]},
        {"name": "a", "scopes": []},
        {"name": "a", "scopes": ["root"]},
        {"name": "a", "scopes": "read"},
        {"name": "a", "scopes": ["read"], "rate_per_minute": 0},
        {"name": "a", "scopes": ["read"], "rate_per_minute": True},
        {"name": "a", "scopes": ["read"], "id": "x"},
        {"name": 5, "scopes": ["read"]},
        {"scopes": ["read"]},
    ],
)
def test_a_key_is_asked_for_strictly(client: TestClient, store: Store, body: dict[str, Any]) -> None:
    is_problem(client.post("/v1/keys", json=body), 422)
    assert store.keys.list() == []


def test_a_key_has_so_many_requests_a_minute(store: Store) -> None:
    client = client_of(store, require_key=True, rate_per_minute=2)
    slow, fast = store.keys.create("slow", ["read"], 1)[1], store.keys.create("default", ["read"])[1]
    answers = [client.get("/v1/fleet", headers={"X-API-Key": slow}) for _ in range(2)]
    assert answers[0].status_code == 200
    is_problem(answers[1], 429)
    assert 1 <= int(answers[1].headers["retry-after"]) <= 60
    codes = [client.get("/v1/fleet", headers={"X-API-Key": fast}).status_code for _ in range(3)]
    assert codes == [200, 200, 429]


def test_a_bucket_is_refilled_evenly_and_never_overflows() -> None:
    now = [0.0]
    rates = Rates(clock=lambda: now[0])

    def taken() -> int:
        for count in range(1000):
            try:
                rates.take("k", 30)
            except Problem as e:
                assert e.headers["retry-after"] == "2"
                return count
        raise AssertionError("no limit")

    assert taken() == 30
    now[0] += 10.0
    assert taken() == 5
    now[0] += 10_000.0
    assert taken() == 30


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "10.0.0.1"])
def test_on_loopback_a_foreign_host_is_refused(client: TestClient, host: str) -> None:
    for path in ("/v1/jobs", "/healthz"):
        is_problem(client.get(path, headers={"Host": host}), 400, "foreign-host")


def test_hosts_of_this_machine_are_taken_and_no_origin_is_let_in(client: TestClient) -> None:
    for host in ("localhost", "LOCALHOST:8765", "127.0.0.1:80", "[::1]:8765"):
        response = client.get("/healthz", headers={"Host": host, "Origin": "http://evil.example"})
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control")]
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    is_problem(client.options("/v1/jobs", headers=preflight), 405)


def test_beyond_loopback_a_server_needs_a_key_to_begin(store: Store) -> None:
    with pytest.raises(InputError, match="flashtune keys create NAME --scope admin"):
        Server(store, "0.0.0.0", 0)
    key, _ = store.keys.create("a", ["admin"])
    with Server(store, "0.0.0.0", 0) as server:
        assert server.keys_required
        client = TestClient(server.app, base_url="http://gpu-node.example")
        assert (client.get("/healthz").status_code, client.get("/v1/fleet").status_code) == (200, 401)
        store.keys.revoke(key.id)  # the last one: it does not open again
        server.app.state.parts.guard.forget()
        assert client.get("/v1/fleet").status_code == 401


def test_a_port_that_is_taken_is_said(store: Store) -> None:
    with Server(store, "127.0.0.1", 0) as first, pytest.raises(InputError, match="choose another"):
        Server(store, "127.0.0.1", int(first.url.rpartition(":")[2]))


def test_without_the_database_a_key_is_neither_right_nor_wrong(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> Any:
        raise Unavailable("gone")

    monkeypatch.setattr(store.keys, "find", lost)
    client = client_of(store, require_key=True)
    is_problem(client.get("/v1/fleet", headers={"X-API-Key": UNKNOWN_KEY}), 503)
    is_problem(client.get("/v1/fleet", headers={"X-API-Key": "no key at all"}), 401)


def test_serve_beyond_loopback_says_how_to_make_a_key(tmp_path: Path) -> None:
    command = [*SERVE, "--host", "0.0.0.0", "--port", "0", "--db", str(tmp_path / "served.db")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "flashtune keys create NAME --scope admin" in done.stderr


def test_serve_says_where_it_listens_logs_no_secret_and_stops_when_told(tmp_path: Path) -> None:
    command = [*SERVE, "--port", "0", "--json", "--db", str(tmp_path / "served.db")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            assert line, (tmp_path / "log").read_text()
            text += line
        said = json.loads(text)
        assert (said["database"], said["keys_required"]) == (str(tmp_path / "served.db"), False)
        wait_for(lambda: httpx.get(said["url"] + "/readyz").status_code == 200)
        headers = {"Authorization": "Bearer hunter2"}
        assert httpx.get(said["url"] + "/v1/jobs?token=hunter2", headers=headers).status_code == 422
        assert httpx.post(said["url"] + "/v1/jobs", json=JOB, headers=headers).status_code == 202
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
    finally:
        process.kill()
    logged = (tmp_path / "log").read_text()
    assert "hunter2" not in logged and "Traceback" not in logged
    assert "INFO POST /v1/jobs 202 " in logged
    with Store.open(str(tmp_path / "served.db")) as store:
        assert len(store.jobs.list().items) == 1


# -- what is refused


def post(client: TestClient, content: bytes, kind: str = "application/json") -> httpx.Response:
    return client.post("/v1/jobs", content=content, headers={"Content-Type": kind})


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"name": NaN}', 400),
        (b'{"priority": ' + b"9" * 5000 + b"}", 400),
        (b'{"name": "a", "name": "b"}', 400),
        (b'{"workloads": ' + b"[" * 20 + b"]" * 20 + b"}", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, 400),
        (pickle.dumps(JOB), 400),
        (b"[]", 422),
        (b"null", 422),
        (b'"import os"', 422),
        (b"{}", 422),
        (b'{"workloads": []}', 422),
        (b'{"settings": {"margin": 1e999}, "workloads": []}', 422),
        (b"", 415),
    ],
)
def test_a_body_that_is_no_job_is_refused(client: TestClient, store: Store, content: bytes, status: int) -> None:
    is_problem(post(client, content), status)
    assert store.jobs.list().items == []


NOT_JSON = (
    *("application/octet-stream", "application/x-python-code", "text/x-python", "application/python-pickle"),
    *("text/plain", "application/json-patch+json", "application/x-www-form-urlencoded", ""),
    "multipart/form-data; boundary=x",
)


@pytest.mark.parametrize("kind", NOT_JSON)
def test_only_json_is_taken(client: TestClient, store: Store, kind: str) -> None:
    for content in (json.dumps(JOB).encode(), pickle.dumps(JOB), b"import os\nos.system('true')"):
        is_problem(post(client, content, kind), 415)
    assert store.jobs.list().items == []
    assert post(client, json.dumps(JOB).encode(), "Application/JSON; charset=utf-8").status_code == 202


FULL_JOB = {
    **{"name": "n", "arch": "fake", "policy": "auto", "families": ["fake"], "priority": 0, "force": False},
    "settings": StudySettings().to_dict(),
    "workloads": [{**WORKLOAD.to_dict(), "name": "w"}],
}
HOSTILE = {
    "pickle": pickle.dumps(print).decode("latin-1"),
    "source": "import os\nos.system('true')",
    "expression": "__import__('os').system('true')",
    "import path": "os:system",
    "object": {"__reduce__": ["os.system", ["true"]]},
    "list": ["builtins", "eval"],
    "surrogate": "\ud800",
    "null byte": "a\0b",
}


def spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from spots(inner, (*path, key))


def planted(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    job = json.loads(json.dumps(FULL_JOB))
    at = job
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return job


@pytest.mark.parametrize("what", HOSTILE)
def test_no_field_takes_code_or_pickles(client: TestClient, store: Store, what: str) -> None:
    assert client.post("/v1/jobs", json=FULL_JOB).status_code == 202
    for path in [*spots(FULL_JOB), ("extra",), ("settings", "extra"), ("workloads", 0, "extra")]:
        body = json.dumps(planted(path, HOSTILE[what])).encode()
        response = post(client, body)
        if path[-1] == "name" and what in ("expression", "import path"):  # one line of text, and it stays that
            shown = response.json()["name"] if len(path) == 1 else response.json()["items"][0]["name"]
            assert (response.status_code, shown) == (202, HOSTILE[what])
        else:
            is_problem(response, 422)
    kept = {job.name for job in store.jobs.list(limit=1000).items}
    assert kept <= {"n", HOSTILE["expression"], HOSTILE["import path"]}


def test_a_pattern_that_would_take_long_is_refused_before_it_is_read(client: TestClient) -> None:
    size = {"seqlen_q": 1 << 24, "seqlen_k": 1 << 24}
    many = [{**W, **size, "name": str(i), "pattern": "document(mean=20)"} for i in range(2)]
    for workloads in ([{**W, **size, "pattern": "document(mean=1)"}], many, [{**W, "pattern": "+" * 100}]):
        assert "at most" in (detail := is_problem(post_job(client, workloads), 422)["detail"]) or "draw" in detail
    assert post_job(client, [{**W, "pattern": "document(mean=64)"}]).status_code == 202


def post_job(client: TestClient, workloads: list[dict[str, Any]]) -> httpx.Response:
    return client.post("/v1/jobs", json={"workloads": workloads})


def test_a_body_is_bounded_by_its_length_and_by_what_comes(server: Server, store: Store) -> None:
    big = b'{"name": "' + b"x" * MAX_BODY_BYTES + b'"}'
    headers = {"Content-Type": "application/json"}
    is_problem(httpx.post(server.url + "/v1/jobs", content=big, headers=headers), 413)

    def chunks() -> Iterator[bytes]:
        yield from (big[i : i + 65536] for i in range(0, len(big), 65536))

    is_problem(httpx.post(server.url + "/v1/jobs", content=chunks(), headers=headers), 413)
    is_problem(httpx.post(server.url + "/v1/keys", content=chunks(), headers=headers), 413)
    fits = json.dumps(JOB).encode() + b" " * (MAX_BODY_BYTES - 2000)
    assert httpx.post(server.url + "/v1/jobs", content=fits, headers=headers).status_code == 202
    assert httpx.post(server.url + "/v1/jobs", content=iter([json.dumps(JOB).encode()]), headers=headers).is_success


def test_a_head_without_end_is_cut_off(server: Server) -> None:
    host, port = server.url.rpartition("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        answer = b""
        try:
            raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
            for _ in range(64):
                raw.sendall(b"x" * 65536)
            while piece := raw.recv(65536):
                answer += piece
        except (ConnectionResetError, BrokenPipeError):  # closed while more was under way
            pass
        assert answer.startswith(b"HTTP/1.1 400") or answer == b""
    assert httpx.get(server.url + "/healthz").status_code == 200


def test_every_refusal_is_a_problem(client: TestClient) -> None:
    is_problem(client.get("/v1"), 404)
    is_problem(client.get("/v1/jobs/"), 404)
    is_problem(client.get("/docs"), 404)
    for path in ("/v1/jobs/zzz", "/v1/jobs/abc", "/v1/jobs/abc/events", "/v1/jobs/%00", "/v1/jobs/%F0%9F%92%A9"):
        is_problem(client.get(path), 404)
    is_problem(client.delete("/v1/keys/none"), 404)
    wrong = client.patch("/v1/jobs")
    is_problem(wrong, 405)
    assert wrong.headers["allow"] == "GET, POST"
    url = client.post("/v1/jobs", json=JOB).headers["location"]
    for query in ("after=zz", "follow=maybe", "limit=0", f"after={'9' * 19}-{'9' * 19}"):
        is_problem(client.get(f"{url}/events?{query}"), 422)
    is_problem(client.get(f"{url}/events", headers={"Last-Event-ID": "?"}), 422)
    body = is_problem(client.post("/v1/jobs", json={**JOB, "priority": 1000}), 422)
    assert "1000" in body["errors"][0]["msg"]


# -- what is logged


def test_neither_logs_nor_errors_hold_secrets(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "flashtune")
    client = client_of(store, require_key=True)
    key, text = store.keys.create("a", ["admin"])
    secret = "hunter2hunter2"

    def fault(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"a fault that quotes {secret}")

    answers = []
    for headers in ({"Authorization": f"Bearer {text}"}, {"X-API-Key": text}, {"X-API-Key": secret}, {}):
        answers += [client.get(f"/v1/jobs?token={secret}", headers=headers), client.get("/v1/jobs", headers=headers)]
        answers.append(client.get(f"/v1/jobs/{secret}/events", headers=headers))
    monkeypatch.setattr(store.jobs, "list", fault)
    faulty = client.get("/v1/jobs", headers={"X-API-Key": text})
    body = is_problem(faulty, 500)
    assert "Traceback" not in str(body) and secret not in str(body)
    made = client.post("/v1/keys", json={"name": "b", "scopes": ["read"]}, headers={"X-API-Key": text})
    for hidden in (text, secret, made.json()["key"], key.id):
        assert hidden not in caplog.text
    assert all(text not in a.text for a in answers)
    lines = [r.getMessage() for r in caplog.records]
    assert any(line.startswith("GET /v1/jobs 200 ") and line.endswith(" ms") for line in lines)
    assert any("RuntimeError at" in line and "test_http.py" in line for line in lines)  # where, not what
