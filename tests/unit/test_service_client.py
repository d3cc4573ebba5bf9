"""The client of the service: the same values over HTTP and from the database, whatever the network does.

What both give is also asked of the real server. Faults are those of a stand-in of a few lines that speaks the
routes over a real store, and can be told to fail.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from api import service_http, service_rules
from api.http.server import Server
from api.service import HttpService, Service, StoreService, open_service
from api.service_rules import Patience
from db import events as events_table
from db.store import Store
from db.values import JobState
from tuner.errors import Conflict, FlashtuneError, InputError, NotFound, Unavailable
from tuner.job import JobRequest
from tuner.workload import Workload
from tuner.workload_file import NamedWorkload

KEY = "ft_" + "s3cret" * 8
Fault = Callable[[BaseHTTPRequestHandler], None]


def request(name: str = "", workloads: int = 1) -> JobRequest:
    """A request; each of its workloads has as many heads as its number."""
    named = [
        NamedWorkload(f"w{n}", Workload(batch=1, heads_q=n, heads_kv=n, seqlen_q=64, seqlen_k=64, head_dim=64))
        for n in range(1, workloads + 1)
    ]
    return JobRequest(tuple(named), name=name)


class StandIn(ThreadingHTTPServer):
    """The routes of jobs over a store. ``faults`` happen to the next requests, one each, instead of an answer."""

    daemon_threads = True

    def __init__(self, store: Store, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.store = store
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.cut_after: list[int] = []  # of the next streams: break off in the middle of the event after so many

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        if self.server.faults:
            self.server.faults.pop(0)(self)
            return
        parts = urlsplit(self.path)
        _, _, kind, *rest = parts.path.split("/")
        jobs = self.server.store.jobs
        assert kind == "jobs"
        try:
            if self.command == "POST":
                made = JobRequest.from_dict(json.loads(body))
                job, created = jobs.submit(made, idempotency_key=self.headers["Idempotency-Key"])
                self.answer(202, job.to_dict(), {} if created else {"Idempotent-Replayed": "true"})
            elif not rest:
                query = {k: v[0] for k, v in parse_qs(parts.query).items()}
                page = jobs.list(state=query.get("state"), after=query.get("after"), limit=int(query["limit"]))
                self.answer(200, {"items": [j.to_dict() for j in page.items], "next": page.next})
            elif self.command == "DELETE":
                self.answer(200, jobs.cancel(rest[0]).to_dict())
            elif rest[1:]:
                self.stream(rest[0])
            else:
                self.answer(200, jobs.get(rest[0]).to_dict())
        except Conflict as e:
            self.problem(422, str(e), "idempotency-conflict")
        except NotFound as e:
            self.problem(404, str(e), "not-found")
        except InputError as e:
            self.problem(422, str(e), "invalid-value")

    do_GET = do_POST = do_DELETE = _handle

    def answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def problem(self, status: int, detail: str, slug: str, headers: dict[str, str] | None = None) -> None:
        self.answer(status, {"type": f"urn:flashtune:problem:{slug}", "detail": detail}, headers)

    def stream(self, ref: str) -> None:
        jobs, cursor = self.server.store.jobs, self.headers.get("Last-Event-ID", "")
        cut = self.server.cut_after.pop(0) if self.server.cut_after else None
        sent = 0
        if jobs.get(ref).state.ended and not jobs.events(ref, after=cursor):
            self.send_response(204)
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": hello\n\n")
        while True:
            for event in jobs.events(ref, after=cursor):
                text = f"id: {event.cursor}\nevent: {event.kind}\ndata: {json.dumps(event.to_dict())}\n\n".encode()
                if sent == cut:
                    self.wfile.write(text[: len(text) // 2])
                    return
                self.wfile.write(text)
                cursor, sent = event.cursor, sent + 1
                if event.kind in ("done", "failed", "cancelled"):
                    return
            time.sleep(0.02)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(server: StandIn) -> Iterator[StandIn]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "flashtune.db")) as store:
        yield store


@pytest.fixture
def standin(store: Store) -> Iterator[StandIn]:
    with serving(StandIn(store)) as server:
        yield server


@pytest.fixture
def http(standin: StandIn) -> HttpService:
    return HttpService(standin.url, KEY)


@pytest.fixture
def server(store: Store) -> Iterator[HttpService]:
    """The real server, asked with a real key."""
    _, key = store.keys.create("test", ["read", "submit"])
    with Server(store, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        yield HttpService(server.url, key)
        server.stop()
        thread.join()


@pytest.fixture(params=["database", "http", "server"])
def service(request: pytest.FixtureRequest, store: Store) -> Service:
    found: Service = StoreService(store) if request.param == "database" else request.getfixturevalue(request.param)
    return found


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls give up after a moment, so that giving up can be tested."""
    monkeypatch.setattr(service_http, "_PATIENCE_S", 0.3)


