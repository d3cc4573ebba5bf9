"""The tables. A change here needs a migration beside it in ``db/migrations/versions``.

Texts that may grow long (a workload names every document's length) are never in a B-tree index:
PostgreSQL refuses index rows above 2,704 bytes. Digests, or a hash index, stand in for them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Dialect, Float, ForeignKey, Index, Integer, MetaData, String, Text
from sqlalchemy import UniqueConstraint as Unique
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

RUNNING = "running"
DONE = "done"


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
