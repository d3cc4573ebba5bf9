"""Jobs: accepted, listed, followed, cancelled.

A job that ``submit`` returned is a committed row: whatever is killed afterwards, it will be done.
"""

from __future__ import annotations

import builtins
import json
import re
import uuid
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db import events, settling
from db.models import IdempotencyModel, JobItemModel, JobModel, TrialModel, TunedConfigModel
from db.session import Database
from db.study import digest
from db.values import LIVE, Job, JobEvent, JobItem, JobState, Page, checked_key, checked_ref
from tuner.errors import Conflict, InputError, NotFound
from tuner.job import JobRequest
from tuner.trial import TunedConfig
from tuner.workload import Workload


class _Replayed(Exception):
    """The Idempotency-Key is taken: undo this submission."""


class Jobs:
    """The jobs of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def submit(self, request: JobRequest, *, owner: str = "", idempotency_key: str | None = None) -> tuple[Job, bool]:
        """Accept a job; return it and whether it is new.

        The same key of the same owner with the same request returns the job that it made.

        Raises:
            Conflict: if the key was used for another request.
            InputError: if the key is empty, or longer than 255 characters.
        """
        if idempotency_key is not None:
            checked_key(idempotency_key)
        job_id = uuid.uuid4().hex[:12]
        document = request.to_dict()
        body_hash = digest(json.dumps(document, sort_keys=True))
        try:
            with self._database.write() as session:
                self._insert(session, job_id, request, owner)
                if idempotency_key is not None:
                    self._take_key(session, digest(owner, idempotency_key), body_hash, job_id)
        except _Replayed:
            assert idempotency_key is not None
            return self._replayed(digest(owner, idempotency_key), body_hash, idempotency_key), False
        return self.get(job_id), True

    def get(self, ref: str) -> Job:
        """Return the job with this id, or the only one whose id begins so, with its items.

        Raises:
            NotFound: if there is none, or more than one.
        """
        with self._database.read() as session:
            row = self._find(session, ref)
            return _value(row, _counts(session, [row.id])[row.id], self._items(session, row.id))

    def list(self, *, state: str | None = None, after: str | None = None, limit: int = 50) -> Page[Job]:
        """Return a page of jobs without their items, the newest first.

        Raises:
            InputError: for an unknown state, a limit below 1 or a cursor that is none of ours.
        """
        if not 1 <= limit <= 1000:
            raise InputError(f"limit is {limit}; it must be from 1 to 1000")
        if state is not None and state not in list(JobState):
            raise InputError(f"state is {state!r:.40}; it must be one of {', '.join(JobState)}")
        query = select(JobModel).order_by(JobModel.created_at.desc(), JobModel.id.desc()).limit(limit + 1)
        if state is not None:
            query = query.where(JobModel.state == state)
        with self._database.read() as session:
            if after is not None:
                last = session.get(JobModel, after) if re.fullmatch(r"[0-9a-f]{12}", after) else None
                if last is None:
                    raise InputError(f"cursor {after[:40]!r} is none; leave it out to begin with the newest")
                older = (JobModel.created_at < last.created_at) | (
                    (JobModel.created_at == last.created_at) & (JobModel.id < last.id)
                )
                query = query.where(older)
            rows = session.scalars(query).all()
            counts = _counts(session, [row.id for row in rows[:limit]])
            page = [_value(row, counts[row.id]) for row in rows[:limit]]
            return Page(page, page[-1].id if len(rows) > limit else None)

    def cancel(self, ref: str) -> Job:
        """Cancel what has not ended of a job; a job that has ended stays as it is.

        Trials under way end and are kept: a later job for the same workload goes on from them.

        Raises:
            NotFound: if there is none, or more than one.
        """
        with self._database.write(alone=True) as session:
            row = self._find(session, ref)
            if not JobState(row.state).ended:
                now = datetime.now(UTC)
                live = (JobItemModel.job_id == row.id) & JobItemModel.state.in_(LIVE)
                studies = session.scalars(select(JobItemModel.study_id).where(live).distinct()).all()
                session.execute(update(JobItemModel).where(live).values(state=str(JobState.CANCELLED), updated_at=now))
                row.state, row.updated_at, row.finished_at = str(JobState.CANCELLED), now, now
                events.add(session, row.id, "cancelled", {})
                for study_id in studies:
                    if study_id is not None:
                        settling.forsake(session, study_id)
            job_id = row.id
        return self.get(job_id)

    def events(self, ref: str | None = None, *, after: str = "", limit: int = 500) -> builtins.list[JobEvent]:
        """Return the next events of a job, or of all jobs, after a cursor.

        Raises:
            NotFound: if there is no such job.
            InputError: if the cursor is none of ours.
        """
        job_id = None
        if ref is not None:
            with self._database.read() as session:
                job_id = self._find(session, ref).id
        return events.read(self._database, job_id, after, limit)

    def state(self, job_id: str) -> JobState:
        """Return where the job with this id stands. Raises NotFound."""
        with self._database.read() as session:
            return JobState(self._find(session, job_id).state)

    def counts(self) -> dict[str, int]:
        """Count the jobs by state."""
        with self._database.read() as session:
            found = session.execute(select(JobModel.state, func.count()).group_by(JobModel.state))
            return {state: count for state, count in found}

    def _insert(self, session: Session, job_id: str, request: JobRequest, owner: str) -> None:
        now = datetime.now(UTC)
        document = request.to_dict()
        del document["workloads"]  # they are rows of their own
        session.add(
            JobModel(
                id=job_id,
                name=request.name,
                state=str(JobState.QUEUED),
                priority=request.priority,
                owner=owner,
                request=document,
                base_s=0.0,
                created_at=now,
                updated_at=now,
            )
        )
        session.flush()
        session.add_all(
            JobItemModel(
                job_id=job_id,
                position=i,
                name=named.name,
                workload=named.workload.to_dict(),
                state=str(JobState.QUEUED),
                error="",
                known=False,
                updated_at=now,
            )
            for i, named in enumerate(request.workloads)
        )
        events.add(session, job_id, "submitted", {"workloads": len(request.workloads)})

    def _take_key(self, session: Session, key: str, body_hash: str, job_id: str) -> None:
        table = postgresql if self._database.dialect == "postgresql" else sqlite
        values = {"id": key, "body_hash": body_hash, "job_id": job_id, "created_at": datetime.now(UTC)}
        insert = table.insert(IdempotencyModel).values(**values).on_conflict_do_nothing().returning(IdempotencyModel.id)
        if session.scalar(insert) is None:  # another submission with this key has been committed
            raise _Replayed

    def _replayed(self, key: str, body_hash: str, shown: str) -> Job:
        with self._database.read() as session:
            row = session.get(IdempotencyModel, key)
            if row is None:
                raise Conflict(f"Idempotency-Key {shown!r} expired just now; submit again")
            if row.body_hash != body_hash:
                raise Conflict(f"Idempotency-Key {shown!r} was used for another request; choose a new key")
            job_id = row.job_id
        return self.get(job_id)

    def _find(self, session: Session, ref: str) -> JobModel:
        wanted = checked_ref(ref)
        match = JobModel.id == wanted if len(wanted) == 12 else JobModel.id.startswith(wanted)
        rows = session.scalars(select(JobModel).where(match).limit(2)).all()
        if len(rows) != 1:
            what = "no job has" if not rows else "more than one job begins with"
            raise NotFound(f"{what} the id {ref!r}; see `flashtune jobs`")
        return rows[0]

    def _items(self, session: Session, job_id: str) -> tuple[JobItem, ...]:
        trials = select(func.count()).where(TrialModel.study_id == JobItemModel.study_id).correlate(JobItemModel)
        query = (
            select(JobItemModel, trials.scalar_subquery(), TunedConfigModel.tuned)
            .outerjoin(TunedConfigModel, TunedConfigModel.study_id == JobItemModel.study_id)
            .where(JobItemModel.job_id == job_id)
            .order_by(JobItemModel.position)
        )
        value = self._database.value
        return tuple(
            JobItem(
                position=row.position,
                name=row.name,
                workload=_shown(row.workload),
                state=JobState(row.state),
                study_id=row.study_id,
                error=row.error,
                trials=count,
                tuned=value(TunedConfig.from_dict, tuned) if tuned and row.state == JobState.DONE else None,
            )
            for row, count, tuned in session.execute(query)
        )


def _shown(stored: dict[str, Any]) -> dict[str, Any]:
    try:
        return Workload.from_dict(stored).to_dict()
    except (InputError, AttributeError, TypeError, ValueError):
        return stored  # of another version: the item's error says so


def _counts(session: Session, job_ids: list[str]) -> dict[str, Counter[str]]:
    """Count the items of jobs by state."""
    counts: dict[str, Counter[str]] = {job_id: Counter() for job_id in job_ids}
    query = select(JobItemModel.job_id, JobItemModel.state, func.count()).where(JobItemModel.job_id.in_(job_ids))
    for job_id, state, count in session.execute(query.group_by(JobItemModel.job_id, JobItemModel.state)):
        counts[job_id][state] = count
    return counts


def _value(row: JobModel, counts: Counter[str], items: tuple[JobItem, ...] = ()) -> Job:
    request = row.request
    return Job(
        id=row.id,
        name=row.name,
        state=JobState(row.state),
        priority=row.priority,
        arch=request["arch"],
        policy=request["policy"],
        families=tuple(request["families"]),
        force=request["force"],
        owner=row.owner,
        settings=request["settings"],
        counts=dict(counts),
        created_at=row.created_at,
        updated_at=row.updated_at,
        finished_at=row.finished_at,
        items=items,
    )
