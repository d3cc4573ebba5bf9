"""What every request passes first: admission, limits, one line of log, one observation.

The log has the route's template, never the path, the query string or a header: those may hold secrets.
"""

from __future__ import annotations

import time

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.limits import bounded
from api.http.parts import Parts
from api.http.problems import Problem, log, problem_of, unexpected
from api.http.security import SCOPE_KEY
from tuner.errors import FlashtuneError

_METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
_GONE = 499  # as nginx logs a client that did not wait


class Front:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, parts: Parts) -> None:
        self._app, self._parts = app, parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, stream = time.perf_counter(), 0, False

        async def watched(message: Message) -> None:
            nonlocal status, stream
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                stream = any(
                    name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
                )
                message = {**message, "headers": [*headers, (b"x-content-type-options", b"nosniff")]}
            await send(message)

        refused = await self._pass(scope, receive, watched)
        if refused is not None and not status:
            await refused.response(scope["path"])(scope, receive, watched)
        seconds = time.perf_counter() - began
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "(none)")
        self._parts.metrics.request(method, route, status or _GONE, None if stream else seconds)
        log.info("%s %s %d %.1f ms", method, route, status or _GONE, seconds * 1e3)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> Problem | None:
        """Let the app answer; return the problem to answer with where it could not."""
        headers = dict(scope["headers"])
        try:
            scope[SCOPE_KEY] = await self._parts.guard.admit(scope["path"], headers)
            await self._app(scope, bounded(receive, headers), send)
        except Problem as e:
            return e
        except FlashtuneError as e:
            return problem_of(e)
        except ClientDisconnect:
            return None
        except Exception as e:
            return unexpected(e)
        return None
