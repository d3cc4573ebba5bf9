"""The service over HTTP: JSON in and out, problem+json as errors of one line, server-sent events.

Every call may be sent again: reads and cancels change nothing twice, and a submission carries an
Idempotency-Key. No redirect is followed and no proxy used, so the API key goes to one place only.
"""

from __future__ import annotations

import json
import random
import ssl
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

from api.service_rules import FOLLOW_S, Patience
from db.values import LAST_KINDS, checked_key, checked_ref
from tuner import __version__
from tuner.errors import Conflict, FlashtuneError, InputError, NotFound, Unavailable
from tuner.job import JobRequest
from workers.settings import without_secrets

_CONNECT_S = 5.0
_READ_S = 30.0
_SILENCE_S = 60.0  # of an event stream, whose server sends a comment more often than that
_PATIENCE_S = 5.0  # of one call with a service that does not answer
_NO_CONTENT = 204  # asked to go on after a job's last event
_AWAY = (429, 502, 503, 504)  # busy, or a proxy before a service that restarts


class _Away(Unavailable):
    """The service cannot answer now. ``told_s`` is the wait that it asks for, in seconds."""

    def __init__(self, text: str, told_s: float | None = None) -> None:
        super().__init__(text)
        self.told_s = told_s


class HttpService:
    """A service at ``url``, asked with an API key."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url, self._key = url, key
        self._parts = urlsplit(url)

    def __repr__(self) -> str:
        return f"HttpService({self._url!r}, key={'***' if self._key else None})"

    def __enter__(self) -> HttpService:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays open between calls."""

    def submit(self, request: JobRequest, idempotency_key: str | None = None) -> tuple[dict[str, Any], bool]:
        key = uuid.uuid4().hex if idempotency_key is None else checked_key(idempotency_key)
        answer, headers = self._call("POST", "/v1/jobs", request.to_dict(), {"Idempotency-Key": key})
        return answer, headers.get("Idempotent-Replayed") != "true"

    def job(self, ref: str) -> dict[str, Any]:
        return self._call("GET", f"/v1/jobs/{checked_ref(ref)}")[0]

    def jobs(self, *, state: str | None = None, after: str | None = None, limit: int = 50) -> dict[str, Any]:
        query = {"state": state, "after": after, "limit": limit}
        asked = urlencode({name: value for name, value in query.items() if value is not None})
        return self._call("GET", f"/v1/jobs?{asked}")[0]

    def cancel(self, ref: str) -> dict[str, Any]:
        return self._call("DELETE", f"/v1/jobs/{checked_ref(ref)}")[0]

    def events(self, ref: str, after: str = "") -> Iterator[dict[str, Any]]:
        path, cursor = f"/v1/jobs/{checked_ref(ref)}/events", after
        patience = Patience(FOLLOW_S)
        while True:
            try:
                resume = {"Last-Event-ID": cursor} if cursor else {}
                with self._answer("GET", path, None, {"Accept": "text/event-stream", **resume}, _SILENCE_S) as stream:
                    patience.renew()
                    for event in _events(stream, self._url):
                        cursor = event["cursor"]
                        yield event
                        if event["kind"] in LAST_KINDS:
                            return
                    if stream.status == _NO_CONTENT and cursor == after:  # else the last event is about to be seen
                        return
            except _Away as e:
                patience.wait(e, e.told_s)
            else:
                time.sleep(random.uniform(0.2, 0.5))  # the service let go of the stream, as before it stops

    def _call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[dict[str, Any], HTTPMessage]:
        patience = Patience(_PATIENCE_S)
        while True:
            try:
                with self._answer(method, path, body, headers or {}, _READ_S) as response:
                    return _json(response.read(), self._url), response.headers
            except _Away as e:
                patience.wait(e, e.told_s)

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], timeout_s: float
    ) -> Iterator[HTTPResponse]:
        """Give the response of one try if it is a success; raise what it says otherwise."""
        sent = {"Accept": "application/json", "User-Agent": f"flashtune/{__version__}", "Connection": "close"}
        sent |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        sent |= {} if content is None else {"Content-Type": "application/json"}
        try:
            with closing(self._connection()) as connection:
                connection.connect()
                connection.sock.settimeout(timeout_s)
                connection.request(method, self._parts.path + path, content, {**sent, **headers})
                with connection.getresponse() as response:
                    if response.status >= 300:
                        raise self._refusal(response.status, response.headers, response.read())
                    yield response
        except ssl.SSLCertVerificationError as e:
            raise InputError(f"{self._url} has no certificate that this machine trusts: {e.verify_message}") from e
        except UnicodeError as e:
            raise InputError(f"{self._url} names no host ({e}); correct the URL") from e
        except (OSError, HTTPException) as e:
            why = getattr(e, "strerror", None) or str(e) or type(e).__name__
            next_step = "check the URL, and that `flashtune serve` runs there"
            raise _Away(f"cannot reach {self._url}: {_one_line(why)}; {next_step}") from e

    def _connection(self) -> HTTPConnection:
        host, port = str(self._parts.hostname), self._parts.port
        if self._parts.scheme == "https":
            return HTTPSConnection(host, port, timeout=_CONNECT_S, context=ssl.create_default_context())
        return HTTPConnection(host, port, timeout=_CONNECT_S)

    def _refusal(self, status: int, headers: HTTPMessage, body: bytes) -> FlashtuneError:
        """Return the one line that an error answer stands for."""
        problem = _problem(body)
        says = _one_line(str(problem.get("detail") or problem.get("title") or ""))
        if status in _AWAY:
            told_s = _retry_after_s(headers.get("Retry-After"))
            when = "" if told_s is None else f"; it asks to come back in {told_s:.0f} s"
            return _Away(f"{self._url} is busy or away ({status}{f': {says}' if says else ''}){when}", told_s)
        if status >= 500:
            return FlashtuneError(f"{self._url} failed ({status}{f': {says}' if says else ''}); its log says more")
        if status < 400:
            to = without_secrets(headers.get("Location") or "nowhere")
            return InputError(f"{self._url} redirects to {_one_line(to)}; give the URL of the service itself")
        if status == 401:
            fault = "does not accept the key in FLASHTUNE_API_KEY" if self._key else "asks for an API key"
            return InputError(f"{self._url} {fault}; set FLASHTUNE_API_KEY to one that `flashtune keys create` made")
        if not says:
            return InputError(f"{self._url} answers {status} and no reason: is it a flashtune service?")
        if problem.get("type") == "urn:flashtune:problem:idempotency-conflict":
            return Conflict(says)
        return NotFound(says) if status == 404 else InputError(says)


def _events(lines: Iterable[bytes], url: str) -> Iterator[dict[str, Any]]:
    """Read server-sent events: each ends with an empty line, and one cut off before that is not given."""
    fields: dict[str, list[str]] = {}
    for line in lines:
        name, _, value = line.decode("utf-8", "replace").rstrip("\r\n").partition(":")
        if name:
            fields.setdefault(name, []).append(value.removeprefix(" "))
        elif not value:
            if "data" in fields and "id" in fields:
                yield {**_json("\n".join(fields["data"]).encode(), url), "cursor": fields["id"][-1]}
            fields = {}


def _json(body: bytes, url: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{url} answers something else than JSON: is it a flashtune service?")
    return value


def _problem(body: bytes) -> dict[str, Any]:
    """Return the members of a problem (RFC 9457); none if the body is something else."""
    try:
        problem = json.loads(body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def _one_line(text: str) -> str:
    """Return a text from elsewhere fit for a terminal: one line, no control characters, of bounded length."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:500]


def _retry_after_s(value: str | None) -> float | None:
    """Read Retry-After: seconds, or a date."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
