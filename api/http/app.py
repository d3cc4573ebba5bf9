"""The FastAPI app: its routes, its OpenAPI document, and the task that keeps the winners fresh.

>>> app = make_app(store, require_key=False)  # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from api.http import configs, events, fleet, health, jobs, keys, problems, schemas
from api.http.front import Front
from api.http.parts import Parts
from api.http.problems import Json
from api.http.security import OPEN_PATHS, Guard, needs
from api.http.winners import Winners
from db.store import Store
from tuner import __version__
from tuner.errors import FlashtuneError

log = logging.getLogger("flashtune.http")

REFRESH_S = 2.0
_REFRESH_SHARE = 0.05  # of the time at most: reading a thousand answers takes 0.15 s, and slows lookups meanwhile
_COMMON = {
    400: "The body is no JSON, or the Host header is foreign",
    401: "A key is needed",
    403: "The key lacks the scope",
    422: "A value is wrong, or unknown",
    429: "Too many requests",
    500: "A fault of the server",
    503: "The database does not answer now",
}


def make_app(
    store: Store, *, require_key: bool, loopback: bool | None = None, rate_per_minute: int | None = None
) -> FastAPI:
    """Return the API over ``store``, which stays the caller's to close.

    Args:
        store: open for writing.
        require_key: refuse requests without a key; False: only once a key exists.
        loopback: take only requests for localhost, against DNS rebinding; by default if no key is required.
        rate_per_minute: of keys that have no rate of their own; None: no limit.
    """
    loopback = not require_key if loopback is None else loopback
    guard = Guard(store, require_key=require_key, loopback=loopback, rate_per_minute=rate_per_minute)
    parts = Parts(store, guard, Winners(store))
    app = FastAPI(
        title="flashtune",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        responses={status: {"model": schemas.Problem, "description": text} for status, text in _COMMON.items()},
    )
    app.state.parts = parts
    # the busiest first: routes are tried in order
    for module in (configs, jobs, events, fleet, keys, health):
        app.include_router(module.router)
    document = _openapi(app)

    @app.get("/openapi.json", include_in_schema=False, dependencies=[needs("read")])
    async def openapi(request: Request) -> Response:
        return Json(document)

    methods = {path: {m.upper() for m in operations} for path, operations in document["paths"].items()}
    problems.install(app, methods | {"/openapi.json": {"GET"}})
    app.add_middleware(Front, parts=parts)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    task = asyncio.create_task(_refresh(app.state.parts.winners))
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _refresh(winners: Winners) -> None:
    """Keep the winners at most some seconds old, whatever happens to the database."""
    while True:
        began = time.monotonic()
        try:
            await anyio.to_thread.run_sync(winners.load)
        except FlashtuneError as e:  # requests that need the database say so, lookups go on with what they know
            log.warning("winners not refreshed: %s", e)
        except Exception:
            log.exception("winners not refreshed")
        await asyncio.sleep(max(REFRESH_S, (time.monotonic() - began) / _REFRESH_SHARE))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with what is read by hand and not by FastAPI."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemes = {"key": {"type": "http", "scheme": "bearer", "description": "A key, as ft_..."}}
    ref = "#/components/schemas/{model}"
    _, bodies = models_json_schema([(schemas.JobBody, "validation"), (schemas.KeyBody, "validation")], ref_template=ref)
    components = document.setdefault("components", {})
    components["securitySchemes"] = schemes
    components["schemas"] = bodies["$defs"] | components.get("schemas", {})
    query = schemas.ConfigsQuery.model_json_schema(ref_template=ref)
    document["paths"]["/v1/configs"]["get"]["parameters"] = [
        {"name": name, "in": "query", "required": name in query["required"], "schema": schema}
        for name, schema in query["properties"].items()
    ]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
            for status, answer in operation["responses"].items():
                if int(status) >= 400 and "application/json" in answer.get("content", {}):
                    answer["content"] = {"application/problem+json": answer["content"]["application/json"]}
    return document
