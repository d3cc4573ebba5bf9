"""The database of the service, asked directly: see ``api.service.Service`` for what each method does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from api.service_rules import FOLLOW_S, Patience
from db.store import Store
from db.values import LAST_KINDS, JobEvent
from tuner.errors import Unavailable
from tuner.job import JobRequest

_POLL_S = 0.5
_EVENTS = 500  # a page of events


class StoreService:
    """The database of the service, directly."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> StoreService:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def submit(self, request: JobRequest, idempotency_key: str | None = None) -> tuple[dict[str, Any], bool]:
        job, created = self._store.jobs.submit(request, idempotency_key=idempotency_key)
        return job.to_dict(), created

    def job(self, ref: str) -> dict[str, Any]:
        return self._store.jobs.get(ref).to_dict()

    def jobs(self, *, state: str | None = None, after: str | None = None, limit: int = 50) -> dict[str, Any]:
        page = self._store.jobs.list(state=state, after=after, limit=limit)
        return {"items": [job.to_dict() for job in page.items], "next": page.next}

    def cancel(self, ref: str) -> dict[str, Any]:
        return self._store.jobs.cancel(ref).to_dict()

    def events(self, ref: str, after: str = "") -> Iterator[dict[str, Any]]:
        job_id, cursor = self.job(ref)["id"], after
        patience = Patience(FOLLOW_S)
        while True:
            try:
                found = self._store.jobs.events(job_id, after=cursor, limit=_EVENTS)
                over = not found and self._over(job_id)
            except Unavailable as e:
                patience.wait(e)
                continue
            patience.renew()
            for event in found:
                cursor = event.cursor
                yield event.to_dict()
            if over or any(event.kind in LAST_KINDS for event in found):
                return
            if not found:
                time.sleep(_POLL_S)

    def _over(self, job_id: str) -> bool:
        """Tell whether the last event exists at all, for a reader whose cursor is behind it.

        The state alone does not say: it can be seen a moment before the event can.
        """
        if not self._store.jobs.state(job_id).ended:
            return False
        seen: list[JobEvent] = []
        while page := self._store.jobs.events(job_id, after=seen[-1].cursor if seen else "", limit=_EVENTS):
            seen += page
        return any(event.kind in LAST_KINDS for event in seen)
