"""Work: claimed under a lease, committed once, taken back from the dead.

A worker claims a piece of work and holds it until a moment that its heartbeats push ahead. Each
lease has a higher ``epoch``; a commit names its epoch and worker, and is refused with ``StaleClaim`` once
another lease was given. Work whose worker dies three times with it in hand is quarantined: it becomes a
trial that failed, and the study goes on.

Whose turn it is: the highest priority first, then the job with the least virtual time. That is the
device time it was given since it joined, plus a second for each piece of its work that is out; a worker
stays with the studies that it has open unless another job is more than ten seconds behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Update, case, func, select
from sqlalchemy.orm import Session

from db import events, settling, turns
from db.models import RUNNING, StudyModel, WorkModel
from db.session import Database
from db.study import publish, put_trial, trial_from, trial_row
from db.values import Claim, Expired
from tuner.artifact import Artifact
from tuner.compile import Compiled
from tuner.config import Config
from tuner.errors import StaleClaim
from tuner.trial import Resources, Trial, TrialStatus, TunedConfig

DEATHS = 3  # a piece of work that cost so many workers or children gets no other
ATTEMPTS = 20  # of a piece of work that machines fail at: then it is given up as well
LEASE_S = 45.0

_LOST = {"compile": TrialStatus.COMPILE_CRASH, "measure": TrialStatus.RUN_CRASH}


class Work:
    """The work of every study of one database. All calls may be made by many processes at once."""

    def __init__(self, database: Database, lease_s: float = LEASE_S) -> None:
        self._database = database
        self._take_work = turns.take(database.clock(), lease_s)
        self._at_once = {
            shape: turns.claim_at_once(*shape, database.clock(), lease_s)
            for shape in turns.TURNS
            if database.dialect == "postgresql"
        }

    def claim(
        self,
        worker_id: str,
        *,
        stage: str,
        keys: Sequence[str],
        open_studies: Sequence[str] = (),
        limit: int = 1,
        begin: bool = False,
        alone_from: int = DEATHS,
    ) -> list[Claim]:
        """Lease up to ``limit`` pieces of work of one study, the one whose turn it is; empty if there is none.

        ``keys`` are compile keys or class keys, by the stage. ``begin`` says that the worker starts at once,
        but for what cost ``alone_from`` deaths: that it begins later, alone.
        """
        values = {"keys": list(keys)}
        if open_studies:
            values["open_studies"] = list(open_studies)
        shape = stage, bool(open_studies)
        if self._at_once:
            taking = {"count": limit, "worker": worker_id, "begin": begin, "alone_from": alone_from}
            with self._database.one_statement() as connection:
                claims = _claims(connection.execute(self._at_once[shape], {**values, **taking}), worker_id)
            if claims:
                return claims
        query = turns.TURNS[shape]
        with self._database.write_soft() as connection:
            for study_id in connection.scalars(query, values).all():
                claims = self._take(connection, worker_id, study_id, stage, limit, begin, alone_from)
                if claims:
                    return claims
        return []

    def begin(self, claim: Claim) -> None:
        """Say that the worker starts with a claim now: from here on its death counts. Raises StaleClaim."""
        with self._database.write_soft() as connection:
            _guarded(connection, claim, begun=True)

    def commit_compiled(self, claim: Claim, compiled: Compiled, artifacts: Sequence[Artifact] = ()) -> None:
        """Hand a compiled config on to be measured, or store why it does not compile. Raises StaleClaim."""
        assert claim.config is not None
        if compiled.status is not TrialStatus.OK:
            self._end(claim, Trial(claim.config, compiled.status, compiled.error, compiled.seconds), busy_s=0.0)
            return
        stored = {
            "status": str(compiled.status),
            "seconds": compiled.seconds,
            "resources": compiled.resources.to_dict(),
            "artifacts": [a.to_dict() for a in artifacts],
        }
        with self._database.write_soft() as connection:
            # whatever died while it compiled, it was not its doing
            handed_on = {"stage": "measure", "state": "ready", "begun": False, "worker_id": None, "deaths": 0}
            _guarded(connection, claim, compiled=stored, **handed_on)

    def commit_trial(self, claim: Claim, trial: Trial, busy_s: float) -> None:
        """Store the result of a config; it took the device ``busy_s`` seconds. Raises StaleClaim."""
        self._end(claim, trial, busy_s)

    def commit_finals(self, claim: Claim, tuned: TunedConfig, stats: Mapping[str, Any]) -> None:
        """Publish a study's answer, and end the items and jobs that wait for it. Raises StaleClaim."""
        with self._database.write(alone=True) as session:
            _guarded(session.connection(), claim, state="done", begun=False)
            study = session.get_one(StudyModel, claim.study_id)
            publish(session, study, tuned, stats)
            settling.end_study(session, study, tuned)

    def give_back(self, claim: Claim) -> None:
        """Return work that was not begun, at no cost. Raises StaleClaim."""
        with self._database.write_soft() as connection:
            _guarded(connection, claim, state="ready", begun=False, worker_id=None, attempts=claim.attempts - 1)

    def release(self, claim: Claim, error: str) -> None:
        """Give work back that a machine spoiled. Raises StaleClaim.

        It comes again later; after ``ATTEMPTS`` it is given up as if its worker had died too often.
        """
        if claim.attempts >= ATTEMPTS:
            self._give_up(claim, claim.deaths, error)
            return
        after = {"state": "ready", "begun": False, "worker_id": None}
        with self._database.write_soft() as connection:
            _guarded(connection, claim, turns.HELD_LATER, **after)

    def reap(self, dead: str | None = None) -> list[Expired]:
        """Take back what silent workers hold, or at once what the ``dead`` one holds.

        What cost ``DEATHS`` workers is quarantined: a trial so ends as one that failed; with the finals,
        their study fails.
        """
        lost = WorkModel.worker_id == dead if dead else WorkModel.lease_until < self._database.clock()
        silent = (
            select(WorkModel)
            .where(WorkModel.state == "leased", lost)
            .order_by(WorkModel.id)
            .with_for_update(skip_locked=True)
        )
        with self._database.write(alone=True) as session:
            return [_expire(session, row) for row in session.scalars(silent).all()]

    def ready(self) -> dict[tuple[str, str], int]:
        """Count what waits, by stage and by the key that may take it."""
        key = case((WorkModel.stage == "compile", StudyModel.compile_key), else_=StudyModel.class_key)
        query = (
            select(WorkModel.stage, key, func.count())
            .join(StudyModel, StudyModel.id == WorkModel.study_id)
            .where(WorkModel.state == "ready", StudyModel.wanted, StudyModel.state == RUNNING)
            .group_by(WorkModel.stage, key)
        )
        with self._database.read() as session:
            return {(stage, key): count for stage, key, count in session.execute(query)}

    def _take(
        self,
        connection: Connection,
        worker_id: str,
        study_id: str,
        stage: str,
        limit: int,
        begin: bool,
        alone_from: int,
    ) -> list[Claim]:
        values = {
            "in_study": study_id,
            "at_stage": stage,
            "count": limit,
            "worker": worker_id,
            "begin": begin,
            "alone_from": alone_from,
        }
        return _claims(connection.execute(self._take_work, values), worker_id)

    def _end(self, claim: Claim, trial: Trial, busy_s: float, kind: str = "trial") -> None:
        if self._database.dialect == "postgresql":
            told = _told(claim.study_id, trial, claim.worker_id)
            values = {**_lease(claim), "spent_s": busy_s}
            values |= {f"put_{name}": value for name, value in trial_row(trial, claim.worker_id).items()}
            values |= {"new_kind": kind, "new_at": datetime.now(UTC), "new_data": told}
            with self._database.one_statement() as connection:
                if connection.scalar(_END_AT_ONCE, values) != 1:
                    raise _stale(claim)
            return
        with self._database.write_fast() as connection:
            _guarded(connection, claim, state="done", begun=False, busy_s=busy_s)
            _put(connection, claim.study_id, trial, claim.worker_id, kind)

    def _give_up(self, claim: Claim, deaths: int, error: str) -> None:
        if claim.config is not None:
            trial = lost(claim.config, claim.stage, deaths, error, claim.attempts)
            self._end(claim, trial, busy_s=0.0, kind="quarantined")
            return
        with self._database.write(alone=True) as session:
            _guarded(session.connection(), claim, state="done", begun=False, deaths=deaths)
            study = session.get_one(StudyModel, claim.study_id)
            settling.fail_study(session, study, f"the finals {_cost(deaths, claim.attempts)}: {error}")


