"""The shapes of requests and answers, for /openapi.json.

They describe; ``tuner.job.JobRequest.from_dict`` and ``db.values`` decide. What a schema cannot say,
as that heads_q is a multiple of heads_kv, is refused all the same. The tests hold both together.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from api.http.limits import MAX_LENGTHS, MAX_PATTERN
from db.values import JobState
from tuner.job import MAX_NAME, MAX_STEP_S, MAX_WORKLOADS
from tuner.lengths import MAX_SEQUENCES
from tuner.lookup import MatchKind
from tuner.spec import MAX_SECONDS, MIN_SECONDS, StudySettings
from tuner.target import Toolchain
from tuner.trial import Verdict
from tuner.workload import DTYPE_SHORT, DTYPES, LAYOUTS, MAX_SIZE, OPS

Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Lengths = (
    Annotated[
        str,
        Field(
            max_length=MAX_LENGTHS,
            description="One length for each of batch packed sequences, or how to draw them.",
            examples=["512,1024*3", "mean=2048,seed=0"],
        ),
    ]
    | Annotated[list[Annotated[int, Field(ge=0, le=MAX_SIZE)]], Field(max_length=MAX_SEQUENCES)]
    | None
)
Scope = Literal["read", "submit", "admin"]
ARCH = "^(cpu|fake|sm_[0-9]{2,3}a?)$"


def _one_of(values: Iterable[str]) -> Any:
    return Field(json_schema_extra={"enum": list(values)})


class _Exact(BaseModel):
    """Nothing that is not named, nothing converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


_FOLLOWS: Any = None  # a default that says nothing of the type: with lengths it follows from them, without it is needed
DenseSize = Annotated[Size, Field(description="Needed, unless it follows from lengths.")]


class WorkloadFields(_Exact):
    """One attention problem, as in ``tuner.workload``."""

    batch: DenseSize = _FOLLOWS
    heads_q: Size
    heads_kv: Size
    seqlen_q: DenseSize = _FOLLOWS
    seqlen_k: DenseSize = _FOLLOWS
    head_dim: Annotated[int, Field(ge=8, le=512, multiple_of=8)]
    head_dim_v: Annotated[int, Field(ge=0, le=512, multiple_of=8, description="0: as head_dim.")] = 0
    op: Annotated[str, _one_of(OPS)] = "fwd"
    dtype: Annotated[str, _one_of((*DTYPES, *DTYPE_SHORT))] = "bfloat16"
    pattern: Annotated[
        str,
        Field(
            min_length=1,
            max_length=MAX_PATTERN,
            description="Masks joined by & and score modifications by +; in a query write + as %2B.",
            examples=["causal", "sliding_window(1024)", "causal & document(mean=512) + softcap(30)"],
        ),
    ] = "full"
    layout: Annotated[str, _one_of(LAYOUTS)] = "dense"
    deterministic: bool = False
    lengths: Annotated[Lengths, Field(description="Of queries and keys alike; makes the layout varlen.")] = None
    lengths_q: Lengths = None
    lengths_k: Lengths = None


class WorkloadBody(WorkloadFields):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None


class SettingsBody(_Exact):
    """How hard to try; see ``tuner.spec.StudySettings``."""

    max_trials: Annotated[int, Field(ge=1, le=100_000)] = StudySettings.max_trials
    max_seconds: Annotated[float, Field(ge=MIN_SECONDS, le=MAX_SECONDS)] | None = StudySettings.max_seconds
    margin: Annotated[float, Field(ge=0, le=1)] = StudySettings.margin
    tie_margin: Annotated[float, Field(ge=0, le=1)] = StudySettings.tie_margin
    finalists: Annotated[int, Field(ge=1, le=64)] = StudySettings.finalists
    min_rounds: Annotated[int, Field(ge=5, le=100_000)] = StudySettings.min_rounds
    max_rounds: Annotated[int, Field(ge=5, le=100_000)] = StudySettings.max_rounds
    confidence: Annotated[float, Field(ge=0.5, le=0.9999)] = StudySettings.confidence
    compile_timeout_s: Annotated[float, Field(ge=0.1, le=MAX_STEP_S)] = StudySettings.compile_timeout_s
    run_timeout_s: Annotated[float, Field(ge=0.1, le=MAX_STEP_S)] = StudySettings.run_timeout_s
    compile_memory_bytes: Annotated[int, Field(ge=64 << 20, le=1 << 42)] = StudySettings.compile_memory_bytes
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = StudySettings.seed


