"""What a dispatcher needs: items that wait for a machine, studies that need more work, and what to forget.

Every change here may be tried by several dispatchers at once; exactly one succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, bindparam, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db import events, settling
from db.models import DONE, FINALS, RUNNING, JobItemModel, JobModel, StudyModel, WorkModel
from db.session import Database
from db.study import StudyHandle, begin, settings_of
from db.values import JobState, StudyProgress
from db.work import compiled_of
from tuner.artifact import Artifact
from tuner.compile import Compiled
from tuner.config import Config
from tuner.errors import Unreadable
from tuner.spec import StudySpec
from tuner.workload import Workload


@dataclass(frozen=True)
class WaitingItem:
    """A workload of a job that no machine was found for yet."""

    id: int
    job_id: str
    name: str
    workload: Workload
    arch: str
    policy: str
    families: tuple[str, ...]


@dataclass(frozen=True)
class Planned:
    """What was planned for a study: configs in work or done, whether the finals are, and the guard."""

    configs: tuple[Config, ...]
    finals: bool
    open: int
    guard: int


@dataclass(frozen=True)
class NewWork:
    """A config to put on the list: ``stage`` is where it begins, lower ``rank`` goes first."""

    config: Config
    stage: str
    rank: int


class Planning:
    """The dispatcher's side of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def waiting(
        self, limit: int = 200, *, archs: Sequence[str] | None = None, aside: dict[int, str] | None = None
    ) -> list[WaitingItem]:
        """Return items without a study, those whose turn it is first: one of each job, then the second of each.

        With ``archs``, only those that one of these may do. Items that cannot be read are left out; their ids go
        into ``aside``, with what is wrong.
        """
        aside = {} if aside is None else aside
        nth = func.row_number().over(partition_by=JobItemModel.job_id, order_by=JobItemModel.position)
        query = (
            select(JobItemModel, JobModel.request)
            .join(JobModel, JobModel.id == JobItemModel.job_id)
            .where(JobItemModel.state == str(JobState.QUEUED))
            .order_by(JobModel.priority.desc(), nth, JobModel.created_at, JobModel.id)
            .limit(limit)
        )
        if archs is not None:
            query = query.where(JobModel.request["arch"].as_string().in_(("auto", *archs)))
        items = []
        with self._database.read() as session:
            for row, request in session.execute(query):
                try:
                    items.append(self._waiting(row, request))
                except Unreadable as e:
                    aside[row.id] = str(e)
        return items

    def _waiting(self, row: JobItemModel, request: Mapping[str, Any]) -> WaitingItem:
        return WaitingItem(
            id=row.id,
            job_id=row.job_id,
            name=row.name,
            workload=self._database.value(Workload.from_dict, row.workload),
            arch=request["arch"],
            policy=request["policy"],
            families=tuple(request["families"]),
        )

    def bind(self, item_id: int, spec: StudySpec, class_key: str, compile_key: str) -> str | None:
        """Give an item its study, new or under way; end the item at once if the answer is known.

        Returns the study's id, or None if the item no longer waits. Raises Unreadable.
        """
        with self._database.write(alone=True) as session:
            item = session.get(JobItemModel, item_id)
            if item is None or item.state != JobState.QUEUED:
                return None
            job = session.get_one(JobModel, item.job_id)
            settings = self._database.value(settings_of, job.request["settings"])
            study = begin(session, spec, settings, force=job.request["force"])
            session.flush()
            item.study_id, item.updated_at = study.id, datetime.now(UTC)
            if study.state == DONE and not settings.asks_more_than(study.settings):
                tuned = StudyHandle(self._database, study).tuned_in(session)
                if tuned is not None:
                    settling.end_item(session, item, tuned, known=True)
                    return study.id
            if study.state != RUNNING:  # once more: it failed, or is given a larger budget
                study.state, study.finished_at, study.settings = RUNNING, None, settings.to_dict()
                session.execute(delete(WorkModel).where(WorkModel.study_id == study.id, WorkModel.kind == FINALS))
            was_wanted = study.wanted
            study.priority = max(job.priority, study.priority) if was_wanted else job.priority
            study.class_key, study.compile_key, study.wanted = class_key, compile_key, True
            item.state = str(JobState.RUNNING)
            if not session.scalar(_joined(item)):
                job.base_s = _others(session, study)
            # what the study was given before is none of this job's; an earlier item of the job has it counted
            if not session.scalar(_twins(item)):
                job.base_s -= session.scalar(_BUSY.where(WorkModel.study_id == study.id)) or 0.0
            if not was_wanted:
                study.served_s = _served(session, [job.id])[job.id]
            events.add(session, job.id, "bound", {"name": item.name, "study": study.id, "class": class_key})
            settling.settle_job(session, job.id)
            return study.id

    def reject(self, item_id: int, error: str) -> None:
        """End a waiting item that no machine can do, with the reason."""
        with self._database.write(alone=True) as session:
            item = session.get(JobItemModel, item_id)
            if item is not None and item.state == JobState.QUEUED:
                settling.end_item(session, item, None, error)

    def progress(self) -> list[StudyProgress]:
        """Return the studies that jobs wait for, those whose turn it is first."""
        of_study = WorkModel.study_id == StudyModel.id
        finals = select(func.count()).where(of_study, WorkModel.kind == FINALS).scalar_subquery()
        query = (
            select(StudyModel.id, StudyModel.class_key, finals)
            .where(StudyModel.wanted, StudyModel.state == RUNNING)
            .order_by(StudyModel.priority.desc(), StudyModel.served_s, StudyModel.created_at)
        )
        with self._database.read() as session:
            return [StudyProgress(study, key, bool(n)) for study, key, n in session.execute(query)]

    def planned(self, study_id: str) -> Planned:
        """Return what was planned for a study so far."""
        rows = select(WorkModel.kind, WorkModel.state, WorkModel.config).where(WorkModel.study_id == study_id)
        with self._database.read() as session:
            guard = session.scalar(select(StudyModel.planned).where(StudyModel.id == study_id)) or 0
            found = session.execute(rows.order_by(WorkModel.id)).all()
        return Planned(
            configs=tuple(Config.from_dict(r.config) for r in found if r.config),
            finals=any(r.kind == FINALS for r in found),
            open=sum(r.state != "done" for r in found),
            guard=guard,
        )

    def compiled(self, study_id: str) -> dict[str, tuple[Compiled, tuple[Artifact, ...]]]:
        """Return what the compilers made for a study, by config key."""
        query = select(WorkModel.config_key, WorkModel.compiled).where(
            WorkModel.study_id == study_id, WorkModel.compiled.is_not(None)
        )
        with self._database.read() as session:
            return {key: compiled_of(stored) for key, stored in session.execute(query)}

    def busy_s(self, study_id: str) -> float:
        """Return the device time that a study took, in seconds."""
        query = select(func.sum(WorkModel.busy_s)).where(WorkModel.study_id == study_id)
        with self._database.read() as session:
            return float(session.scalar(query) or 0.0)

    def plan(self, study_id: str, guard: int, work: Sequence[NewWork], *, finals: bool = False) -> bool:
        """Add work to a study if nobody has since ``guard`` was read; return whether it was added."""
        rows = [_row(study_id, "trial", w.config.key, w.config, w.stage, w.rank) for w in work]
        if finals:
            rows.append(_row(study_id, FINALS, FINALS, None, "measure", 0))
        unchanged = (StudyModel.id == study_id) & (StudyModel.planned == guard) & (StudyModel.state == RUNNING)
        table = postgresql if self._database.dialect == "postgresql" else sqlite
        with self._database.write_soft() as connection:
            bumped = connection.execute(update(StudyModel).where(unchanged).values(planned=guard + 1))
            if bumped.rowcount != 1:
                return False
            if rows:
                connection.execute(table.insert(WorkModel).on_conflict_do_nothing(), rows)
            return True

    def fail_study(self, study_id: str, error: str) -> None:
        """Give a study up: its items end with the error, its trials stay."""
        with self._database.write(alone=True) as session:
            settling.fail_study(session, session.get_one(StudyModel, study_id), error)

    def account(self) -> None:
        """Bring every study's virtual time up to date with the device time that its job was given."""
        live = (
            select(JobItemModel.job_id, StudyModel.id, StudyModel.served_s)
            .join(StudyModel, StudyModel.id == JobItemModel.study_id)
            .where(JobItemModel.state == str(JobState.RUNNING))
        )
        with self._database.read() as session:
            rows = session.execute(live).all()
            jobs = _served(session, sorted({row.job_id for row in rows}))
        now: dict[str, float] = {}
        for job_id, study_id, _ in rows:
            now[study_id] = min(now.get(study_id, float("inf")), jobs[job_id])
        before = {study_id: served for _, study_id, served in rows}
        changed = [{"of": s, "served": now[s]} for s in sorted(now) if now[s] != before[s]]
        if changed:
            with self._database.write_soft() as connection:
                connection.execute(_SET_SERVED, changed)

    def settle(self) -> None:
        """End items whose study was ended by somebody else, as by `flashtune tune` on the same database."""
        query = (
            select(JobItemModel.study_id)
            .join(StudyModel, StudyModel.id == JobItemModel.study_id)
            .where(JobItemModel.state == str(JobState.RUNNING), StudyModel.state == DONE)
        )
        with self._database.read() as session:
            found = session.scalars(query.distinct()).all()
        for study_id in found:
            with self._database.write(alone=True) as session:
                study = session.get_one(StudyModel, study_id)
                if study.state != DONE:
                    continue
                try:
                    tuned = StudyHandle(self._database, study).tuned_in(session)
                except Unreadable as e:
                    settling.end_study(session, study, None, str(e))
                    continue
                if tuned is not None:
                    settling.end_study(session, study, tuned)


