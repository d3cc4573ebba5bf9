"""Routes of jobs: submitted, listed, shown, cancelled. ``events`` follows them."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response

from api.http import schemas
from api.http.limits import check_cost, json_body, one_header, refuse_query
from api.http.parts import parts_of
from api.http.problems import Json, json_bytes, with_etag
from api.http.security import SCOPE_KEY, needs
from db.values import IDEMPOTENCY_KEY, JobState
from tuner.job import JobRequest

router = APIRouter()
_HEADER = {"schema": {"type": "string"}}
_SUBMIT: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobBody"}}},
    },
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "description": "The same key with the same body makes one job, however often it is sent.",
            "schema": {"type": "string", "pattern": f"^{IDEMPOTENCY_KEY}$"},
        }
    ],
}


@router.post(
    "/v1/jobs",
    status_code=202,
    dependencies=[needs("submit")],
    openapi_extra=_SUBMIT,
    responses={
        202: {"model": schemas.Job, "headers": {"Location": _HEADER, "Idempotent-Replayed": _HEADER}},
        400: {"model": schemas.Problem},
        413: {"model": schemas.Problem},
        415: {"model": schemas.Problem},
    },
)
def submit(request: Request, body: Annotated[dict[str, Any], Depends(json_body)]) -> Response:
    """Accept a job. What answers 202 is stored, and will be done."""
    refuse_query(request)
    idempotency = one_header(request, "idempotency-key", IDEMPOTENCY_KEY)
    check_cost(body.get("workloads"))
    key = request.scope[SCOPE_KEY]
    job, created = parts_of(request).store.jobs.submit(
        JobRequest.from_dict(body), owner=key.id if key else "", idempotency_key=idempotency
    )
    headers = {"location": f"/v1/jobs/{job.id}"} | ({} if created else {"idempotent-replayed": "true"})
    return Json(job.to_dict(), 202, headers)


@router.get("/v1/jobs", dependencies=[needs("read")], responses={200: {"model": schemas.JobPage}})
def jobs(
    request: Request,
    after: Annotated[str | None, Query(max_length=64, description="The next of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    state: Annotated[JobState | None, Query()] = None,
) -> Response:
    """List jobs, the newest first, without their items."""
    refuse_query(request, ("after", "limit", "state"))
    page = parts_of(request).store.jobs.list(state=str(state) if state else None, after=after, limit=limit)
    headers = {}
    if page.next is not None:
        query = {"after": page.next, "limit": limit} | ({"state": str(state)} if state else {})
        headers["link"] = f'</v1/jobs?{urlencode(query)}>; rel="next"'
    return Json({"items": [job.to_dict() for job in page.items], "next": page.next}, headers=headers)


@router.get(
    "/v1/jobs/{job_id}",
    dependencies=[needs("read")],
    responses={200: {"model": schemas.Job, "headers": {"ETag": _HEADER}}, 304: {}, 404: {"model": schemas.Problem}},
)
def job(request: Request, job_id: str) -> Response:
    """Show a job with its items and their answers."""
    refuse_query(request)
    return with_etag(request, json_bytes(parts_of(request).store.jobs.get(job_id).to_dict()))


@router.delete(
    "/v1/jobs/{job_id}",
    dependencies=[needs("submit")],
    responses={200: {"model": schemas.Job}, 404: {"model": schemas.Problem}},
)
def cancel(request: Request, job_id: str) -> Response:
    """Cancel what has not ended of a job; one that has ended stays as it is."""
    refuse_query(request)
    return Json(parts_of(request).store.jobs.cancel(job_id).to_dict())
