"""Trying configs on the GPU, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Iterable

from tuner.compile import CompilePool
from tuner.config import Config
from tuner.sandbox import Bench, Sandbox
from tuner.trial import Trial, TrialStatus
from tuner.workload import Workload


def tried(
    w: Workload, configs: Iterable[Config], pool: CompilePool, sandbox: Sandbox, policy: str = "graph"
) -> tuple[Bench, list[Trial]]:
    """Compile all, then verify and measure them beside the first; print what came of each."""
    futures = {c: pool.submit(c, w, timeout_s=300) for c in configs}
    compiled = {c: f.result() for c, f in futures.items()}
    default = next(iter(compiled))
    assert compiled[default].status is TrialStatus.OK, compiled[default].error
    bench = sandbox.open(w, default, policy)
    trials = [
        bench.attempt(c, found) if found.status is TrialStatus.OK else Trial(c, found.status, found.error)
        for c, found in compiled.items()
    ]
    for t in trials:
        outputs = t.verification.outputs if t.verification else {}
        errors = {name: f"{values[0]:.1e}/{values[1]:.1e}" for name, values in outputs.items()}
        median_us = t.measurement.median_us if t.measurement else None
        print(f"{w.label} {policy} | {t.config.family} {t.config.label} | {t.status} {t.error[:200]} "
              f"{median_us} {t.ratio} {errors} {t.notes}")  # fmt: skip
    return bench, trials


def all_right(trials: list[Trial]) -> None:
    """Assert that every trial is ok, and that nothing had to compile while it was measured."""
    failed = {t.config.key: (str(t.status), t.error) for t in trials if t.status is not TrialStatus.OK}
    assert failed == {}
    assert [t.config.key for t in trials if t.notes] == [], "a kernel compiled again while measuring"