_BUSY = select(func.coalesce(func.sum(WorkModel.busy_s), 0.0))
_SET_SERVED = update(StudyModel).where(StudyModel.id == bindparam("of")).values(served_s=bindparam("served"))


def _joined(item: JobItemModel) -> Select[int]:
    """Count the other items of a job that devices work for, or have worked for."""
    measured = JobItemModel.study_id.is_not(None) & ~JobItemModel.known
    return select(func.count()).where(JobItemModel.job_id == item.job_id, JobItemModel.id != item.id, measured)


def _twins(item: JobItemModel) -> Select[int]:
    """Count the other items of a job that have the same study."""
    same = (JobItemModel.job_id == item.job_id) & (JobItemModel.study_id == item.study_id)
    return select(func.count()).where(same, JobItemModel.id != item.id, ~JobItemModel.known)


def _others(session: Session, study: StudyModel) -> float:
    """Return the virtual time at which a job joins those that it shares devices with."""
    least = select(func.min(StudyModel.served_s)).where(
        StudyModel.wanted, StudyModel.id != study.id, StudyModel.priority == study.priority
    )
    here = session.scalar(least.where(StudyModel.class_key == study.class_key))
    return here if here is not None else session.scalar(least) or 0.0


def _served(session: Session, job_ids: Sequence[str]) -> dict[str, float]:
    """Return jobs' virtual time: when they joined, and the device time that their studies were given since."""
    asked = JobItemModel.job_id.in_(job_ids) & ~JobItemModel.known
    of_job = select(JobItemModel.job_id, JobItemModel.study_id).where(asked).distinct().subquery()
    busy = (
        select(of_job.c.job_id, func.sum(WorkModel.busy_s))
        .join(WorkModel, WorkModel.study_id == of_job.c.study_id)
        .group_by(of_job.c.job_id)
    )
    served = {
        job: base for job, base in session.execute(select(JobModel.id, JobModel.base_s).where(JobModel.id.in_(job_ids)))
    }
    for job_id, seconds in session.execute(busy):
        served[job_id] += seconds
    return served


def _row(study_id: str, kind: str, key: str, config: Config | None, stage: str, rank: int) -> dict[str, Any]:
    return {
        "study_id": study_id,
        "kind": kind,
        "config_key": key,
        "config": config.to_dict() if config else None,
        "stage": stage,
        "state": "ready",
        "rank": rank,
        "lease_until": 0.0,
        "epoch": 0,
        "attempts": 0,
        "begun": False,
        "deaths": 0,
        "busy_s": 0.0,
    }
