"""What is forgotten, and when: a little at a time, so that no call holds the database up.

| rows | go when |
|---|---|
| events | their job ended ``records`` ago; its last event stays, since readers stop at it |
| work | every job that asked for its study ended ``records`` ago; the published config's stays |
| artifacts | nobody published them for ``records``, and no work names them any more |
| workers | they were silent for ``workers``, and hold nothing |
| Idempotency-Keys | they are ``KEEP_KEYS`` old |

Jobs, studies, trials and answers stay for ever.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Delete, Select, String, delete, func, select

from db.models import (
    ArtifactModel,
    EventModel,
    IdempotencyModel,
    JobItemModel,
    JobModel,
    StudyModel,
    TunedConfigModel,
    WorkerModel,
    WorkModel,
)
from db.session import Database
from db.values import LAST_KINDS, Keep

KEEP_KEYS = timedelta(hours=24)  # as the HTTP API says
_MOST = 1000  # rows of one table in one call
_MOST_ARTIFACTS = 100  # they are large


def prune(database: Database, keep: Keep, now: datetime | None = None) -> dict[str, int]:
    """Forget up to a thousand rows of each table; return how many went, by table, where any did.

    Safe beside anything else: every step is a transaction of its own.
    """
    now = now or datetime.now(UTC)
    old = now - keep.records
    steps = {
        "events": _rows(EventModel.id, _old_events(old), _MOST),
        "work": _rows(WorkModel.id, _ended_work(old), _MOST),
        "artifacts": _rows(ArtifactModel.sha256, _unused_artifacts(old, database.dialect), _MOST_ARTIFACTS),
        "workers": _rows(WorkerModel.id, _gone_workers(now - keep.workers), _MOST),
        "idempotency_keys": _rows(IdempotencyModel.id, _old_keys(now - KEEP_KEYS), _MOST),
    }
    gone = {}
    for table, step in steps.items():
        # alone, since what joins a study counts the work that is there
        with database.write(alone=table == "work") as session:
            gone[table] = session.connection().execute(step).rowcount
    return {table: count for table, count in gone.items() if count}


def _rows(key: Any, which: Select[Any], most: int) -> Delete:
    return delete(key.class_).where(key.in_(which.limit(most)))


def _old_events(before: datetime) -> Select[int]:
    return (
        select(EventModel.id)
        .join(JobModel, JobModel.id == EventModel.job_id)
        .where(JobModel.finished_at < before, EventModel.kind.not_in(LAST_KINDS))
    )


def _ended_work(before: datetime) -> Select[int]:
    asking = (
        select(JobItemModel.id)
        .join(JobModel, JobModel.id == JobItemModel.job_id)
        .where(JobItemModel.study_id == WorkModel.study_id)
        .where(JobModel.finished_at.is_(None) | (JobModel.finished_at >= before))
    )
    published = select(TunedConfigModel.id).where(
        TunedConfigModel.study_id == WorkModel.study_id, TunedConfigModel.config_key == WorkModel.config_key
    )
    return (
        select(WorkModel.id)
        .join(StudyModel, StudyModel.id == WorkModel.study_id)
        .where(~StudyModel.wanted, WorkModel.state != "leased", ~asking.exists(), ~published.exists())
    )


def _unused_artifacts(before: datetime, dialect: str) -> Select[str]:
    """Select objects that no work names: its ``compiled`` holds {"artifacts": [{"sha256": ...}, ...]}."""
    listed: Any
    if dialect == "postgresql":
        listed = func.json_array_elements(WorkModel.compiled["artifacts"]).table_valued("value")
        sha256 = func.json_extract_path_text(listed.c.value, "sha256", type_=String)
    else:
        listed = func.json_each(WorkModel.compiled, "$.artifacts").table_valued("value")
        sha256 = func.json_extract(listed.c.value, "$.sha256", type_=String)
    named = select(sha256).select_from(WorkModel).join(listed, WorkModel.id == WorkModel.id)
    named = named.where(WorkModel.compiled.is_not(None), sha256.is_not(None))
    return select(ArtifactModel.sha256).where(ArtifactModel.created_at < before, ArtifactModel.sha256.not_in(named))


def _gone_workers(before: datetime) -> Select[str]:
    holding = select(WorkModel.id).where(WorkModel.worker_id == WorkerModel.id, WorkModel.state == "leased")
    return select(WorkerModel.id).where(WorkerModel.heartbeat_at < before, ~holding.exists())


def _old_keys(before: datetime) -> Select[str]:
    return select(IdempotencyModel.id).where(IdempotencyModel.created_at < before)
