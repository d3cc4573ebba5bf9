"""Routes of API keys, for scope admin."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import ValidationError

from api.http import schemas
from api.http.limits import json_body, refuse_query
from api.http.parts import parts_of
from api.http.problems import Json, Problem
from api.http.security import needs

router = APIRouter()
_CREATE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/KeyBody"}}},
    }
}


@router.get("/v1/keys", dependencies=[needs("admin")], responses={200: {"model": schemas.KeyList}})
def keys(request: Request) -> Response:
    """List the keys, revoked ones too, without their texts."""
    refuse_query(request)
    return Json({"items": [key.to_dict() for key in parts_of(request).store.keys.list()]})


@router.post(
    "/v1/keys",
    status_code=201,
    dependencies=[needs("admin")],
    openapi_extra=_CREATE,
    responses={
        201: {"model": schemas.NewKey},
        400: {"model": schemas.Problem},
        413: {"model": schemas.Problem},
        415: {"model": schemas.Problem},
    },
)
def create(request: Request, body: Annotated[dict[str, Any], Depends(json_body)]) -> Response:
    """Make a key; its text is in this answer and nowhere else. From the first on, every request needs one."""
    refuse_query(request)
    try:
        wanted = schemas.KeyBody.model_validate(body)
    except ValidationError as e:
        errors = [{"loc": ["body", *error["loc"]], "msg": error["msg"]} for error in e.errors()]
        detail = f"{'.'.join(map(str, errors[0]['loc']))}: {errors[0]['msg']}"
        raise Problem(422, detail, errors=errors) from None
    parts = parts_of(request)
    key, text = parts.store.keys.create(wanted.name, wanted.scopes, wanted.rate_per_minute)
    parts.guard.forget()
    return Json({**key.to_dict(), "key": text}, 201, {"cache-control": "no-store"})


@router.delete(
    "/v1/keys/{key_id}",
    dependencies=[needs("admin")],
    responses={200: {"model": schemas.Key}, 404: {"model": schemas.Problem}},
)
def revoke(request: Request, key_id: str) -> Response:
    """Revoke a key: at once here, within seconds in other processes."""
    refuse_query(request)
    parts = parts_of(request)
    key = parts.store.keys.revoke(key_id)
    parts.guard.forget()
    return Json(key.to_dict())
