"""What happened to jobs, in the order of commits, so that a reader can stop and go on.

On PostgreSQL the numbers of a sequence become visible out of order: a transaction that took number 5
may commit after one that took 6, and a reader that stood at 6 would never see 5. So every event
carries its transaction's id, the order is (transaction id, number), and a reader is shown only what is
older than every transaction still under way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, Connection, Insert, bindparam, insert, literal, select, text, tuple_
from sqlalchemy.orm import Session

from db.models import EventModel, JobItemModel
from db.session import Database
from db.values import JobEvent, JobState
from tuner.errors import InputError

MAX_EVENTS = 10_000  # that one call returns


def add(session: Session, job_id: str, kind: str, data: Mapping[str, Any]) -> None:
    """Add one event within the caller's transaction."""
    session.execute(insert(EventModel).values(job_id=job_id, kind=kind, at=datetime.now(UTC), data=dict(data)))


def add_for_study(where: Session | Connection, study_id: str, kind: str, data: Mapping[str, Any]) -> None:
    """Add an event to every job that waits for a study."""
    values = {"of_study": study_id, "new_kind": kind, "new_at": datetime.now(UTC), "new_data": dict(data)}
    where.execute(_ADD_FOR_STUDY, values)


def for_study(study_id: Any) -> Insert:
    """Return the insert of an event, as ``new_kind``, ``new_at`` and ``new_data`` say, for a study's jobs."""
    waiting = (JobItemModel.study_id == study_id) & (JobItemModel.state == str(JobState.RUNNING))
    values = select(
        JobItemModel.job_id,
        bindparam("new_kind", type_=EventModel.kind.type),
        bindparam("new_at", type_=EventModel.at.type),
        bindparam("new_data", type_=EventModel.data.type),
    )
    columns = ["job_id", "kind", "at", "data"]
    return insert(EventModel).from_select(columns, values.where(waiting).order_by(JobItemModel.job_id))


_ADD_FOR_STUDY = for_study(bindparam("of_study"))


def read(database: Database, job_id: str | None, after: str, limit: int) -> list[JobEvent]:
    """Return up to ``limit`` events after a cursor, of one job or of all.

    Raises:
        InputError: if the cursor is none of ours, or the limit out of range.
    """
    if not 1 <= limit <= MAX_EVENTS:
        raise InputError(f"limit is {limit}; it must be from 1 to {MAX_EVENTS}")
    found = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", after) if after else None
    if after and found is None:
        raise InputError(f"cursor {after[:40]!r} is none; leave it out to begin at the beginning")
    query = select(EventModel).order_by(EventModel.xid, EventModel.id).limit(limit)
    if job_id is not None:
        query = query.where(EventModel.job_id == job_id)
    if found is not None:
        cursor = tuple_(literal(int(found[1]), BigInteger), literal(int(found[2]), BigInteger))
        query = query.where(tuple_(EventModel.xid, EventModel.id) > cursor)
    if database.dialect == "postgresql":
        query = query.where(EventModel.xid < text("pg_snapshot_xmin(pg_current_snapshot())::text::bigint"))
    with database.read() as session:
        return [
            JobEvent(f"{row.xid}-{row.id}", row.job_id, row.kind, row.at, dict(row.data))
            for row in session.scalars(query)
        ]
