"""``GET /v1/fleet``: who works, what each is doing, and what waits for them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from api.fleeting import fleet_rows
from api.http import schemas
from api.http.limits import refuse_query
from api.http.parts import parts_of
from api.http.problems import Json
from api.http.security import needs

router = APIRouter()


@router.get("/v1/fleet", dependencies=[needs("read")], responses={200: {"model": schemas.Fleet}})
def fleet(
    request: Request,
    every: Annotated[bool, Query(alias="all", description="Those that are gone, too.")] = False,
    limit: Annotated[int, Query(ge=1, le=1000, description="Of workers.")] = 200,
) -> Response:
    """List the workers that were heard of lately, those that began last first, and count the work that is ready."""
    refuse_query(request, ("all", "limit"))
    store = parts_of(request).store
    ready = [{"stage": stage, "key": key, "count": n} for (stage, key), n in sorted(store.work.ready().items())]
    return Json({"workers": fleet_rows(store, every, limit), "ready": ready})
