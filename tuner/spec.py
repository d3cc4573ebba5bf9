"""What a study is asked to do, and where it keeps what it learns.

A study is the search for one (workload, target, toolchain, policy) over a set of families. Its
``key`` names exactly that; the knobs in ``StudySettings`` may change between runs of one study.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tuner.errors import InputError
from tuner.target import Target, Toolchain
from tuner.trial import Trial, TunedConfig
from tuner.workload import Workload

POLICIES = ("graph", "eager")
MIN_SECONDS, MAX_SECONDS = 0.1, 30 * 86_400.0  # of a search


def policy_for(policy: str, target: Target) -> str:
    """Return the policy to measure by on a target; ``auto`` is eager on a CPU and graph elsewhere.

    Raises:
        InputError: if there is no such policy, or not on this target.
    """
    if policy == "auto":
        return "eager" if target.device == "cpu" else "graph"
    if policy not in POLICIES:
        raise InputError(f"policy is {policy!r}; it must be auto, {' or '.join(POLICIES)}")
    if policy == "graph" and target.device == "cpu":
        raise InputError("policy graph replays CUDA graphs, and the target is a CPU; use eager")
    return policy


@dataclass(frozen=True)
class StudySpec:
    """The identity of a study.

    ``policy`` is ``graph`` (kernel time, by CUDA-graph replay) or ``eager`` (what a Python caller
    waits for). ``families`` holds ``name/version`` of every family that competes; the first
    one's stock config is the default.
    """

    workload: Workload
    target: Target
    toolchain: Toolchain
    policy: str
    families: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InputError(f"policy is {self.policy!r}; it must be one of {', '.join(POLICIES)}")

    @property
    def key(self) -> str:
        return "\n".join(
            ("s1", self.workload.key, self.target.key, self.toolchain.key, self.policy, ",".join(self.families))
        )


@dataclass(frozen=True)
class StudySettings:
    """Knobs of one run. ``margin`` and ``tie_margin`` are fractions: 0.02 is two percent."""

    max_trials: int = 48  # configs compiled and measured, besides the stock ones
    max_seconds: float | None = None  # of searching: by the clock; in a fleet, on a device
    margin: float = 0.02  # published only if the interval says at least this much faster
    tie_margin: float = 0.01  # not shown to be slower than the best by more than this: a tie
    finalists: int = 6  # tuned configs in the finals, besides the stock ones
    min_rounds: int = 20
    max_rounds: int = 80
    confidence: float = 0.95
    compile_timeout_s: float = 180.0
    run_timeout_s: float = 60.0
    compile_memory_bytes: int = 8 << 30
    seed: int = 0  # of the search; inputs are drawn afresh

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_trials", 1, 100_000),
            ("margin", 0.0, 1.0),
            ("tie_margin", 0.0, 1.0),
            ("finalists", 1, 64),
            ("min_rounds", 5, 100_000),
            ("max_rounds", 5, 100_000),
            ("confidence", 0.5, 0.9999),
            ("compile_timeout_s", 0.1, 86_400),
            ("run_timeout_s", 0.1, 86_400),
            ("compile_memory_bytes", 64 << 20, 1 << 42),
            ("seed", 0, 2**32 - 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InputError(f"{name} is {value}; it must be from {low} to {high}")
        if self.max_seconds is not None and not MIN_SECONDS <= self.max_seconds <= MAX_SECONDS:
            raise InputError(f"max_seconds is {self.max_seconds}; it must be from {MIN_SECONDS} to {MAX_SECONDS:.0f}")
        if self.max_rounds < self.min_rounds:
            raise InputError(f"max_rounds {self.max_rounds} is below min_rounds {self.min_rounds}; raise it")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def asks_more_than(self, stored: Mapping[str, Any]) -> bool:
        """Tell whether these allow a longer search than the stored settings of a study that is done."""
        limit = stored.get("max_seconds")
        longer = limit is not None and (self.max_seconds is None or self.max_seconds > limit)
        return longer or self.max_trials > int(stored.get("max_trials", 0))

    def to_share_with(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return these as plain values, the budgets raised to those that others wait for."""
        limits = (self.max_seconds, stored.get("max_seconds"))
        return {
            **self.to_dict(),
            "max_trials": max(self.max_trials, int(stored.get("max_trials", 0))),
            "max_seconds": None if None in limits else max(x for x in limits if x is not None),
        }


class StudyMemory(Protocol):
    """Where one study keeps its trials and its answer. Called from one thread.

    Every call is durable when it returns: a process killed right after it loses nothing.
    """

    def trials(self) -> Sequence[Trial]:
        """Return the stored trials in the order in which they were added."""
        ...

    def add_trial(self, trial: Trial) -> None:
        """Store a trial. A second trial of the same config replaces the first."""
        ...

    def finish(self, tuned: TunedConfig, stats: Mapping[str, Any]) -> None:
        """Store the answer and mark the study done, both or neither."""
        ...
