"""The store: studies and what they published, and the ways to jobs, work, workers and keys.

Everything is durable when a call returns, and a call that fails changes nothing. Whatever a person
can cause is raised as ``tuner.errors.StorageError``.

    >>> with Store.open("/srv/flashtune/flashtune.db") as store:  # doctest: +SKIP
    ...     study = store.begin_study(spec, settings)
    ...     study.add_trial(trial)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite

from db.fleet import Fleet
from db.jobs import Jobs
from db.keys import Keys
from db.models import ArtifactModel, StudyModel, TrialModel, TunedConfigModel
from db.planning import Planning
from db.priors import neighbours
from db.retention import prune
from db.session import Database, open_database
from db.study import StudyHandle, begin, target_of, toolchain_of
from db.values import Keep
from db.work import LEASE_S, Work
from tuner.config import Config
from tuner.errors import InputError
from tuner.lookup import Entry
from tuner.priors import Neighbour
from tuner.spec import StudySettings, StudySpec
from tuner.target import Target
from tuner.trial import TrialStatus, TunedConfig, Verdict
from tuner.workload import Workload

__all__ = ["Published", "Store", "StudyHandle", "StudyRow"]


@dataclass(frozen=True)
class StudyRow:
    """One line of a list of studies; ``verdict``, ``config`` and ``speedup`` are None before an answer."""

    id: str
    run: int
    workload: Workload
    target: Target
    policy: str
    state: str  # running or done
    trials: int
    ok: int  # how many of them compiled, were right and were measured
    verdict: Verdict | None
    config: Config | None
    speedup: float | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True)
class Published(Entry):
    """A published answer; ``version`` counts the answers for one workload, target, toolchain and policy."""

    published_at: datetime


class Store:
    """Every study of one database. Use it as a context manager, or call ``close``."""

    def __init__(self, database: Database, lease_s: float = LEASE_S) -> None:
        self._database = database
        self.jobs = Jobs(database)
        self.planning = Planning(database)
        self.work = Work(database, lease_s)
        self.fleet = Fleet(database, lease_s)
        self.keys = Keys(database)

    @classmethod
    def open(cls, url: str, *, create: bool = True, read_only: bool = False, lease_s: float = LEASE_S) -> Store:
        """Open the database at ``url``, a SQLAlchemy URL or the path of a SQLite file.

        ``create`` makes the file, its folder (mode 0700) and the tables where they are missing. The
        schema is brought to the newest revision; any number of processes may do so at once. A worker
        that is silent for ``lease_s`` seconds loses the work that it holds.

        Raises:
            StorageError: naming the database without its password, and the next step.
        """
        return cls(open_database(url, create=create, read_only=read_only), lease_s)

    @property
    def location(self) -> str:
        """The path, or the URL without its secrets: for people to read."""
        return self._database.label

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def begin_study(self, spec: StudySpec, settings: StudySettings, *, force: bool = False) -> StudyHandle:
        """Return the newest study of ``spec``, running or done, or a new one if there is none.

        With ``force`` a done study is left alone and the next run begun; a running one goes on. A
        running study takes the new settings, a done one keeps those that it was answered under.
        """
        with self._database.write(alone=True) as session:
            row = begin(session, spec, settings, force=force)
            return StudyHandle(self._database, row)

    def neighbours(self, spec: StudySpec) -> list[Neighbour]:
        """Return studies of workloads like that of ``spec``, with their trials, the most alike first."""
        return neighbours(self._database, spec)

    def artifacts_put(self, sha256: str, data: bytes) -> None:
        """Keep a compiled object under its SHA-256; one that is there is replaced, since it may be damaged."""
        row = {"sha256": sha256, "data": data, "created_at": datetime.now(UTC)}
        table = postgresql if self._database.dialect == "postgresql" else sqlite
        insert = table.insert(ArtifactModel).values(row)
        new = {name: insert.excluded[name] for name in ("data", "created_at")}
        replace = insert.on_conflict_do_update(index_elements=["sha256"], set_=new)
        with self._database.write() as session:
            session.execute(replace)

    def artifacts_get(self, sha256: str) -> bytes | None:
        """Return the bytes kept under a SHA-256, unchecked; None if there are none."""
        with self._database.read() as session:
            return session.scalar(select(ArtifactModel.data).where(ArtifactModel.sha256 == sha256))

    def prune(self, keep: Keep, now: datetime | None = None) -> dict[str, int]:
        """Forget a little of what has ended long ago, as ``db.retention`` says; return how many rows, by table."""
        return prune(self._database, keep, now)

    def study(self, ref: str) -> StudyHandle:
        """Return the study with this id, or the only one whose id begins with ``ref``.

        Raises:
            InputError: if there is none or more than one.
        """
        wanted = ref.strip().lower()
        if not re.fullmatch(r"[0-9a-f]{1,12}", wanted):
            raise InputError(f"{ref!r} is no study id (up to 12 hexadecimal digits); see `flashtune studies`")
        query = select(StudyModel).where(StudyModel.id.startswith(wanted)).order_by(StudyModel.id).limit(5)
        with self._database.read() as session:
            rows = session.scalars(query).all()
            if not rows:
                raise InputError(f"no study has the id {ref!r}; see `flashtune studies`")
            if len(rows) > 1:
                among = ", ".join(row.id for row in rows)
                raise InputError(f"{ref!r} begins several ids ({among}); give more of it, see `flashtune studies`")
            return StudyHandle(self._database, rows[0])

    def studies(self, limit: int = 50) -> list[StudyRow]:
        """Return the last ``limit`` studies, the newest first."""
        if limit < 1:
            raise InputError(f"limit is {limit}; it must be at least 1")
        count = select(func.count()).where(TrialModel.study_id == StudyModel.id).correlate(StudyModel)
        ok = count.where(TrialModel.status == str(TrialStatus.OK))
        query = (
            select(StudyModel, count.scalar_subquery(), ok.scalar_subquery(), TunedConfigModel.tuned)
            .outerjoin(TunedConfigModel, TunedConfigModel.study_id == StudyModel.id)
            .order_by(StudyModel.created_at.desc(), StudyModel.run.desc(), StudyModel.id)
            .limit(limit)
        )
        with self._database.read() as session:
            return [self._study_row(*found) for found in session.execute(query)]

    def published_mark(self) -> tuple[int, int]:
        """Return what changes whenever ``published`` does, and is cheap to ask: versions only grow."""
        query = select(func.count(), func.coalesce(func.sum(TunedConfigModel.version), 0))
        with self._database.read() as session:
            count, versions = session.execute(query).one()
            return count, int(versions)

    def published(self, *, workload_key: str | None = None) -> list[Published]:
        """Return the newest answer for each workload, target, toolchain and policy, in the order of these."""
        answer = TunedConfigModel
        newest = select(answer.answer_hash, func.max(answer.version).label("version")).group_by(answer.answer_hash)
        if workload_key is not None:
            newest = newest.where(answer.workload_key == workload_key)
        last = newest.subquery()
        query = (
            select(answer, StudyModel)
            .join(last, (last.c.answer_hash == answer.answer_hash) & (last.c.version == answer.version))
            .join(StudyModel, StudyModel.id == answer.study_id)
            .order_by(answer.workload_key, answer.target_key, answer.toolchain_key, answer.policy)
        )
        with self._database.read() as session:
            return [self._published(*found) for found in session.execute(query)]

    def answer(self, study: StudyHandle) -> Published | None:
        """Return the answer of one study, published still or replaced by a newer study's; None without one."""
        query = select(TunedConfigModel, StudyModel).join(StudyModel, StudyModel.id == TunedConfigModel.study_id)
        with self._database.read() as session:
            found = session.execute(query.where(StudyModel.id == study.id)).one_or_none()
            return None if found is None else self._published(*found)

    def _study_row(self, row: StudyModel, trials: int, ok: int, stored: dict[str, Any] | None) -> StudyRow:
        tuned = None if stored is None else self._database.value(TunedConfig.from_dict, stored)
        return StudyRow(
            id=row.id,
            run=row.run,
            workload=self._database.value(Workload.from_dict, row.workload),
            target=self._database.value(target_of, row.target),
            policy=row.policy,
            state=row.state,
            trials=trials,
            ok=ok,
            verdict=tuned.verdict if tuned else None,
            config=tuned.config if tuned else None,
            speedup=tuned.speedup if tuned else None,
            created_at=row.created_at,
            finished_at=row.finished_at,
        )

    def _published(self, answer: TunedConfigModel, row: StudyModel) -> Published:
        return Published(
            workload=self._database.value(Workload.from_dict, row.workload),
            target=self._database.value(target_of, row.target),
            toolchain=self._database.value(toolchain_of, row.toolchain),
            policy=answer.policy,
            tuned=self._database.value(TunedConfig.from_dict, answer.tuned),
            study_id=answer.study_id,
            version=answer.version,
            published_at=answer.published_at,
        )
