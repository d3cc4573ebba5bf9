"""Claiming in SQL: whose turn it is, the lease, and the commit that only its holder may make.

Statements are built once and run with parameters: SQLAlchemy takes longer to build one than a database
to run it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, Float, Integer, Select, String, Update, bindparam, case, func, select, update
from sqlalchemy.sql.dml import ReturningUpdate

from db.models import RUNNING, StudyModel, WorkModel

_AFFINITY_S = 10.0  # opening a workload on a device takes about as long
_OUT_S = 1.0
LATER = 1000  # added to the rank of what failed, so that others go first
_CLAIM_COLUMNS = (
    WorkModel.id,
    WorkModel.epoch,
    WorkModel.study_id,
    WorkModel.kind,
    WorkModel.stage,
    WorkModel.config,
    WorkModel.compiled,
    WorkModel.attempts,
    WorkModel.deaths,
    WorkModel.rank,
)


def turns(stage: str, opened: bool) -> Select[str]:
    """Return the studies that have something ready at a stage, in the order of their turns.

    Takes ``keys``, and ``open_studies`` if ``opened``.
    """
    key = StudyModel.compile_key if stage == "compile" else StudyModel.class_key
    of_study = (WorkModel.study_id == StudyModel.id) & (WorkModel.stage == stage)
    ready = select(WorkModel.id).where(of_study, WorkModel.state == "ready").exists()
    out = select(func.count()).where(of_study, WorkModel.state == "leased").scalar_subquery()
    turn: Any = StudyModel.served_s + _OUT_S * out
    if opened:
        mine = StudyModel.id.in_(bindparam("open_studies", expanding=True))
        turn = turn - case((mine, _AFFINITY_S), else_=0.0)
    wanted = key.in_(bindparam("keys", expanding=True))
    return (
        select(StudyModel.id)
        .where(StudyModel.wanted, StudyModel.state == RUNNING, wanted, ready)
        .order_by(StudyModel.priority.desc(), turn, StudyModel.created_at, StudyModel.id)
        .limit(4)
    )


def take(clock: Any, lease_s: float) -> ReturningUpdate[Any]:
    """Lease ready work of one study, as ``in_study``, ``at_stage``, ``count`` and ``worker`` say.

    It is begun if ``begin`` says so and it cost fewer deaths than ``alone_from``.
    """
    in_study = WorkModel.study_id == bindparam("in_study", type_=String)
    return _taken(in_study, WorkModel.stage == bindparam("at_stage", type_=String), clock, lease_s)


def _taken(in_study: Any, at_stage: Any, clock: Any, lease_s: float) -> ReturningUpdate[Any]:
    picked = (
        select(WorkModel.id)
        .where(in_study, at_stage, WorkModel.state == "ready")
        .order_by(WorkModel.rank, WorkModel.id)
        .limit(bindparam("count", type_=Integer))
        .with_for_update(skip_locked=True)
        .cte("picked")
    )
    return (
        update(WorkModel)
        .where(WorkModel.id.in_(select(picked.c.id)))
        .values(
            state="leased",
            worker_id=bindparam("worker"),
            begun=bindparam("begin", type_=Boolean) & (WorkModel.deaths < bindparam("alone_from", type_=Integer)),
            lease_until=clock + lease_s,
            epoch=WorkModel.epoch + 1,
            attempts=WorkModel.attempts + 1,
        )
        .returning(*_CLAIM_COLUMNS)
    )


def claim_at_once(stage: str, opened: bool, clock: Any, lease_s: float) -> ReturningUpdate[Any]:
    """Lease as ``take`` does from the study whose turn it is, in one statement; for PostgreSQL.

    Finds nothing where others have just locked all that this study has: then ``turns`` and ``take`` look further.
    """
    study = turns(stage, opened).limit(1).scalar_subquery()
    statement = _taken(WorkModel.study_id == study, WorkModel.stage == stage, clock, lease_s)
    # a lease that a crash of the server forgets is given again: no claim waits for the disk
    return statement.returning(func.set_config("synchronous_commit", "off", True))


def held() -> Update:
    """Change one row if the lease is still ``of_worker``'s, of ``of_epoch``: the new values come beside these."""
    return update(WorkModel).where(
        WorkModel.id == bindparam("of_id", type_=Integer),
        WorkModel.epoch == bindparam("of_epoch", type_=Integer),
        WorkModel.worker_id == bindparam("of_worker", type_=String),
        WorkModel.state == "leased",
    )


def end_at_once(put: Any, tell: Any) -> Select[int]:
    """End a piece of work, put its trial and tell its jobs in one statement, if the lease is held; for PostgreSQL.

    ``put`` and ``tell`` make the two inserts from a selection of the study's id. Returns 1, or 0 if the lease is lost.
    """
    values = {"state": "done", "begun": False, "busy_s": bindparam("spent_s", type_=Float)}
    ended = held().values(**values).returning(WorkModel.study_id).cte("ended")
    return select(func.count()).select_from(ended).add_cte(put(ended).cte("put"), tell(ended).cte("tell"))


TURNS = {(stage, opened): turns(stage, opened) for stage in ("compile", "measure") for opened in (False, True)}
HELD = held()
HELD_LATER = held().values(rank=WorkModel.rank + LATER)
