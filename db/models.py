"""The tables. A change here needs a migration beside it in ``db/migrations/versions``.

Texts that may grow long (a workload names every document's length) are never in a B-tree index:
PostgreSQL refuses index rows above 2,704 bytes. Digests, or a hash index, stand in for them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    DateTime,
    Dialect,
    FetchedValue,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    false,
    text,
)
from sqlalchemy import UniqueConstraint as Unique
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

RUNNING = "running"
DONE = "done"
FINALS = "finals"  # the kind of the work that ends a study
FAILED = "failed"  # given up; a later job begins it again


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, always in UTC: SQLite has no time zones, and PostgreSQL answers in its own."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or value.tzinfo is not None:
            return None if value is None else value.astimezone(UTC)
        return value.replace(tzinfo=UTC)


class PlainText(TypeDecorator[str]):
    """A text that may come from a crashed compiler: PostgreSQL takes no NUL, and UTF-8 no lone surrogate."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


class Base(DeclarativeBase):
    """Common to all tables: every constraint has a name, so that a migration can drop it."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class StudyModel(Base):
    """One run of the search for one spec; runs of a spec count from 1."""

    __tablename__ = "studies"
    __table_args__ = (Unique("spec_key_hash", "run"),)

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    spec_key_hash: Mapped[str] = mapped_column(String(64), index=True)  # SHA-256 of StudySpec.key
    run: Mapped[int] = mapped_column(Integer)
    workload: Mapped[dict[str, Any]] = mapped_column(JSON)
    workload_key: Mapped[str] = mapped_column(Text)
    target: Mapped[dict[str, Any]] = mapped_column(JSON)
    target_key: Mapped[str] = mapped_column(Text)
    toolchain: Mapped[dict[str, Any]] = mapped_column(JSON)
    toolchain_key: Mapped[str] = mapped_column(Text)
    policy: Mapped[str] = mapped_column(String(16))
    families: Mapped[list[str]] = mapped_column(JSON)
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    stats: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    # Of studies that a job wants; a study of `flashtune tune` has none of it.
    class_key: Mapped[str] = mapped_column(String(80), default="", server_default=text("''"))  # who may measure it
    compile_key: Mapped[str] = mapped_column(
        String(80), default="", server_default=text("''")
    )  # who may compile for it
    wanted: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    priority: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    served_s: Mapped[float] = mapped_column(
        Float, default=0.0, server_default="0"
    )  # virtual time of its job: see db.work
    planned: Mapped[int] = mapped_column(Integer, default=0, server_default="0")  # times that work was planned


class TrialModel(Base):
    """One config tried in one study; ids give the order in which configs were first added."""

    __tablename__ = "trials"
    __table_args__ = (Unique("study_id", "config_key"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"))
    config_key: Mapped[str] = mapped_column(Text)
    family: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(String(16))
    trial: Mapped[dict[str, Any]] = mapped_column(JSON)
    ratio: Mapped[float | None] = mapped_column(Float)
    worker_id: Mapped[str | None] = mapped_column(String(32))  # who measured it, in a fleet
    default_us: Mapped[float | None] = mapped_column(Float)  # the default's median beside it: do workers agree?
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class TunedConfigModel(Base):
    """The answer of a study; ``version`` counts the answers to one ``answer_hash``."""

    __tablename__ = "tuned_configs"
    __table_args__ = (
        Unique("study_id"),
        Unique("answer_hash", "version"),
        Index(None, "workload_key", postgresql_using="hash"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"))
    answer_hash: Mapped[str] = mapped_column(String(64))  # SHA-256 of the workload's to the policy's key
    version: Mapped[int] = mapped_column(Integer)
    workload_key: Mapped[str] = mapped_column(Text)
    target_key: Mapped[str] = mapped_column(Text)
    toolchain_key: Mapped[str] = mapped_column(Text)
    policy: Mapped[str] = mapped_column(String(16))
    config_key: Mapped[str] = mapped_column(Text)
    verdict: Mapped[str] = mapped_column(String(16))
    tuned: Mapped[dict[str, Any]] = mapped_column(JSON)
    published_at: Mapped[datetime] = mapped_column(UtcDateTime)


class JobModel(Base):
    """What a user submitted; its workloads are ``job_items``."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16), index=True)
    priority: Mapped[int] = mapped_column(Integer)
    owner: Mapped[str] = mapped_column(Text)
    request: Mapped[dict[str, Any]] = mapped_column(JSON)  # a JobRequest without its workloads
    base_s: Mapped[float] = mapped_column(Float)  # the virtual time at which it joined the others: see db.work
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class JobItemModel(Base):
    """One workload of a job, and the study that answers it once a machine is found."""

    __tablename__ = "job_items"
    __table_args__ = (Unique("job_id", "position"), Index(None, "state"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    position: Mapped[int] = mapped_column(Integer)
    name: Mapped[str] = mapped_column(Text)
    workload: Mapped[dict[str, Any]] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(String(16))
    study_id: Mapped[str | None] = mapped_column(ForeignKey("studies.id"), index=True)
    error: Mapped[str] = mapped_column(PlainText)
    known: Mapped[bool] = mapped_column(Boolean)  # answered from the database: it took no device's time
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)


class WorkModel(Base):
    """A piece of work of a study: one config to compile and measure, or the finals.

    ``epoch`` is the fencing token: it counts the leases, and only the newest may commit.
    """

    __tablename__ = "work"
    __table_args__ = (
        Unique("study_id", "kind", "config_key"),
        Index("ix_work_ready", "study_id", "stage", "state", "rank", "id"),
        Index("ix_work_lease", "state", "lease_until"),
        Index("ix_work_worker_id", "worker_id", "state"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"))
    kind: Mapped[str] = mapped_column(String(8))  # trial or finals
    config_key: Mapped[str] = mapped_column(Text)
    config: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    stage: Mapped[str] = mapped_column(String(8))  # compile or measure
    state: Mapped[str] = mapped_column(String(12))  # ready, leased, done
    rank: Mapped[int] = mapped_column(Integer)  # within the study; lower goes first
    lease_until: Mapped[float] = mapped_column(Float)  # seconds since 1970, by the database's clock
    epoch: Mapped[int] = mapped_column(Integer)
    attempts: Mapped[int] = mapped_column(Integer)
    begun: Mapped[bool] = mapped_column(Boolean)  # in the hands of the worker, not only in its queue
    deaths: Mapped[int] = mapped_column(Integer)  # of workers or children that had begun it
    worker_id: Mapped[str | None] = mapped_column(String(32))
    compiled: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    busy_s: Mapped[float] = mapped_column(Float)  # device time that it took


class EventModel(Base):
    """What happened to a job. ``xid`` is PostgreSQL's transaction id, so that readers can follow commits."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "job_id", "xid", "id"), Index(None, "xid", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    xid: Mapped[int] = mapped_column(BigInteger, server_default=FetchedValue())
    job_id: Mapped[str] = mapped_column(String(12))  # no foreign key: all workers would lock the one row for it
    kind: Mapped[str] = mapped_column(String(16))
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    data: Mapped[dict[str, Any]] = mapped_column(JSON)


class WorkerModel(Base):
    """A process that takes work, or took it."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(Integer)
    roles: Mapped[list[str]] = mapped_column(JSON)
    class_key: Mapped[str] = mapped_column(String(80))
    compile_key: Mapped[str] = mapped_column(String(80))
    target: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    toolchain: Mapped[dict[str, Any]] = mapped_column(JSON)
    doing: Mapped[str] = mapped_column(PlainText)
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    heartbeat_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    stopped_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class ApiKeyModel(Base):
    """An API key, by the SHA-256 of its text: the text itself is shown once and kept nowhere."""

    __tablename__ = "api_keys"
    __table_args__ = (Unique("sha256"),)

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    prefix: Mapped[str] = mapped_column(String(12))
    sha256: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    rate_per_minute: Mapped[int | None] = mapped_column(Integer)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class IdempotencyModel(Base):
    """Which job an Idempotency-Key made, and from which body."""

    __tablename__ = "idempotency_keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # SHA-256 of owner and key
    body_hash: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)


class ArtifactModel(Base):
    """A compiled object, in fleets without a shared folder."""

    __tablename__ = "artifacts"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    data: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)  # or published again
