"""Stored trials of other studies, for a search to begin with: see ``tuner.priors``.

Another run of the same study is no neighbour: who measures again wants to know, not to be told.
"""

from __future__ import annotations

from contextlib import suppress

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from db.models import StudyModel, TrialModel
from db.session import Database
from db.study import digest, target_of
from tuner.errors import Unreadable
from tuner.priors import Neighbour, nearest
from tuner.spec import StudySpec
from tuner.trial import Trial
from tuner.workload import Workload

_LOOKED_AT = 1000  # studies of a policy on an architecture, the newest first


def neighbours(database: Database, spec: StudySpec) -> list[Neighbour]:
    """Return the studies most like ``spec`` with their trials, the most alike first.

    Only those of the same policy and architecture, of each workload and target the newest that measured
    something; by any toolchain, since a newer compiler moves times, and seldom which tiles are good. The
    same stored studies give the same answer.
    """
    measured = exists().where(TrialModel.study_id == StudyModel.id, TrialModel.ratio.is_not(None))
    query = (
        select(StudyModel.id, StudyModel.workload, StudyModel.target)
        .where(StudyModel.policy == spec.policy, StudyModel.spec_key_hash != digest(spec.key), measured)
        .where(StudyModel.target_key.startswith(f"t1|{spec.target.arch}|", autoescape=True))
        .order_by(StudyModel.created_at.desc(), StudyModel.id)
        .limit(_LOOKED_AT)
    )
    with database.read() as session:
        ids: dict[Neighbour, str] = {}
        for row in session.execute(query):
            with suppress(Unreadable):  # a study of another version helps nobody here, and hinders nobody
                workload = database.value(Workload.from_dict, row.workload)
                ids.setdefault(Neighbour(workload, database.value(target_of, row.target), ()), row.id)
        found = []
        for n in nearest(spec.workload, spec.target, list(ids)):
            with suppress(Unreadable):
                found.append(Neighbour(n.workload, n.target, _trials(database, session, ids[n], spec)))
        return found


def _trials(database: Database, session: Session, study_id: str, spec: StudySpec) -> tuple[Trial, ...]:
    names = [name.partition("/")[0] for name in spec.families]
    query = select(TrialModel.trial).where(TrialModel.study_id == study_id, TrialModel.family.in_(names))
    return tuple(database.value(Trial.from_dict, stored) for stored in session.scalars(query.order_by(TrialModel.id)))