def _expire(session: Session, row: WorkModel) -> Expired:
    row.deaths += row.begun
    row.rank += turns.LATER if row.begun and row.deaths > 1 else 0  # once may be chance: it goes on at once
    dead = row.worker_id
    row.worker_id, row.begun = None, False
    config = Config.from_dict(row.config) if row.config else None
    quarantined = row.deaths >= DEATHS
    row.state = "done" if quarantined else "ready"
    why = f"its workers fell silent, the last one was {dead}"
    if quarantined and config is not None:
        trial = lost(config, row.stage, row.deaths, why, row.attempts)
        _put(session.connection(), row.study_id, trial, dead, "quarantined")
    elif quarantined:
        study = session.get_one(StudyModel, row.study_id)
        settling.fail_study(session, study, f"the finals {_cost(row.deaths, row.attempts)}: {why}")
    return Expired(row.study_id, row.kind, config, row.deaths, quarantined)


def lost(config: Config, stage: str, deaths: int, why: str, attempts: int) -> Trial:
    """Return the trial of a config that was given up."""
    return Trial(config, _LOST[stage], f"quarantined after it {_cost(deaths, attempts)}: {why}")


def _cost(deaths: int, attempts: int) -> str:
    return f"cost {deaths} workers or children" if deaths >= DEATHS else f"failed on machines {attempts} times"


