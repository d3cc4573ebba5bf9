"""Stored trials of other studies, for a search to begin with: see ``tuner.priors``.

Another run of the same study is no neighbour: who measures again wants to know, not to be told.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from db.models import StudyModel, TrialModel
from db.session import Database
from db.study import digest, target_of
from tuner.errors import Unreadable
from tuner.families import load
from tuner.families.joint import Joint
from tuner.priors import Neighbour, added, nearest
from tuner.spec import StudySpec
from tuner.trial import Trial
from tuner.workload import JOINT_OP, Workload

_LOOKED_AT = 1000  # studies of a policy on an architecture, the newest first


def neighbours(database: Database, spec: StudySpec) -> list[Neighbour]:
    """Return the studies most like ``spec`` with their trials, the most alike first.

    Only those of the same policy and architecture, of each workload and target the newest that measured
    something; by any toolchain, since a newer compiler moves times, and seldom which tiles are good. Where both
    directions are asked for, studies of each direction of a workload count as one of both. The same stored
    studies give the same answer.
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
        names = [name.partition("/")[0] for name in spec.families]

        def stored(n: Neighbour, *families: str) -> Neighbour:
            return Neighbour(n.workload, n.target, _trials(database, session, ids[n], families))

        pairs: list[Joint] = [f for f in map(load, names) if isinstance(f, Joint)]
        halves = _halves(ids) if pairs else {}
        found = []
        for n in nearest(spec.workload, spec.target, [*ids, *halves]):
            with suppress(Unreadable):
                if n in ids:
                    found.append(stored(n, *names))
                    continue
                forward, backward = halves[n]
                for f in pairs:
                    mine, theirs = stored(forward, f.forward.family.name), stored(backward, f.backward.family.name)
                    found.append(added(mine, theirs, f.join))
        return found


def _halves(ids: Collection[Neighbour]) -> dict[Neighbour, tuple[Neighbour, Neighbour]]:
    """Return the workloads whose both directions were studied, but not together, with these two studies."""
    pairs = ((n, Neighbour(n.workload.with_(op="bwd"), n.target, ())) for n in ids if n.workload.op == "fwd")
    both = {Neighbour(n.workload.with_(op=JOINT_OP), n.target, ()): (n, other) for n, other in pairs if other in ids}
    return {n: halves for n, halves in both.items() if n not in ids}


def _trials(database: Database, session: Session, study_id: str, names: Sequence[str]) -> tuple[Trial, ...]:
    query = select(TrialModel.trial).where(TrialModel.study_id == study_id, TrialModel.family.in_(names))
    return tuple(database.value(Trial.from_dict, stored) for stored in session.scalars(query.order_by(TrialModel.id)))
