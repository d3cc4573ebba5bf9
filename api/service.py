"""What the client commands talk to: a service over HTTP, or its database directly.

Both give the same plain values: ``Job.to_dict()``, ``JobEvent.to_dict()``, and pages of jobs as
``{"items": [...], "next": cursor or None}``.

    >>> with open_service(url="http://tuner.example:8000", db=None) as service:  # doctest: +SKIP
    ...     job, created = service.submit(request)
    ...     for event in service.events(job["id"]):
    ...         print(event["kind"])
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from api import options as o
from api.service_db import StoreService
from api.service_http import HttpService
from tuner.errors import InputError
from tuner.job import JobRequest
from workers.settings import Settings, service_url

__all__ = ["HttpService", "Service", "StoreService", "open_service"]


class Service(Protocol):
    """The seam between the client commands and wherever jobs are kept. Use it as a context manager.

    Every method raises ``Unavailable`` if the other side cannot be reached after some tries, and
    ``InputError`` if it refuses what it was asked.
    """

    def submit(self, request: JobRequest, idempotency_key: str | None = None) -> tuple[dict[str, Any], bool]:
        """Return the job, and whether this call made it: under the same key it is made once.

        Raises:
            Conflict: if the key was used for another request.
        """
        ...

    def job(self, ref: str) -> dict[str, Any]:
        """Return the job with this id or unique beginning of one, with its items. Raises NotFound."""
        ...

    def jobs(self, *, state: str | None = None, after: str | None = None, limit: int = 50) -> dict[str, Any]:
        """Return a page of jobs without their items, the newest first; ``after`` is the ``next`` of a page."""
        ...

    def cancel(self, ref: str) -> dict[str, Any]:
        """Cancel a job and return it; one that has ended stays as it is. Raises NotFound."""
        ...

    def events(self, ref: str, after: str = "") -> Iterator[dict[str, Any]]:
        """Yield the events of a job after a cursor, waiting for new ones, up to its last.

        Goes on from the last event where the other side is away for up to two minutes.
        """
        ...

    def __enter__(self) -> Service: ...

    def __exit__(self, *_: object) -> None: ...


def open_service(url: str | None, db: str | None, *, create: bool = False, read_only: bool = False) -> Service:
    """Open what ``--url`` or ``--db`` names; by default FLASHTUNE_URL, and without it the database.

    ``create`` and ``read_only`` are those of ``Store.open``, if it comes to that.

    Raises:
        InputError: if both are given, or one of them is wrong.
    """
    if url is not None and db is not None:
        raise InputError(f"--url and --db {db} are both given; name the service or its database, not both")
    address, settings = service_url("--url", url), Settings.from_env()
    if db is None and (address or settings.url):
        return HttpService(address or str(settings.url), settings.api_key)
    return StoreService(o.open_store(db, create=create, read_only=read_only))
