"""``GET /v1/jobs/{id}/events``: what happens to a job, as server-sent events or as pages of JSON.

A stream begins after the cursor that the client names (Last-Event-ID, or ``after``), and ends after
the event that ends the job. Asked to go on after that one, it answers 204: do not come back.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import anyio
from fastapi import APIRouter, Query, Request, Response
from starlette.responses import StreamingResponse

from api.http import schemas
from api.http.limits import one_header, refuse_query
from api.http.parts import Parts, parts_of
from api.http.problems import Json, json_bytes
from api.http.security import needs
from db.values import LAST_KINDS, JobEvent
from tuner.errors import FlashtuneError, Unavailable

router = APIRouter()
POLL_S = 0.5
HEARTBEAT_S = 10.0
_PAGE = 500
_CURSOR = "[!-~]{1,64}"
_EXTRA: dict[str, Any] = {
    "parameters": [
        {
            "name": "Last-Event-ID",
            "in": "header",
            "required": False,
            "description": "The id of the last event seen; goes before `after`.",
            "schema": {"type": "string", "pattern": f"^{_CURSOR}$"},
        }
    ]
}
_TEXT = {"type": "string"}
_DATA = {**_TEXT, "contentMediaType": "application/json", "description": "A JobEvent."}
_STREAM = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "description": "One server-sent event.",
            "properties": {"id": _TEXT, "event": _TEXT, "data": _DATA},
            "required": ["id", "event", "data"],
        }
    }
}


@router.get(
    "/v1/jobs/{job_id}/events",
    dependencies=[needs("read")],
    openapi_extra=_EXTRA,
    responses={
        200: {"model": schemas.EventPage, "content": _STREAM},
        204: {"description": "The job has ended and nothing is left"},
        404: {"model": schemas.Problem},
        503: {"model": schemas.Problem},
    },
)
async def events(
    request: Request,
    job_id: str,
    after: Annotated[str, Query(max_length=64)] = "",
    limit: Annotated[int, Query(ge=1, le=_PAGE, description="Of a JSON page.")] = _PAGE,
    follow: Annotated[Literal["true", "false"], Query(description="false: one page of JSON, at once.")] = "true",
) -> Response:
    """Follow a job's events, or with `Accept: application/json` read a page of them."""
    refuse_query(request, ("after", "limit", "follow"))
    after = one_header(request, "last-event-id", _CURSOR) or after
    follower = _Follower(request, job_id, after)
    if follow == "false" or request.headers.get("accept", "").split(";")[0].strip() == "application/json":
        items = await follower.read(limit)
        return Json({"items": [e.to_dict() for e in items], "next": items[-1].cursor if items else after})
    follower.parts.streams.check()
    first, over = await follower.begin()
    if over and not first:
        return Response(status_code=204)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(follower.stream(first), media_type="text/event-stream", headers=headers)


class _Follower:
    """Reads one job's events for one client."""

    def __init__(self, request: Request, job_id: str, after: str) -> None:
        self.parts: Parts = parts_of(request)
        self._request, self._job_id, self._after = request, job_id, after

    async def read(self, limit: int = _PAGE) -> list[JobEvent]:
        """Return what comes after the last event read, and remember where that ends."""

        def ask() -> list[JobEvent]:
            return self.parts.store.jobs.events(self._job_id, after=self._after, limit=limit)

        found = await anyio.to_thread.run_sync(ask, limiter=self.parts.followers)
        if found:
            self._after = found[-1].cursor
        return found

    async def begin(self) -> tuple[list[JobEvent], bool]:
        """Return the first events, and whether the job had ended before they were read."""
        over = await self.over()
        return await self.read(), over

    async def over(self) -> bool:
        """Tell whether the job has ended."""
        state = self.parts.store.jobs.state
        return (await anyio.to_thread.run_sync(state, self._job_id, limiter=self.parts.followers)).ended

    async def stream(self, found: list[JobEvent]) -> AsyncIterator[bytes]:
        """Yield events until the job ends, the client goes, or its key is revoked."""
        streams = self.parts.streams
        streams.open += 1
        try:
            said = time.monotonic()
            yield b": flashtune events\n\n"
            while True:
                for event in found:
                    yield _sse(event)
                    said = time.monotonic()
                    if event.kind in LAST_KINDS:
                        return
                if len(found) < _PAGE:
                    await anyio.sleep(POLL_S)
                try:
                    silent = time.monotonic() - said >= HEARTBEAT_S
                    over = silent and await self.over()
                    if silent:
                        yield b": alive\n\n"
                        said = time.monotonic()
                    if await self._request.is_disconnected() or not await self._still_valid():
                        return
                    found = await self.read()
                    if over and not found:  # nothing is to come behind this cursor
                        return
                except Unavailable:  # the client need not know: it waits, and the database comes back
                    found = []
                except FlashtuneError:
                    return
        finally:
            streams.open -= 1

    async def _still_valid(self) -> bool:
        return await self.parts.guard.still_valid(dict(self._request.scope["headers"]))


def _sse(event: JobEvent) -> bytes:
    data = json_bytes(event.to_dict())
    return f"id: {event.cursor}\nevent: {event.kind}\ndata: ".encode() + data + b"\n\n"
