"""How ends travel upwards: a study's end ends the items that wait for it, and the last item ends its job.

For use within a transaction that is alone (``Database.write(alone=True)``): two studies of one job
that end at once must see each other.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db import events
from db.models import FAILED, RUNNING, JobItemModel, JobModel, StudyModel
from db.values import LIVE, JobState, answer_dict
from tuner.trial import TunedConfig


def end_study(session: Session, study: StudyModel, tuned: TunedConfig | None, error: str = "") -> None:
    """End every item that waits for a study: with its answer, or with an error."""
    study.wanted = False
    waiting = select(JobItemModel).where(JobItemModel.study_id == study.id, JobItemModel.state.in_(LIVE))
    for item in session.scalars(waiting.order_by(JobItemModel.job_id, JobItemModel.position)).all():
        end_item(session, item, tuned, error)


def fail_study(session: Session, study: StudyModel, error: str) -> None:
    """Give a running study up: its items end with the error, its trials stay."""
    if study.state == RUNNING:
        study.state, study.updated_at = FAILED, datetime.now(UTC)
        end_study(session, study, None, error)


def end_item(
    session: Session, item: JobItemModel, tuned: TunedConfig | None, error: str = "", known: bool = False
) -> None:
    """End one item, and its job if it was the last. ``known``: the answer was there before the job."""
    now = datetime.now(UTC)
    item.state = str(JobState.FAILED if tuned is None else JobState.DONE)
    item.error, item.updated_at, item.known = error, now, known
    data: dict[str, Any] = {"name": item.name, "study": item.study_id}
    if tuned is None:
        events.add(session, item.job_id, "item_failed", {**data, "error": error})
    else:
        events.add(session, item.job_id, "item_done", {**data, "answer": answer_dict(tuned), "known": known})
    settle_job(session, item.job_id)


def settle_job(session: Session, job_id: str) -> None:
    """Bring a job's state into line with its items'."""
    session.flush()
    job = session.get(JobModel, job_id, with_for_update={"key_share": True})  # its items refer to it
    if job is None or JobState(job.state).ended:
        return
    states = Counter(session.scalars(select(JobItemModel.state).where(JobItemModel.job_id == job_id)))
    job.updated_at = datetime.now(UTC)
    if states[JobState.QUEUED] + states[JobState.RUNNING]:
        if states[JobState.RUNNING] or len(states) > 1:
            job.state = str(JobState.RUNNING)
        return
    job.state = str(JobState.FAILED if states[JobState.FAILED] else JobState.DONE)
    job.finished_at = job.updated_at
    events.add(session, job_id, job.state, {"counts": dict(states)})


def forsake(session: Session, study_id: str) -> None:
    """Stop work on a study that no item waits for any more; what it knows stays.

    Where others still wait, it has their priority: the highest.
    """
    waiting = (
        select(func.max(JobModel.priority))
        .join(JobItemModel, JobItemModel.job_id == JobModel.id)
        .where(JobItemModel.study_id == study_id, JobItemModel.state.in_(LIVE))
    )
    study, priority = session.get(StudyModel, study_id), session.scalar(waiting)
    if study is not None:
        study.wanted = priority is not None
        study.priority = study.priority if priority is None else priority
