"""Whether the process lives, whether it can serve, and its figures for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.http import schemas
from api.http.limits import refuse_query
from api.http.metrics import CONTENT_TYPE
from api.http.parts import parts_of
from api.http.problems import RETRY_AFTER_S, Json, Problem, log
from api.http.security import needs
from tuner.errors import StorageError

router = APIRouter()


@router.get("/healthz", responses={200: {"model": schemas.Health}})
async def healthz(request: Request) -> Response:
    """Answer: the process lives."""
    refuse_query(request)
    return Json({"status": "ok"})


@router.get("/readyz", responses={200: {"model": schemas.Health}, 503: {"model": schemas.Problem}})
def readyz(request: Request) -> Response:
    """Answer if the database does, by queries of keys, jobs and work."""
    refuse_query(request)
    store = parts_of(request).store
    try:
        store.keys.any()
        store.jobs.list(limit=1)
        store.work.ready()
    except StorageError as e:
        log.warning("not ready: %s", e)
        headers = {"retry-after": str(RETRY_AFTER_S)}
        raise Problem(503, "the database does not answer as it should; the log says why", headers=headers) from None
    return Json({"status": "ok"})


@router.get(
    "/metrics",
    dependencies=[needs("read")],
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(request: Request) -> Response:
    """Give the figures in Prometheus's text format."""
    refuse_query(request)
    parts = parts_of(request)
    return Response(parts.metrics.text(parts.store), headers={"content-type": CONTENT_TYPE})