def happen(store: Store, job_id: str, kind: str, **data: Any) -> None:
    with store._database.write() as session:
        events_table.add(session, job_id, kind, data)


# What both give


def test_a_submitted_job_is_what_the_store_has(service: Service, store: Store) -> None:
    job, created = service.submit(request("mine", workloads=2))
    assert created
    assert job == store.jobs.get(job["id"]).to_dict()
    assert (job["name"], job["counts"]) == ("mine", {"queued": 2})
    assert [item["workload"]["heads_q"] for item in job["items"]] == [1, 2]
    assert service.job(job["id"][:5]) == job


def test_without_a_key_two_submissions_are_two_jobs(service: Service) -> None:
    assert service.submit(request())[0]["id"] != service.submit(request())[0]["id"]


def test_one_key_makes_one_job(service: Service, store: Store) -> None:
    first, created = service.submit(request(), "k1")
    again, created_again = service.submit(request(), "k1")
    assert (first["id"], created, created_again) == (again["id"], True, False)
    assert len(store.jobs.list().items) == 1
    with pytest.raises(Conflict, match="'k1' was used for another request"):
        service.submit(request("another"), "k1")


@pytest.mark.parametrize("key", ["", "two words", "é", "a\r\nX-Evil: 1", "x" * 256])
def test_an_impossible_key_is_refused(service: Service, store: Store, key: str) -> None:
    with pytest.raises(InputError, match="dempotency"):
        service.submit(request(), key)
    assert store.jobs.list().items == []


def test_pages_of_jobs_join_without_a_gap(service: Service) -> None:
    ids = [service.submit(request(str(n)))[0]["id"] for n in range(5)]
    first = service.jobs(limit=2)
    second = service.jobs(limit=2, after=first["next"])
    third = service.jobs(limit=2, after=second["next"])
    assert [j["id"] for p in (first, second, third) for j in p["items"]] == ids[::-1]
    assert third["next"] is None


def test_jobs_can_be_asked_for_by_state(service: Service) -> None:
    kept, gone = (service.submit(request())[0]["id"] for _ in range(2))
    assert service.cancel(gone)["state"] == "cancelled"
    assert [j["id"] for j in service.jobs(state="queued")["items"]] == [kept]
    assert [j["id"] for j in service.jobs(state="cancelled")["items"]] == [gone]


