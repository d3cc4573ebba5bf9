"""``GET /v1/fleet``: who works, alive or not, what each is doing, and what waits for them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.fleeting import fleet_rows
from api.http import schemas
from api.http.limits import refuse_query
from api.http.parts import parts_of
from api.http.problems import Json
from api.http.security import needs

router = APIRouter()


@router.get("/v1/fleet", dependencies=[needs("read")], responses={200: {"model": schemas.Fleet}})
def fleet(request: Request) -> Response:
    """List the workers, those that began last first, and the pieces of work that are ready."""
    refuse_query(request)
    store = parts_of(request).store
    ready = [{"stage": stage, "key": key, "count": n} for (stage, key), n in sorted(store.work.ready().items())]
    return Json({"workers": fleet_rows(store, every=True), "ready": ready})