def _guarded(connection: Connection, claim: Claim, change: Update = turns.HELD, /, **values: Any) -> None:
    """Change a claim's row if the lease is still the claim's."""
    if connection.execute(change, {**_lease(claim), **values}).rowcount != 1:
        raise _stale(claim)


def _lease(claim: Claim) -> dict[str, Any]:
    return {"of_id": claim.id, "of_epoch": claim.epoch, "of_worker": claim.worker_id}


def _stale(claim: Claim) -> StaleClaim:
    what = claim.config.label if claim.config else claim.kind
    return StaleClaim(f"work {claim.id} ({what}) was taken back from this worker (lease {claim.epoch}); result dropped")


def _put(connection: Connection, study_id: str, trial: Trial, worker_id: str | None, kind: str) -> None:
    put_trial(connection, study_id, trial, worker_id)
    events.add_for_study(connection, study_id, kind, _told(study_id, trial, worker_id))


def _told(study_id: str, trial: Trial, worker_id: str | None) -> dict[str, Any]:
    return {
        "study": study_id,
        "family": trial.config.family,
        "config": trial.config.label,
        "status": str(trial.status),
        "ratio": trial.ratio,
        "error": trial.error[:200],
        "worker": worker_id,
    }


_END_AT_ONCE = turns.end_at_once(trial_from, lambda ended: events.for_study(ended.c.study_id))


def compiled_of(stored: Mapping[str, Any]) -> tuple[Compiled, tuple[Artifact, ...]]:
    """Return what ``commit_compiled`` stored."""
    compiled = Compiled(TrialStatus(stored["status"]), stored["seconds"], "", Resources(**stored["resources"]))
    return compiled, tuple(Artifact.from_dict(a) for a in stored["artifacts"])


def _claims(rows: Iterable[Any], worker_id: str) -> list[Claim]:
    return [_claim(row, worker_id) for row in sorted(rows, key=lambda r: (r.rank, r.id))]


def _claim(row: Any, worker_id: str) -> Claim:
    compiled, artifacts = compiled_of(row.compiled) if row.compiled else (None, ())
    return Claim(
        id=row.id,
        epoch=row.epoch,
        worker_id=worker_id,
        study_id=row.study_id,
        kind=row.kind,
        stage=row.stage,
        config=Config.from_dict(row.config) if row.config else None,
        compiled=compiled,
        artifacts=artifacts,
        attempts=row.attempts,
        deaths=row.deaths,
    )
