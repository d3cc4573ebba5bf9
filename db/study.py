"""One study in the database: its trials and its answer.

Owns what a running search writes; finding and beginning studies is in ``db.store``.

    >>> study.add_trial(trial)  # doctest: +SKIP
    >>> study.finish(tuned, stats)  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db.models import DONE, RUNNING, StudyModel, TrialModel, TunedConfigModel
from db.session import Database
from tuner.config import Config
from tuner.spec import StudySettings
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
        now = datetime.now(UTC)
        table = postgresql if self._database.dialect == "postgresql" else sqlite
        insert = table.insert(TrialModel).values(
            study_id=self.id,
            config_key=trial.config.key,
            family=trial.config.family,
            status=str(trial.status),
            trial=trial.to_dict(),
            ratio=trial.ratio if trial.ratio is not None and math.isfinite(trial.ratio) else None,
            created_at=now,
        )
        replaced = {name: insert.excluded[name] for name in ("status", "trial", "ratio", "created_at")}
        with self._database.write() as session:
            self._row(session).updated_at = now
            session.execute(insert.on_conflict_do_update(index_elements=["study_id", "config_key"], set_=replaced))

    def finish(self, tuned: TunedConfig, stats: Mapping[str, Any]) -> None:
        """Publish the answer and mark the study done, both or neither. A second answer replaces the first."""
        now = datetime.now(UTC)
        with self._database.write(alone=True) as session:
            row = self._row(session)
            row.state, row.stats, row.finished_at, row.updated_at = DONE, dict(stats), now, now
            answer = digest(row.workload_key, row.target_key, row.toolchain_key, row.policy)
            newest = select(func.max(TunedConfigModel.version)).where(TunedConfigModel.answer_hash == answer)
            version = (session.scalar(newest) or 0) + 1
            published = _answer(session, self.id) or TunedConfigModel(study_id=self.id)
            published.answer_hash, published.version = answer, version
            published.workload_key, published.target_key = row.workload_key, row.target_key
            published.toolchain_key, published.policy = row.toolchain_key, row.policy
            published.config_key, published.verdict = tuned.config.key, str(tuned.verdict)
            published.tuned, published.published_at = tuned.to_dict(), now
            session.add(published)

    def reopen(self, settings: StudySettings) -> None:
        """Mark the study running again, under new settings. Trials stay, and so does what it published."""
        with self._database.write() as session:
            row = self._row(session)
            row.state, row.finished_at, row.updated_at = RUNNING, None, datetime.now(UTC)
            row.settings = settings.to_dict()

    def tuned(self) -> TunedConfig | None:
        """Return what the study last published; None before."""
        with self._database.read() as session:
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


def _answer(session: Session, study_id: str) -> TunedConfigModel | None:
    return session.scalar(select(TunedConfigModel).where(TunedConfigModel.study_id == study_id))


def digest(*keys: str) -> str:
    """Return the SHA-256 of keys that are too long for an index."""
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def target_of(stored: Mapping[str, Any]) -> Target:
    return Target(**stored)


def toolchain_of(stored: Mapping[str, Any]) -> Toolchain:
    return Toolchain(**stored)
