"""``flashtune jobs`` and ``flashtune cancel``: what was submitted, how far it is, and stopping it."""

from __future__ import annotations

from typing import Annotated

import typer

from api import options as o
from api.service import open_service
from api.tables import job_table, jobs_table
from db.values import JobState
from tuner.errors import InputError

JobArgument = Annotated[str, typer.Argument(help="A job's id, or the beginning of it; see `flashtune jobs`.")]


def jobs(
    job: Annotated[str | None, typer.Argument(help="A job's id, or the beginning of it; without one, all.")] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="Only these: queued, running, done, failed or cancelled.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=200, help="How many, the newest first.")] = 20,
    after: Annotated[str | None, typer.Option("--after", help="Go on where a list ended: its `next`.")] = None,
    url: o.UrlOption = None,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """List the jobs, the newest first; or show one with its workloads."""
    if job is not None and (state is not None or after is not None):
        option = "--state" if state is not None else "--after"
        raise InputError(f"job {job!r:.60} and {option} are both given; name one job or narrow the list, not both")
    if state is not None and state not in list(JobState):
        raise InputError(f"state is {state!r:.60}; it must be one of {', '.join(JobState)}")
    with open_service(url, db, read_only=True) as service:
        found = service.jobs(state=state, after=after, limit=limit) if job is None else service.job(job)
    if json:
        o.print_json(found)
    elif job is not None:
        o.stdout.print(job_table(found))
    else:
        o.stdout.print(jobs_table(found["items"]))
        if found["next"]:
            o.stderr.print(f"more with --after {found['next']}", markup=False, highlight=False)


def cancel(
    job: JobArgument,
    url: o.UrlOption = None,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Cancel what has not ended of a job; what was measured is kept."""
    with open_service(url, db) as service:
        found = service.cancel(job)
    if json:
        o.print_json(found)
    else:
        o.stdout.print(f"job {found['id']} is {found['state']}", markup=False, highlight=False)
