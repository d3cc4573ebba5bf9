"""One study in the database: its trials and its answer.

Owns what a running search writes; finding and beginning studies is in ``db.store``.

    >>> study.add_trial(trial)  # doctest: +SKIP
    >>> study.finish(tuned, stats)  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import math
import statistics
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db.models import DONE, FAILED, FINALS, RUNNING, StudyModel, TrialModel, TunedConfigModel, WorkModel
from db.session import Database
from tuner.config import Config
from tuner.spec import StudySettings, StudySpec
from tuner.target import Target, Toolchain
from tuner.trial import Trial, TunedConfig
from tuner.workload import Workload


class StudyHandle:
    """One study in the database: the ``tuner.spec.StudyMemory`` of a search, and what to show of it.

    ``workload`` to ``created_at`` never change; everything that may is read from the database.
    """

    def __init__(self, database: Database, row: StudyModel) -> None:
        self._database = database
        self.id = row.id
        self.run = row.run
        self.workload = database.value(Workload.from_dict, row.workload)
        self.target = database.value(target_of, row.target)
        self.toolchain = database.value(toolchain_of, row.toolchain)
        self.policy = row.policy
        self.families = tuple(row.families)
        self.created_at = row.created_at
        self._spec_key_hash = row.spec_key_hash

    @property
    def done(self) -> bool:
        with self._database.read() as session:
            return self._row(session).state == DONE

    @property
    def settings(self) -> dict[str, Any]:
        """The ``StudySettings`` that it last ran with, as plain values."""
        with self._database.read() as session:
            return dict(self._row(session).settings)

    def stats(self) -> dict[str, Any]:
        """Return what ``finish`` was last given; empty before."""
        with self._database.read() as session:
            return dict(self._row(session).stats or {})

    def trials(self) -> Sequence[Trial]:
        """Return the trials in the order in which their configs were first added."""
        with self._database.read() as session:
            query = select(TrialModel.trial).where(TrialModel.study_id == self.id).order_by(TrialModel.id)
            return [self._database.value(Trial.from_dict, stored) for stored in session.scalars(query)]

    def add_trial(self, trial: Trial) -> None:
        """Store a trial. A second trial of the same config replaces the first, in its place."""
        with self._database.write() as session:
            self._row(session).updated_at = datetime.now(UTC)
            put_trial(session.connection(), self.id, trial)

    def refine(self, before: Trial, after: Trial) -> bool:
        """Replace a trial by the same one with more samples, unless somebody has replaced it meanwhile."""
        same = (TrialModel.study_id == self.id) & (TrialModel.config_key == before.config.key)
        unchanged = (TrialModel.status == str(before.status)) & (TrialModel.ratio == before.ratio)
        values = {"trial": after.to_dict(), "status": str(after.status), "ratio": after.ratio}
        with self._database.write_fast() as connection:
            return connection.execute(update(TrialModel).where(same, unchanged).values(**values)).rowcount == 1

    def finish(self, tuned: TunedConfig, stats: Mapping[str, Any]) -> None:
        """Publish the answer and mark the study done, both or neither. A second answer replaces the first."""
        with self._database.write(alone=True) as session:
            publish(session, self._row(session), tuned, stats)

    def withdraw(self, refused: TunedConfig, failed: Trial, instead: TunedConfig, record: Mapping[str, Any]) -> bool:
        """Put ``instead`` in the place of an answer whose config was found wrong, and ``failed`` in its trial's.

        ``record`` is kept in the study's stats, under ``withdrawn``. All of it happens or nothing: False,
        and nothing changed, if the study's answer is another by now.
        """
        with self._database.write(alone=True) as session:
            row, published = self._row(session), _answer(session, self.id)
            if published is None or self._database.value(TunedConfig.from_dict, published.tuned) != refused:
                return False
            put_trial(session.connection(), self.id, failed)
            stats = dict(row.stats or {})
            row.stats = {**stats, "withdrawn": [*stats.get("withdrawn", ()), dict(record)]}
            row.updated_at = datetime.now(UTC)
            newest = _newest_version(session, published.answer_hash)
            version = newest + 1 if published.version == newest else published.version
            _put_answer(session, row, instead, published.answer_hash, version)
            return True

    def reopen(self, settings: StudySettings) -> None:
        """Mark the study running again, under new settings. Trials stay, and so does what it published."""
        with self._database.write() as session:
            row = self._row(session)
            row.state, row.finished_at, row.updated_at = RUNNING, None, datetime.now(UTC)
            row.settings = settings.to_dict()

    def tuned(self) -> TunedConfig | None:
        """Return what the study last published; None before."""
        with self._database.read() as session:
            return self.tuned_in(session)

    def tuned_in(self, session: Session) -> TunedConfig | None:
        """Return what the study last published, within the caller's transaction."""
        published = _answer(session, self.id)
        return None if published is None else self._database.value(TunedConfig.from_dict, published.tuned)

    def incumbent(self) -> Config | None:
        """Return the config that the newest earlier run of the same spec published; None without one."""
        query = (
            select(TunedConfigModel.tuned)
            .join(StudyModel, StudyModel.id == TunedConfigModel.study_id)
            .where(StudyModel.spec_key_hash == self._spec_key_hash, StudyModel.run < self.run)
            .where(StudyModel.state == DONE)
            .order_by(StudyModel.run.desc())
            .limit(1)
        )
        with self._database.read() as session:
            stored = session.scalar(query)
        return None if stored is None else self._database.value(TunedConfig.from_dict, stored).config

    def _row(self, session: Session) -> StudyModel:
        row = session.get(StudyModel, self.id)
        if row is None:
            raise self._database.error(f"study {self.id} is no longer there", "see `flashtune studies`")
        return row


