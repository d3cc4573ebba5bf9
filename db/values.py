"""What the store hands out: jobs, pieces of work, workers, keys. Frozen values that turn into plain JSON."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

from tuner.artifact import Artifact
from tuner.compile import Compiled
from tuner.config import Config
from tuner.errors import InputError, NotFound
from tuner.target import Target, Toolchain
from tuner.trial import TunedConfig

T = TypeVar("T")

SCOPES = ("read", "submit", "admin")
IDEMPOTENCY_KEY = "[!-~]{1,255}"
SILENT_AFTER = timedelta(seconds=60)  # without a heartbeat, a worker counts as gone


class JobState(enum.StrEnum):
    """Where a job, or one workload of it, stands."""

    QUEUED = "queued"  # accepted; no machine has begun it
    RUNNING = "running"
    DONE = "done"  # every workload has an answer
    FAILED = "failed"  # at least one workload could not be tuned, and all have ended
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


LIVE = tuple(str(s) for s in JobState if not s.ended)
LAST_KINDS = tuple(str(s) for s in JobState if s.ended)  # the kinds of event after which a job has no more


@dataclass(frozen=True)
class JobItem:
    """One workload of a job; ``study_id`` is None until a machine is found, ``tuned`` until it is answered.

    ``workload`` is its document; as it is stored, where that is none of this version's.
    """

    position: int
    name: str
    workload: Mapping[str, Any]
    state: JobState
    study_id: str | None
    error: str
    trials: int
    tuned: TunedConfig | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "name": self.name,
            "workload": dict(self.workload),
            "state": str(self.state),
            "study_id": self.study_id,
            "error": self.error,
            "trials": self.trials,
            "answer": answer_dict(self.tuned) if self.tuned else None,
        }


@dataclass(frozen=True)
class Job:
    """One submission. ``counts`` holds how many of its workloads are in which state; lists leave ``items`` out."""

    id: str
    name: str
    state: JobState
    priority: int
    arch: str
    policy: str
    families: tuple[str, ...]
    force: bool
    owner: str
    settings: Mapping[str, Any]
    counts: Mapping[str, int]
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    items: tuple[JobItem, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "state": str(self.state),
            "priority": self.priority,
            "arch": self.arch,
            "policy": self.policy,
            "families": list(self.families),
            "force": self.force,
            "settings": dict(self.settings),
            "counts": dict(self.counts),
            "created_at": self.created_at.isoformat(),
            "updated_at": self.updated_at.isoformat(),
            "finished_at": self.finished_at.isoformat() if self.finished_at else None,
            "items": [i.to_dict() for i in self.items],
        }


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job. Cursors are opaque; later ones belong to later commits."""

    cursor: str
    job_id: str
    kind: str
    at: datetime
    data: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "at": self.at.isoformat()}


@dataclass(frozen=True)
class Page(Generic[T]):
    """Part of a list; ``next`` is the cursor of the following part, None at the end."""

    items: list[T]
    next: str | None


@dataclass(frozen=True)
class Keep:
    """How long what has ended is kept: see ``db.retention``."""

    records: timedelta = timedelta(days=30)
    workers: timedelta = timedelta(days=7)


@dataclass(frozen=True)
class Claim:
    """A piece of work leased to one worker. ``epoch`` counts the leases: a result of an older one is refused."""

    id: int
    epoch: int
    worker_id: str
    study_id: str
    kind: str  # trial or finals
    stage: str  # compile or measure
    config: Config | None  # None for finals
    compiled: Compiled | None  # None if nothing was compiled ahead
    artifacts: tuple[Artifact, ...]
    attempts: int  # leases so far, this one included
    deaths: int  # of them, how many ended with their worker


@dataclass(frozen=True)
class Expired:
    """A piece of work whose worker fell silent: returned, or quarantined for killing too many."""

    study_id: str
    kind: str
    config: Config | None
    deaths: int
    quarantined: bool


@dataclass(frozen=True)
class WorkerInfo:
    """One process that takes work. ``target`` is None for a worker that only compiles."""

    id: str
    host: str
    pid: int
    roles: tuple[str, ...]
    class_key: str  # what it can measure
    compile_key: str  # what it can compile for
    target: Target | None
    toolchain: Toolchain
    started_at: datetime
    heartbeat_at: datetime
    stopped_at: datetime | None = None
    doing: str = ""

    @property
    def node(self) -> str:
        """What stays the same when a worker is started again: its host, and its GPU's UUID."""
        return f"{self.host} {self.target.uuid}".strip() if self.target else self.host

    def alive(self, now: datetime | None = None) -> bool:
        return self.stopped_at is None and (now or datetime.now(UTC)) - self.heartbeat_at < SILENT_AFTER

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "host": self.host,
            "pid": self.pid,
            "roles": list(self.roles),
            "class_key": self.class_key,
            "target": self.target.to_dict() if self.target else None,
            "toolchain": self.toolchain.to_dict(),
            "doing": self.doing,
            "started_at": self.started_at.isoformat(),
            "heartbeat_at": self.heartbeat_at.isoformat(),
            "stopped_at": self.stopped_at.isoformat() if self.stopped_at else None,
            "alive": self.alive(),
        }


@dataclass(frozen=True)
class ApiKey:
    """A key without its secret: ``prefix`` is the beginning of its text, to tell keys apart."""

    id: str
    name: str
    prefix: str
    scopes: tuple[str, ...]
    rate_per_minute: int | None
    created_at: datetime
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None

    def allows(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "prefix": self.prefix,
            "scopes": list(self.scopes),
            "rate_per_minute": self.rate_per_minute,
            "created_at": self.created_at.isoformat(),
            "last_used_at": self.last_used_at.isoformat() if self.last_used_at else None,
            "revoked_at": self.revoked_at.isoformat() if self.revoked_at else None,
        }


@dataclass(frozen=True)
class StudyProgress:
    """A running study as the dispatcher sees it."""

    id: str
    class_key: str
    finals: bool  # the finals are planned


def checked_ref(ref: str) -> str:
    """Return a job's id, or its beginning, in its one spelling. Raises NotFound if it can be none."""
    wanted = ref.strip().lower()
    if not re.fullmatch(r"[0-9a-f]{1,12}", wanted):
        raise NotFound(f"{ref!r:.60} is no job id (up to 12 hexadecimal digits); see `flashtune jobs`")
    return wanted


def checked_key(key: str) -> str:
    """Return an Idempotency-Key that fits into an HTTP header. Raises InputError."""
    if not re.fullmatch(IDEMPOTENCY_KEY, key):
        raise InputError(
            f"idempotency key {key!r:.60} is no text of 1 to 255 printable ASCII characters without blanks"
        )
    return key


def answer_dict(tuned: TunedConfig) -> dict[str, Any]:
    """Return an answer without its raw samples."""
    return {
        "verdict": str(tuned.verdict),
        "config": tuned.config.to_dict(),
        "default": tuned.default.to_dict(),
        "label": f"{tuned.config.family} {tuned.config.label}".strip(),
        "speedup": tuned.speedup,
        "low": tuned.low,
        "high": tuned.high,
        "ties": len(tuned.ties),
        "extras": dict(tuned.extras),
        "reason": tuned.reason,
    }