_JOB: JsonDict = {
    "name": "prefill",
    "arch": "sm_90a",
    "settings": {"max_trials": 32},
    "workloads": [
        {
            **{"pattern": "sliding_window(1024)", "batch": 1, "heads_q": 16, "heads_kv": 16},
            **{"seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128},
        }
    ],
}


class JobBody(_Exact):
    """A submission."""

    model_config = ConfigDict(json_schema_extra={"examples": [_JOB]})
    workloads: Annotated[list[WorkloadBody], Field(min_length=1, max_length=MAX_WORKLOADS)]
    arch: Annotated[str, Field(pattern="^(auto|cpu|fake|sm_[0-9]{2,3}a?)$")] = "auto"
    policy: Literal["auto", "graph", "eager"] = "auto"
    families: list[str] = []
    settings: SettingsBody = SettingsBody()
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    force: bool = False
    name: Annotated[str, Field(max_length=MAX_NAME)] = ""


class KeyBody(_Exact):
    """A key to make."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "ci", "scopes": ["read", "submit"]}]})
    name: Annotated[str, Field(min_length=1, max_length=100)]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=4)]
    rate_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None


class Problem(BaseModel):
    """An error, by RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[dict[str, Any]] = []


class ConfigValue(_Exact):
    family: str
    version: int
    params: dict[str, int | float | bool | str]


class Answer(_Exact):
    """What a workload got: ``speedup`` with its interval is over the default."""

    verdict: Verdict
    config: ConfigValue
    default: ConfigValue
    label: str
    speedup: float | None
    low: float | None
    high: float | None
    ties: int
    extras: dict[str, Any]
    reason: str


class JobItem(_Exact):
    position: int
    name: str
    workload: WorkloadFields
    state: JobState
    study_id: str | None
    error: str
    trials: int
    answer: Answer | None


class Job(_Exact):
    """A job; lists leave its items out."""

    id: str
    name: str
    state: JobState
    priority: int
    arch: str
    policy: str
    families: list[str]
    force: bool
    settings: SettingsBody
    counts: dict[str, int]
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    items: list[JobItem]


class JobPage(_Exact):
    items: list[Job]
    next: str | None


class JobEvent(_Exact):
    cursor: str
    job_id: str
    kind: str
    at: datetime
    data: dict[str, Any]


class EventPage(_Exact):
    """``next`` is the cursor to go on from, also at the end: later events come after it."""

    items: list[JobEvent]
    next: str


class ToolchainValue(_Exact):
    driver: str
    cuda: str
    torch: str
    triton: str
    cutlass_dsl: str
    flash_attn_4: str
    python: str


class TargetValue(_Exact):
    model: str
    arch: str
    num_sms: int
    power_cap_w: int | None
    device: str
    device_index: int
    uuid: str


class Deviation(_Exact):
    share: float
    studies: int
    suspicious: bool


class Worker(_Exact):
    id: str
    host: str
    pid: int
    roles: list[str]
    class_key: str
    target: TargetValue | None
    toolchain: ToolchainValue
    doing: str
    started_at: datetime
    heartbeat_at: datetime
    stopped_at: datetime | None
    alive: bool
    deviation: Deviation | None


class Ready(_Exact):
    stage: str
    key: str
    count: int


class Fleet(_Exact):
    """Who works, and what waits."""

    workers: list[Worker]
    ready: list[Ready]


class Key(_Exact):
    id: str
    name: str
    prefix: str
    scopes: list[Scope]
    rate_per_minute: int | None
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


class KeyList(_Exact):
    items: list[Key]


class NewKey(Key):
    """The key's text is shown this once."""

    key: str


class Match(_Exact):
    """What to run, and how it was found; ``config`` is null for the stock kernel."""

    kind: MatchKind
    config: ConfigValue | None
    extras: dict[str, Any]
    verdict: Verdict | None
    speedup: float | None
    distance: float | None
    warnings: list[str]
    reason: str
    workload: WorkloadFields | None
    study_id: str | None
    version: int | None


class Health(_Exact):
    status: Literal["ok"]


class ConfigsQuery(WorkloadFields):
    """A lookup: a workload, where it runs, and with what. What is left out is taken as equal."""

    arch: Annotated[str, Field(pattern=ARCH)]
    policy: Literal["auto", "graph", "eager"] = "auto"
    model: Annotated[str, Field(max_length=200, description="As in NVIDIA H200.")] = ""
    num_sms: Annotated[int, Field(ge=0, le=100_000)] = 0
    power_cap_w: Annotated[int, Field(ge=0, le=100_000)] | None = None
    driver: str = Toolchain.driver
    cuda: str = ""
    torch: str = ""
    triton: str = ""
    cutlass_dsl: str = ""
    flash_attn_4: str = ""
    python: str = ""