def put_trial(connection: Connection, study_id: str, trial: Trial, worker_id: str | None = None) -> None:
    """Store a trial within the caller's transaction; a second one of the same config replaces the first."""
    connection.execute(_PUT_TRIAL[connection.dialect.name], {"study_id": study_id, **trial_row(trial, worker_id)})


def trial_row(trial: Trial, worker_id: str | None) -> dict[str, Any]:
    """Return the columns of a trial, but for its study."""
    measured = trial.measurement
    return {
        "config_key": trial.config.key,
        "family": trial.config.family,
        "status": str(trial.status),
        "trial": trial.to_dict(),
        "ratio": trial.ratio if trial.ratio is not None and math.isfinite(trial.ratio) else None,
        "worker_id": worker_id,
        "default_us": statistics.median(measured.default_us) if measured and measured.default_us else None,
        "created_at": datetime.now(UTC),
    }


_REPLACED = ("status", "trial", "ratio", "worker_id", "default_us", "created_at")
_COLUMNS = ("config_key", "family", *_REPLACED)


def _replacing(insert: Any) -> Any:
    replaced = {name: insert.excluded[name] for name in _REPLACED}
    return insert.on_conflict_do_update(index_elements=["study_id", "config_key"], set_=replaced)


def trial_from(ended: Any) -> Any:
    """Return the insert of a trial of each selected study, its columns as parameters ``put_...``; for PostgreSQL.

    A parameter named like a column would be taken for a new value of every table that has such a column.
    """
    columns = TrialModel.__table__.c
    values = select(ended.c.study_id, *(bindparam(f"put_{name}", type_=columns[name].type) for name in _COLUMNS))
    return _replacing(postgresql.insert(TrialModel).from_select(["study_id", *_COLUMNS], values))


# built once: that takes longer than to run it. inline: nobody asks for the new id
_PUT_TRIAL = {d.__name__.rpartition(".")[2]: _replacing(d.insert(TrialModel).inline()) for d in (postgresql, sqlite)}


def publish(session: Session, row: StudyModel, tuned: TunedConfig, stats: Mapping[str, Any]) -> None:
    """Publish a study's answer and mark it done, within the caller's transaction; that must be alone."""
    now = datetime.now(UTC)
    row.state, row.stats, row.finished_at, row.updated_at = DONE, dict(stats), now, now
    answer = digest(row.workload_key, row.target_key, row.toolchain_key, row.policy)
    _put_answer(session, row, tuned, answer, _newest_version(session, answer) + 1)


def _newest_version(session: Session, answer: str) -> int:
    newest = select(func.max(TunedConfigModel.version)).where(TunedConfigModel.answer_hash == answer)
    return session.scalar(newest) or 0


def _put_answer(session: Session, row: StudyModel, tuned: TunedConfig, answer: str, version: int) -> None:
    published = _answer(session, row.id) or TunedConfigModel(study_id=row.id)
    published.answer_hash, published.version = answer, version
    published.workload_key, published.target_key = row.workload_key, row.target_key
    published.toolchain_key, published.policy = row.toolchain_key, row.policy
    published.config_key, published.verdict = tuned.config.key, str(tuned.verdict)
    published.tuned, published.published_at = tuned.to_dict(), datetime.now(UTC)
    session.add(published)


def _answer(session: Session, study_id: str) -> TunedConfigModel | None:
    return session.scalar(select(TunedConfigModel).where(TunedConfigModel.study_id == study_id))


def digest(*keys: str) -> str:
    """Return the SHA-256 of keys that are too long for an index."""
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def target_of(stored: Mapping[str, Any]) -> Target:
    return Target(**stored)


def toolchain_of(stored: Mapping[str, Any]) -> Toolchain:
    return Toolchain(**stored)


def settings_of(stored: Mapping[str, Any]) -> StudySettings:
    return StudySettings(**stored)


def begin(session: Session, spec: StudySpec, settings: StudySettings, *, force: bool) -> StudyModel:
    """Return the newest study of ``spec``, or a new one, as ``Store.begin_study`` says; the caller is alone."""
    key_hash = digest(spec.key)
    newest = select(StudyModel).where(StudyModel.spec_key_hash == key_hash).order_by(StudyModel.run.desc())
    row = session.scalar(newest.limit(1))
    if row is None or (force and row.state == DONE):
        row = _new_study(spec, settings, key_hash, run=row.run + 1 if row else 1)
        session.add(row)
    elif row.state in (RUNNING, FAILED):
        if row.state == FAILED or settings.asks_more_than(row.settings):  # its finals would come too early
            session.execute(delete(WorkModel).where(WorkModel.study_id == row.id, WorkModel.kind == FINALS))
        row.state, row.finished_at = RUNNING, None
        row.settings = settings.to_share_with(row.settings) if row.wanted else settings.to_dict()
        row.updated_at = datetime.now(UTC)
    return row


def _new_study(spec: StudySpec, settings: StudySettings, key_hash: str, run: int) -> StudyModel:
    now = datetime.now(UTC)
    return StudyModel(
        id=uuid.uuid4().hex[:12],
        spec_key_hash=key_hash,
        run=run,
        workload=spec.workload.to_dict(),
        workload_key=spec.workload.key,
        target=spec.target.to_dict(),
        target_key=spec.target.key,
        toolchain=spec.toolchain.to_dict(),
        toolchain_key=spec.toolchain.key,
        policy=spec.policy,
        families=list(spec.families),
        settings=settings.to_dict(),
        state=RUNNING,
        created_at=now,
        updated_at=now,
    )
