"""The workers: registered, heard of, gone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select, update

from db.models import TrialModel, WorkerModel, WorkModel
from db.session import Database
from db.study import target_of, toolchain_of
from db.values import SILENT_AFTER, WorkerInfo
from tuner.agreement import Reading


class Fleet:
    """The workers of one database."""

    def __init__(self, database: Database, lease_s: float) -> None:
        self._database, self._lease_s = database, lease_s

    def register(self, info: WorkerInfo) -> None:
        """Add a worker, or replace what was known of it."""
        with self._database.write() as session:
            session.merge(
                WorkerModel(
                    id=info.id,
                    host=info.host,
                    pid=info.pid,
                    roles=list(info.roles),
                    class_key=info.class_key,
                    compile_key=info.compile_key,
                    target=info.target.to_dict() if info.target else None,
                    toolchain=info.toolchain.to_dict(),
                    doing=info.doing,
                    started_at=info.started_at,
                    heartbeat_at=info.heartbeat_at,
                    stopped_at=info.stopped_at,
                )
            )

    def beat(self, worker_id: str, doing: str = "", held: Collection[int] = ()) -> bool:
        """Say that a worker lives, and extend the leases of the work that it holds, named by ids.

        Returns whether it is known: one that was silent for days may have been forgotten.

        Only of that: a lease given in an answer that was lost on its way runs out. Work that went to
        another meanwhile is not touched.
        """
        until = self._database.clock() + self._lease_s
        mine = (WorkModel.worker_id == worker_id) & (WorkModel.state == "leased") & WorkModel.id.in_(held)
        with self._database.write_soft() as connection:
            known = connection.execute(
                update(WorkerModel)
                .where(WorkerModel.id == worker_id)
                .values(heartbeat_at=datetime.now(UTC), doing=doing, stopped_at=None)
            )
            if held:
                connection.execute(update(WorkModel).where(mine).values(lease_until=until))
            return known.rowcount == 1

    def stop(self, worker_id: str) -> None:
        """Say that a worker has ended in good order; what it holds can be had at once, at no cost."""
        held = (WorkModel.worker_id == worker_id) & (WorkModel.state == "leased")
        now = datetime.now(UTC)
        with self._database.write_soft() as connection:
            connection.execute(update(WorkerModel).where(WorkerModel.id == worker_id).values(stopped_at=now, doing=""))
            connection.execute(
                update(WorkModel).where(held).values(state="ready", worker_id=None, attempts=WorkModel.attempts - 1)
            )

    def bury(self, worker_id: str) -> None:
        """Say that a worker is known to be dead; ``Work.reap`` takes back what it holds."""
        dead = update(WorkerModel).where(WorkerModel.id == worker_id).values(stopped_at=datetime.now(UTC), doing="")
        with self._database.write_soft() as connection:
            connection.execute(dead)

    def workers(self, *, alive_only: bool = False, limit: int | None = None) -> list[WorkerInfo]:
        """Return the workers, or the first ``limit`` of them, those that began last first."""
        query = select(WorkerModel).order_by(WorkerModel.started_at.desc(), WorkerModel.id).limit(limit)
        if alive_only:
            heard = datetime.now(UTC) - SILENT_AFTER
            query = query.where(WorkerModel.stopped_at.is_(None), WorkerModel.heartbeat_at > heard)
        with self._database.read() as session:
            return [self._value(row) for row in session.scalars(query)]

    def readings(self, last: int = 5000) -> list[Reading]:
        """Return the newest trials' times of their studies' defaults, for ``tuner.agreement``."""
        query = (
            select(TrialModel.study_id, WorkerModel, TrialModel.default_us)
            .join(WorkerModel, WorkerModel.id == TrialModel.worker_id)
            .where(TrialModel.default_us.is_not(None))
            .order_by(TrialModel.id.desc())
            .limit(last)
        )
        with self._database.read() as session:
            return [Reading(study, self._value(worker).node, us) for study, worker, us in session.execute(query) if us]

    def _value(self, row: WorkerModel) -> WorkerInfo:
        stored: Mapping[str, Any] | None = row.target
        return WorkerInfo(
            id=row.id,
            host=row.host,
            pid=row.pid,
            roles=tuple(row.roles),
            class_key=row.class_key,
            compile_key=row.compile_key,
            target=self._database.value(target_of, stored) if stored else None,
            toolchain=self._database.value(toolchain_of, row.toolchain),
            doing=row.doing,
            started_at=row.started_at,
            heartbeat_at=row.heartbeat_at,
            stopped_at=row.stopped_at,
        )
