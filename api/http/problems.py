"""Every refusal as ``application/problem+json`` (RFC 9457), and as JSON every answer.

>>> Problem(404, "no job has the id 'abc'").to_dict("/v1/jobs/abc")["type"]
'urn:flashtune:problem:not-found'
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from tuner.errors import Conflict, FlashtuneError, InputError, NotFound, StorageError, Unavailable

log = logging.getLogger("flashtune.http")

RETRY_AFTER_S = 2
_SLUGS = {401: "key-needed", 403: "scope-needed", 422: "invalid-value", 503: "unavailable"}


class Problem(Exception):
    """A request that is refused. ``slug`` names its kind; ``errors`` say which values are wrong, and why."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        slug: str = "",
        errors: list[dict[str, Any]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.errors, self.headers = status, detail, errors or [], dict(headers or {})
        self.title = HTTPStatus(status).phrase
        self.slug = slug or _SLUGS.get(status) or re.sub(r"\W+", "-", self.title.lower())

    def to_dict(self, instance: str) -> dict[str, Any]:
        """Return the members of RFC 9457; ``instance`` is the path that was asked for."""
        return {
            "type": f"urn:flashtune:problem:{self.slug}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "instance": instance,
            **({"errors": self.errors} if self.errors else {}),
        }

    def response(self, instance: str) -> Response:
        return Json(self.to_dict(instance), self.status, self.headers, media_type="application/problem+json")


class Json(Response):
    """A JSON answer in ASCII, whatever its texts hold; NaN and infinity, which JSON lacks, become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(content: Any) -> bytes:
    try:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_plain(content), separators=(",", ":")).encode()


def etag(body: bytes) -> str:
    """Return a strong ETag: equal exactly for equal bodies."""
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def with_etag(request: Request, body: bytes, tag: str | None = None) -> Response:
    """Return the body with its ETag, or 304 if the client has it already (RFC 9110, section 13.1.2)."""
    tag = tag or etag(body)
    wanted = request.headers.get("if-none-match")
    headers = {"etag": tag, "cache-control": "no-cache"}
    if wanted is not None and (wanted.strip() == "*" or tag in re.findall(r'"[^"]*"', wanted)):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def problem_of(error: FlashtuneError) -> Problem:
    """Say in HTTP what went wrong. What only an operator can mend is logged, not shown."""
    if isinstance(error, Unavailable):
        log.warning("%s", error)
        headers = {"retry-after": str(RETRY_AFTER_S)}
        return Problem(503, "the database does not answer now; send the same request again", headers=headers)
    if isinstance(error, StorageError) or not isinstance(error, InputError):
        log.error("%s: %s", type(error).__name__, error)
        return Problem(500, "the server cannot do this now; its log says why")
    if isinstance(error, NotFound):
        return Problem(404, str(error))
    if isinstance(error, Conflict):
        return Problem(422, str(error), slug="idempotency-conflict")
    return Problem(422, str(error), errors=[{"loc": [], "msg": str(error)}])


def unexpected(error: Exception) -> Problem:
    """Log a fault of ours by its type and place: its message may quote what a client sent."""
    places, at = [], error.__traceback__
    while at is not None:
        places.append(f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}")
        at = at.tb_next
    log.error("fault: %s at %s", type(error).__name__, " > ".join(places[-6:]))
    return Problem(500, "a fault of the server; its log says where")


def install(app: FastAPI, paths: Mapping[str, set[str]]) -> None:
    """Make ``app`` answer every error as a problem. ``paths`` has the methods of each path template."""
    allowed = [(_pattern(path), methods) for path, methods in paths.items()]

    def http(request: Request, error: HTTPException) -> Response:
        detail, headers = str(error.detail), dict(error.headers or {})
        if error.status_code == 404:
            detail = "there is nothing at this path; /openapi.json lists what there is"
        elif error.status_code == 405:
            methods = sorted(set().union(*(m for p, m in allowed if p.fullmatch(request.url.path))))
            headers = {"allow": ", ".join(methods)}
            detail = f"{request.method} is not possible here; use {' or '.join(methods)}"
        return Problem(error.status_code, detail, headers=headers).response(request.url.path)

    def invalid(request: Request, error: RequestValidationError) -> Response:
        errors = [{"loc": list(e["loc"]), "msg": e["msg"]} for e in error.errors()]
        where = ".".join(str(part) for part in errors[0]["loc"])
        return Problem(422, f"{where}: {errors[0]['msg']}", errors=errors).response(request.url.path)

    handlers: dict[type[Exception], Any] = {
        Problem: lambda request, error: error.response(request.url.path),
        FlashtuneError: lambda request, error: problem_of(error).response(request.url.path),
        HTTPException: http,
        RequestValidationError: invalid,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, _async(handler))


def _async(handler: Any) -> Any:
    async def on_loop(request: Request, error: Exception) -> Response:
        answer: Response = handler(request, error)
        return answer

    return on_loop


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template)))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