@pytest.mark.parametrize("query", [{"state": "lost"}, {"limit": 0}, {"after": "nonsense"}])
def test_an_impossible_list_is_refused(service: Service, query: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        service.jobs(**query)


def test_cancelling_twice_is_cancelling_once(service: Service) -> None:
    job_id = service.submit(request())[0]["id"]
    assert service.cancel(job_id) == service.cancel(job_id)


@pytest.mark.parametrize("ref", ["abcdef123456", "", "../keys", "nothex", "a" * 13, "1/events", "%2e"])
def test_an_unknown_job_is_not_found(service: Service, ref: str) -> None:
    for call in (service.job, service.cancel, lambda ref: next(service.events(ref))):
        with pytest.raises(NotFound):
            call(ref)


def test_events_come_as_they_happen_up_to_the_last(service: Service, store: Store) -> None:
    job_id = service.submit(request())[0]["id"]
    following = service.events(job_id)
    assert next(following)["kind"] == "submitted"
    happen(store, job_id, "trial", ratio=1.5)
    assert next(following)["data"] == {"ratio": 1.5}
    service.cancel(job_id)
    assert [e["kind"] for e in following] == ["cancelled"]


def test_events_are_those_of_the_store_and_of_one_job(service: Service, store: Store) -> None:
    job_id, other = (service.submit(request())[0]["id"] for _ in range(2))
    service.cancel(other)
    service.cancel(job_id)
    assert list(service.events(job_id[:6])) == [e.to_dict() for e in store.jobs.events(job_id)]


def test_events_go_on_after_a_cursor(service: Service) -> None:
    job_id = service.submit(request())[0]["id"]
    service.cancel(job_id)
    first, last = service.events(job_id)
    assert list(service.events(job_id, first["cursor"])) == [last]
    assert list(service.events(job_id, last["cursor"])) == []


def test_more_events_than_a_page(service: Service, store: Store) -> None:
    job_id = service.submit(request())[0]["id"]
    with store._database.write() as session:
        for n in range(1100):
            events_table.add(session, job_id, "trial", {"n": n})
    service.cancel(job_id)
    got = list(service.events(job_id))
    assert [e["data"]["n"] for e in got[1:-1]] == list(range(1100))


def test_the_owner_is_who_has_the_key(server: HttpService, store: Store) -> None:
    (key,) = store.keys.list()
    assert store.jobs.get(server.submit(request())[0]["id"]).owner == key.id


# What only HTTP can do


def test_the_key_is_sent_and_never_shown(standin: StandIn, http: HttpService) -> None:
    http.jobs()
    assert standin.seen[0][2]["authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(http)
    HttpService(standin.url).jobs()
    assert "authorization" not in standin.seen[1][2]


def status(code: int, detail: str = "no", **headers: str) -> Fault:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.problem(code, detail, "x", sent)  # type: ignore[attr-defined]


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def half_an_answer(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"id": ')


FAULTS = {
    "503": status(503),
    "429 and when": status(429, Retry_After="0"),
    "502": status(502),
    "hung up": hang_up,
    "half an answer": half_an_answer,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_call_outlasts_a_fault(standin: StandIn, http: HttpService, fault: Fault) -> None:
    standin.faults += [fault, fault]
    job, _ = http.submit(request())
    posts = [headers["idempotency-key"] for method, _, headers in standin.seen if method == "POST"]
    assert len(posts) == 3
    assert len(set(posts)) == 1  # or a submission whose answer was lost would be made again
    standin.faults.append(fault)
    assert http.job(job["id"]) == job
    standin.faults.append(fault)
    assert http.cancel(job["id"])["state"] == "cancelled"


def test_an_answer_that_was_lost_makes_no_second_job(standin: StandIn, http: HttpService, store: Store) -> None:
    def accept_and_hang_up(handler: BaseHTTPRequestHandler) -> None:
        store.jobs.submit(request("once"), idempotency_key=handler.headers["Idempotency-Key"])
        handler.close_connection = True

    standin.faults.append(accept_and_hang_up)
    job, created = http.submit(request("once"))
    assert [j.id for j in store.jobs.list().items] == [job["id"]]
    assert not created


def test_retry_after_is_kept_to(standin: StandIn, http: HttpService, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(service_rules.time, "sleep", slept.append)
    standin.faults.append(status(429, Retry_After="17"))
    http.jobs()
    assert slept == [17.0]


def test_a_wait_that_is_too_long_is_said(standin: StandIn, http: HttpService) -> None:
    standin.faults.append(status(429, "60 requests a minute", Retry_After="3600"))
    with pytest.raises(Unavailable, match=r"429: 60 requests a minute.*come back in 3600 s"):
        http.jobs()
    assert len(standin.seen) == 1


@pytest.mark.usefixtures("hasty")
def test_nobody_there_is_unavailable(store: Store) -> None:
    with serving(StandIn(store)) as gone:
        url = gone.url
    with pytest.raises(Unavailable, match=f"cannot reach {url}: Connection refused; check the URL"):
        HttpService(url, KEY).jobs()


@pytest.mark.usefixtures("hasty")
def test_a_service_that_stays_away_is_unavailable(standin: StandIn, http: HttpService) -> None:
    standin.faults += [status(503, "the database does not answer")] * 50
    with pytest.raises(Unavailable, match="503: the database does not answer"):
        http.jobs()
    assert len(standin.seen) > 1


REFUSALS: dict[str, tuple[Fault, type[FlashtuneError], str]] = {
    "wrong key": (status(401), InputError, "does not accept the key in FLASHTUNE_API_KEY"),
    "wrong scope": (status(403, "this needs a key with scope submit"), InputError, "scope submit"),
    "too large": (status(413, "the body is too large"), InputError, "too large"),
    "a fault": (status(500, "a fault of the server"), FlashtuneError, "failed .500: a fault of the server"),
    "several lines": (status(422, "one\ntwo\x1b[31m"), InputError, r"^one two\[31m$"),
}


@pytest.mark.parametrize(("fault", "kind", "says"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_is_one_line_and_asked_once(
    standin: StandIn, http: HttpService, fault: Fault, kind: type[FlashtuneError], says: str
) -> None:
    standin.faults.append(fault)
    with pytest.raises(FlashtuneError, match=says) as caught:
        http.submit(request())
    assert type(caught.value) is kind
    assert KEY not in str(caught.value)
    assert len(standin.seen) == 1


@pytest.mark.parametrize("key", [None, KEY])
def test_the_real_server_wants_its_own_key(server: HttpService, store: Store, key: str | None) -> None:
    with pytest.raises(InputError, match="does not accept the key" if key else "asks for an API key"):
        HttpService(server._url, key).submit(request())
    _, reader = store.keys.create("reader", ["read"])
    with pytest.raises(InputError, match="scope submit"):
        HttpService(server._url, reader).submit(request())
    assert store.jobs.list().items == []


def test_a_missing_key_is_asked_for(standin: StandIn) -> None:
    standin.faults.append(status(401))
    with pytest.raises(InputError, match="asks for an API key; set FLASHTUNE_API_KEY"):
        HttpService(standin.url).jobs()


def test_a_redirect_is_said_and_never_followed(standin: StandIn, http: HttpService, store: Store) -> None:
    with serving(StandIn(store)) as elsewhere:
        standin.faults.append(status(307, Location=f"{elsewhere.url}/v1/jobs"))
        with pytest.raises(InputError, match=f"redirects to {elsewhere.url}/v1/jobs"):
            http.submit(request())
        assert elsewhere.seen == []


def page(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"<html>welcome</html>")


def nothing_here(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(404)
    handler.end_headers()
    handler.wfile.write(b"<html>not here</html>")


@pytest.mark.parametrize("fault", [page, nothing_here, lambda handler: handler.answer(200, [1])])
def test_another_web_server_is_noticed(standin: StandIn, http: HttpService, fault: Fault) -> None:
    standin.faults.append(fault)
    with pytest.raises(InputError, match="is it a flashtune service"):
        http.jobs()


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_broken_stream_goes_on_where_it_broke(standin: StandIn, http: HttpService, store: Store, cut: int) -> None:
    job_id = http.submit(request())[0]["id"]
    for n in range(5):
        happen(store, job_id, "trial", n=n)
    http.cancel(job_id)
    standin.cut_after += [cut, cut, 1]
    assert list(http.events(job_id)) == [e.to_dict() for e in store.jobs.events(job_id)]


def test_following_outlasts_a_restart(store: Store) -> None:
    with serving(StandIn(store)) as before:
        http = HttpService(before.url)
        job_id = http.submit(request())[0]["id"]
        before.cut_after.append(1)
        following = http.events(job_id)
        got = [next(following)]
        happen(store, job_id, "trial", n=0)
    rest: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: rest.extend(following))
    reader.start()  # and finds nobody there
    store.jobs.cancel(job_id)
    after = StandIn(store, before.server_address[1])
    after.faults.append(status(503))
    with serving(after):
        reader.join(timeout=60)
    assert got + rest == [e.to_dict() for e in store.jobs.events(job_id)]
    assert after.seen[-1][2]["last-event-id"] == got[-1]["cursor"]


# Which of the two


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    monkeypatch.setenv("FLASHTUNE_URL", standin.url + "/")
    monkeypatch.setenv("FLASHTUNE_API_KEY", KEY)
    with open_service(None, None) as service:
        service.jobs()
    assert standin.seen[0][2]["authorization"] == f"Bearer {KEY}"


def test_options_go_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, standin: StandIn, tmp_path: Path, store: Store
) -> None:
    monkeypatch.setenv("FLASHTUNE_URL", "http://elsewhere.invalid")
    with open_service(standin.url, None) as service:
        service.jobs()
    assert len(standin.seen) == 1
    with open_service(None, str(tmp_path / "other.db"), create=True) as service:
        assert service.submit(request())[1]
    assert store.jobs.list().items == []


def test_without_a_service_the_database_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHTUNE_URL", raising=False)
    monkeypatch.setenv("FLASHTUNE_DATABASE_URL", f"sqlite:///{tmp_path}/own.db")
    with open_service(None, None, create=True) as service:
        job_id = service.submit(request())[0]["id"]
    with Store.open(str(tmp_path / "own.db")) as store:
        assert store.jobs.get(job_id).state is JobState.QUEUED


def test_both_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--url and --db x\.db are both given"):
        open_service("http://localhost:1", "x.db")


def test_patience_ends_with_the_error() -> None:
    patience, tries = Patience(0.3), 0
    with pytest.raises(Unavailable, match="gone"):
        while True:
            tries += 1
            patience.wait(Unavailable("gone"))
    assert tries > 1
    patience.renew()
    patience.wait(Unavailable("gone"))  # a success in between gives it all back
