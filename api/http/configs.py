"""``GET /v1/configs``: which config a workload gets, from memory.

A query string that was answered before is answered on the event loop; any other is read and looked
up in a thread, since a pattern may take long.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl

import anyio.to_thread
from fastapi import APIRouter, Request, Response

from api.http import schemas
from api.http.limits import check_cost
from api.http.parts import parts_of
from api.http.problems import Problem, with_etag
from api.http.security import needs
from api.http.winners import Answered, Question, Snapshot
from tuner.spec import policy_for
from tuner.target import Target, Toolchain
from tuner.workload import Workload

router = APIRouter()
_MAX_QUERY = 20_000  # bytes: a pattern may list the lengths of its documents
_FIELDS = schemas.ConfigsQuery.model_fields
_INTS = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "num_sms", "power_cap_w")
_TOOLS = tuple(Toolchain().to_dict())
_WORKLOAD = tuple(schemas.WorkloadFields.model_fields)


@router.get("/v1/configs", dependencies=[needs("read")], responses={200: {"model": schemas.Match}, 304: {}})
async def configs(request: Request) -> Response:
    """Look up the config for a workload: exact, bucket, nearest, or the default."""
    parts, query = parts_of(request), request.scope["query_string"]
    snapshot = parts.winners.snapshot
    if snapshot is None:  # the first request came before the first refresh was done
        snapshot = await anyio.to_thread.run_sync(parts.winners.load)
    answered = snapshot.remembered(query)
    if answered is None:
        answered = await anyio.to_thread.run_sync(_ask, snapshot, query, limiter=parts.lookups)
    parts.metrics.lookup(answered.kind)
    return with_etag(request, answered.body, answered.etag)


def _ask(snapshot: Snapshot, query: bytes) -> Answered:
    return snapshot.answer(question(query), query)


def question(query: bytes) -> Question:
    """Read a query string strictly.

    Raises:
        Problem: 422, naming the parameter.
        InputError: for an impossible workload, or a policy that the target does not have.
    """
    values = _values(query)
    check_cost([values])
    workload = Workload.from_dict({name: values[name] for name in _WORKLOAD if name in values})
    arch = str(values.get("arch", ""))
    if not re.fullmatch(schemas.ARCH.strip("^$"), arch):
        raise _wrong("arch", f"is {arch[:40]!r}; it must be cpu, or an architecture as sm_90a")
    target = Target(
        model=values.get("model", ""),
        arch=arch,
        num_sms=values.get("num_sms", 0),
        power_cap_w=values.get("power_cap_w"),
        device=arch if arch in ("cpu", "fake") else "cuda",
    )
    tools = Toolchain(**{name: values.get(name, "") for name in _TOOLS})
    return Question(workload, target, tools, policy_for(values.get("policy", "auto"), target))


def _values(query: bytes) -> dict[str, Any]:
    if len(query) > _MAX_QUERY:
        raise Problem(422, f"the query is longer than {_MAX_QUERY} bytes")
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=len(_FIELDS))
    except ValueError:
        raise Problem(
            422, "the query cannot be read; write name=value, joined by &, in percent-encoded UTF-8"
        ) from None
    out: dict[str, Any] = {}
    for name, text in pairs:
        if name not in _FIELDS:
            raise _wrong(name, f"is unknown; known: {', '.join(_FIELDS)}")
        if name in out:
            raise _wrong(name, "is there twice")
        out[name] = _value(name, text)
    return out


def _value(name: str, text: str) -> Any:
    if name in _INTS:
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise _wrong(name, f"is {text[:40]!r}; it must be a whole number")
        return int(text)
    if name == "deterministic":
        if text not in ("true", "false"):
            raise _wrong(name, f"is {text[:40]!r}; it must be true or false")
        return text == "true"
    return text


def _wrong(name: str, what: str) -> Problem:
    return Problem(422, f"query parameter {name[:40]!r} {what}", errors=[{"loc": ["query", name[:40]], "msg": what}])
