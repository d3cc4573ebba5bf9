"""What one client may cost: bytes, nesting, requests a minute, streams, and the arithmetic of a pattern."""

from __future__ import annotations

import json
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import Request
from starlette.types import Message, Receive

from api.http.problems import RETRY_AFTER_S, Problem
from tuner.errors import InputError
from tuner.lengths import MAX_SEQUENCES
from tuner.pattern import parse

MAX_BODY_BYTES = 1 << 20
MAX_DEPTH = 8  # of a job: its workloads, one of them, its values
MAX_PATTERN = 16_384  # characters; splitting takes time quadratic in it
MAX_LENGTHS = 16_384  # characters of a text of lengths; a list may be longer
MAX_MARKS = 32  # & and + in one pattern
MAX_DOCUMENTS = 1_000_000  # documents and sequences that the workloads of one request draw together: about a second
MAX_STREAMS = 200
_BUCKETS = 10_000


def bounded(receive: Receive, headers: Mapping[bytes, bytes]) -> Receive:
    """Return a ``receive`` that refuses more than MAX_BODY_BYTES, and anything but JSON.

    Raises:
        Problem: 413 or 415, here or on the way, for a body of unknown length.
    """
    length = headers.get(b"content-length", b"0")
    if (length.isdigit() and int(length) > 0) or b"transfer-encoding" in headers:
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower().decode("latin-1")
        if kind != "application/json":
            raise Problem(415, f"content type {kind[:60]!r} is not taken; send application/json")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return counted


async def json_body(request: Request) -> dict[str, Any]:
    """Read a request's body as one JSON object.

    Raises:
        Problem: 400 if it is not JSON, names a field twice or nests too deep; 415 if there is none; 422 for a list.
    """
    raw = await request.body()
    if not raw:
        raise Problem(415, "there is no body; send a JSON object as application/json")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as e:  # not UTF-8, not JSON, or a number with thousands of digits
        what = f"{e.msg}, line {e.lineno} column {e.colno}" if isinstance(e, json.JSONDecodeError) else "unreadable"
        raise Problem(400, f"the body is not JSON ({what})", slug="malformed-json") from None
    _check_depth(value)
    if not isinstance(value, dict):
        raise Problem(422, f"the body is a {type(value).__name__}; send a JSON object")
    return value


def check_cost(workloads: object) -> None:
    """Refuse workloads whose patterns and lengths would take long to read: called before they are read.

    Raises:
        Problem: 422, naming the limit.
    """
    documents = 0.0
    for workload in workloads if isinstance(workloads, list) else []:
        if not isinstance(workload, dict):
            continue
        documents += _sequences(workload)
        pattern = workload.get("pattern")
        if not isinstance(pattern, str):
            continue
        if len(pattern) > MAX_PATTERN or pattern.count("&") + pattern.count("+") > MAX_MARKS:
            raise Problem(422, f"a pattern has at most {MAX_PATTERN} characters and {MAX_MARKS} of & and +")
        documents += _documents(pattern, workload.get("seqlen_k"))
    if documents > MAX_DOCUMENTS:
        raise Problem(422, f"more than {MAX_DOCUMENTS} documents and sequences are drawn; raise mean, or split the job")


class Rates:
    """A token bucket for each key: a minute's worth at once, then refilled evenly."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when

    def take(self, key: str, per_minute: int) -> None:
        """Take one token.

        Raises:
            Problem: 429, with the seconds until there is one.
        """
        now = self._clock()
        tokens, at = self._buckets.pop(key, (float(per_minute), now))
        tokens = min(float(per_minute), tokens + (now - at) * per_minute / 60)
        self._buckets[key] = (tokens - 1 if tokens >= 1 else tokens, now)
        if len(self._buckets) > _BUCKETS:
            self._buckets.popitem(last=False)
        if tokens < 1:
            wait = math.ceil((1 - tokens) * 60 / per_minute)
            raise Problem(429, f"this key has {per_minute} requests a minute", headers={"retry-after": str(wait)})


class Streams:
    """Counts the open event streams; only the event loop touches it."""

    def __init__(self, most: int = MAX_STREAMS) -> None:
        self.open, self._most = 0, most

    def check(self) -> None:
        """Raises Problem: 503 if there are as many as there may be."""
        if self.open >= self._most:
            headers = {"retry-after": str(RETRY_AFTER_S)}
            raise Problem(503, f"{self._most} event streams are open, and no more are served", headers=headers)


def _documents(pattern: str, seqlen: object) -> float:
    """Return how many documents a workload draws; 0 where it draws none, or is refused anyway."""
    try:
        document = parse(pattern).mask("document")
    except InputError:
        return 0
    params = dict(document.params) if document else {}
    mean = params.get("mean")
    return seqlen / mean if isinstance(mean, int) and type(seqlen) is int and seqlen < 1 << 32 else 0


def _sequences(workload: dict[str, Any]) -> float:
    """Return how many sequences a workload's texts of lengths write out; too many of one are refused anyway."""
    texts = [t for name in ("lengths", "lengths_q", "lengths_k") if isinstance(t := workload.get(name), str)]
    if any(len(t) > MAX_LENGTHS for t in texts):
        raise Problem(422, f"lengths have at most {MAX_LENGTHS} characters; count repetitions, as 512*3")
    batch = workload.get("batch")
    drawn = batch if type(batch) is int else 0
    counted = (
        drawn if "=" in t else t.count(",") + sum(int(n) for n in re.findall(r"[*] *([0-9]{1,9})", t)) for t in texts
    )
    return sum(min(MAX_SEQUENCES, n) for n in counted)


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise Problem(400, f"the body names {name[:60]!r} twice", slug="malformed-json")
        out[name] = value
    return out


def _no_constant(name: str) -> None:
    raise Problem(400, f"the body holds {name}, which JSON lacks", slug="malformed-json")


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [v for v in level if isinstance(v, (dict, list))]
        level = [child for v in inner for child in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> Problem:
    return Problem(400, f"the body nests deeper than {MAX_DEPTH}", slug="malformed-json")


def _too_large() -> Problem:
    headers = {"connection": "close"}
    return Problem(413, f"the body is larger than {MAX_BODY_BYTES} bytes; split the job", headers=headers)


def refuse_query(request: Request, known: Iterable[str] = ()) -> None:
    """Refuse query parameters that a route does not know, or that are there twice.

    Raises:
        Problem: 422, naming the first.
    """
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known or names.count(name) > 1:
            what = "is there twice" if name in known else f"is unknown; known: {', '.join(known) or 'none'}"
            error = {"loc": ["query", name], "msg": what}
            raise Problem(422, f"query parameter {name[:60]!r} {what}", errors=[error])


def one_header(request: Request, name: str, pattern: str) -> str | None:
    """Return a header's value, or None. Raises Problem: 422 if it is there twice or does not match."""
    values = request.headers.getlist(name)
    if not values:
        return None
    if len(values) > 1 or not re.fullmatch(pattern, values[0]):
        raise Problem(
            422, f"header {name} is no text of the form {pattern}", errors=[{"loc": ["header", name], "msg": pattern}]
        )
    return values[0]
