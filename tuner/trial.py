"""What came of a config: trials, the finals, and the published winner.

All values here are frozen and turn into plain JSON with ``to_dict``.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tuner.config import Config


class TrialStatus(enum.StrEnum):
    """How one config ended. Every value is a result about the config, stored and shown."""

    OK = "ok"  # compiled, right, measured
    INFEASIBLE = "infeasible"  # the family refuses it, with a reason, before compiling
    COMPILE_ERROR = "compile_error"  # the compiler said no
    COMPILE_CRASH = "compile_crash"  # the compiling process died or exceeded its memory
    COMPILE_TIMEOUT = "compile_timeout"  # the compiling process was killed at its deadline
    RUN_ERROR = "run_error"  # the launch failed, the process is well
    RUN_CRASH = "run_crash"  # the measuring process died or lost its GPU context
    RUN_TIMEOUT = "run_timeout"  # the measuring process was killed at its deadline
    INCORRECT = "incorrect"  # it ran and the numbers are wrong


@dataclass(frozen=True)
class Resources:
    """What the compiled code takes, read from the cubin or counted; None where a family has no such figure."""

    registers: int | None = None  # per thread at launch
    spill_bytes: int | None = None  # stack frame per thread: what does not fit the registers
    smem_bytes: int | None = None  # shared memory of one block, static and dynamic
    code_bytes: int | None = None
    tmem_columns: int | None = None  # of 32 bits, in one SM's tensor memory; Blackwell only

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Verification:
    """Error of one config against the reference, beside the stock kernel's on the same inputs.

    ``error`` is the largest over draws of ||out - ref|| / ||ref||; ``row_error`` the largest
    ||out - ref|| / ||ref|| of a single output row (head_dim_v values of one query and head). Of a
    backward they are those of the gradient and draw that came nearest to its limits, and ``outputs``
    has all: error, row_error, stock_error and stock_row_error under ``dq (draw 1)`` and the like.
    """

    error: float
    row_error: float
    stock_error: float
    stock_row_error: float
    draws: int
    seed: int
    passed: bool
    reason: str = ""
    outputs: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Measurement:
    """Times of one config and, interleaved with them, of the default: microseconds a call.

    ``samples_us[i]`` and ``default_us[i]`` were taken next to each other; ``ratio`` is the median
    of default / config over these pairs, so above 1 means faster than the default.
    """

    policy: str
    samples_us: tuple[float, ...]
    default_us: tuple[float, ...]
    ratio: float
    median_us: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Trial:
    """One config tried once."""

    config: Config
    status: TrialStatus
    error: str = ""  # the error text, or the reason of infeasible
    compile_s: float | None = None
    run_s: float | None = None
    resources: Resources = field(default_factory=Resources)
    verification: Verification | None = None
    measurement: Measurement | None = None
    notes: tuple[str, ...] = ()  # faults of ours, as "compiled again while measuring"

    @property
    def ratio(self) -> float | None:
        return self.measurement.ratio if self.measurement else None

    def refined(self, again: Trial) -> Trial:
        """Return this trial with a second one's samples added, or with its failure."""
        if self.measurement is None or again.measurement is None:
            return replace(self, status=again.status, error=again.error, measurement=None)
        a, b = self.measurement, again.measurement
        samples, default = a.samples_us + b.samples_us, a.default_us + b.default_us
        ratio = statistics.median(d / s for d, s in zip(default, samples, strict=True))
        merged = Measurement(a.policy, samples, default, ratio, statistics.median(samples))
        run_s = (self.run_s or 0.0) + (again.run_s or 0.0)
        return replace(self, measurement=merged, run_s=run_s, notes=self.notes + again.notes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "status": str(self.status),
            "error": self.error,
            "compile_s": self.compile_s,
            "run_s": self.run_s,
            "resources": self.resources.to_dict(),
            "verification": self.verification.to_dict() if self.verification else None,
            "measurement": self.measurement.to_dict() if self.measurement else None,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, v: Mapping[str, Any]) -> Trial:
        m = v.get("measurement")
        return cls(
            config=Config.from_dict(v["config"]),
            status=TrialStatus(v["status"]),
            error=v.get("error") or "",
            compile_s=v.get("compile_s"),
            run_s=v.get("run_s"),
            resources=Resources(**(v.get("resources") or {})),
            verification=Verification(**v["verification"]) if v.get("verification") else None,
            measurement=Measurement(**{**m, "samples_us": tuple(m["samples_us"]), "default_us": tuple(m["default_us"])})
            if m
            else None,
            notes=tuple(v.get("notes") or ()),
        )


class Verdict(enum.StrEnum):
    """What a study concludes."""

    PUBLISHED = "published"  # faster than the default by more than the margin
    KEPT_DEFAULT = "kept default"


@dataclass(frozen=True)
class Finalist:
    """One config in the finals, against the default: speedup is default / config.

    ``low`` and ``high`` bound the speedup at the stated confidence, corrected for the number of
    finalists and of looks. ``tied_with_best`` says that it is not shown to be slower than the
    fastest finalist by more than the tie margin. ``parts_us`` are median times of the ``fwd`` and
    ``bwd`` of a kernel that is both, each timed apart after the rounds: what is decided, and what the
    interval is of, is the whole.
    """

    config: Config
    median_us: float
    speedup: float
    low: float
    high: float
    samples_us: tuple[float, ...]
    tied_with_best: bool = False
    error: float | None = None  # relative error against the reference, from its trial
    parts_us: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, v: Mapping[str, Any]) -> Finalist:
        return cls(**{**v, "config": Config.from_dict(v["config"]), "samples_us": tuple(v["samples_us"])})


@dataclass(frozen=True)
class TunedConfig:
    """The published answer of a study, with its evidence.

    ``config`` is what to run: the winner, or the default if the verdict is ``kept default``.
    ``speedup`` with ``low`` and ``high`` is over the default. ``ties`` are configs that the
    measurement cannot tell from the winner.
    """

    config: Config
    default: Config
    verdict: Verdict
    speedup: float
    low: float
    high: float
    confidence: float
    margin: float
    ties: tuple[Config, ...]
    finalists: tuple[Finalist, ...]
    verification: Verification | None
    reason: str
    rounds: int
    rounds_dropped: int
    extras: Mapping[str, Any] = field(default_factory=dict)  # what to build beside: block_size of the BlockMask

    def finalist(self, config: Config) -> Finalist | None:
        return next((f for f in self.finalists if f.config == config), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "default": self.default.to_dict(),
            "verdict": str(self.verdict),
            "speedup": self.speedup,
            "low": self.low,
            "high": self.high,
            "confidence": self.confidence,
            "margin": self.margin,
            "ties": [c.to_dict() for c in self.ties],
            "finalists": [f.to_dict() for f in self.finalists],
            "verification": self.verification.to_dict() if self.verification else None,
            "reason": self.reason,
            "rounds": self.rounds,
            "rounds_dropped": self.rounds_dropped,
            "extras": dict(self.extras),
        }

    @classmethod
    def from_dict(cls, v: Mapping[str, Any]) -> TunedConfig:
        return cls(
            **{
                **v,
                "config": Config.from_dict(v["config"]),
                "default": Config.from_dict(v["default"]),
                "verdict": Verdict(v["verdict"]),
                "ties": tuple(Config.from_dict(c) for c in v["ties"]),
                "finalists": tuple(Finalist.from_dict(f) for f in v["finalists"]),
                "verification": Verification(**v["verification"]) if v["verification"] else None,
            }
        )
