"""Verify published configs again: a fresh child, other inputs, and what fails is no longer served.

A config that fails becomes a failed trial, and its study's answer is decided again from the rounds of
its finals without it, in one transaction; what is published instead is verified too.

    with Runner(settings, store, place) as runner:
        for checked in verify(runner, store, place, store.published()):
            ...
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from db.store import Published, Store
from tuner import finals
from tuner.compile import Compiled, CompilePool
from tuner.config import Config
from tuner.errors import DefaultError
from tuner.sandbox import Bench, Sandbox
from tuner.spec import StudySettings
from tuner.trial import Trial, TrialStatus, Verification
from tuner.verify import ERROR_MULTIPLE, FLOOR, ROW_ERROR_MULTIPLE, STOCK_LIMIT
from workers.runner import Place, Runner

DRAWS = 4


class Verdict(enum.StrEnum):
    """What came of verifying one answer again."""

    PASSED = "passed"
    FAILED = "failed"  # the config is wrong, or runs no longer: withdrawn
    UNJUDGED = "unjudged"  # the default does not work here, so there is nothing to judge by
    SKIPPED = "skipped"  # of another machine or another toolchain


@dataclass(frozen=True)
class Checked:
    """One answer, verified again. ``instead`` is what its study publishes now if it failed."""

    answer: Published
    verdict: Verdict
    reason: str = ""
    verification: Verification | None = None
    instead: Config | None = None

    @property
    def config(self) -> Config:
        return self.answer.tuned.config

    @property
    def limits(self) -> tuple[float, float] | None:
        """The largest error and row error allowed; the default's own error has a limit by dtype, its rows none."""
        v, tuned = self.verification, self.answer.tuned
        if v is None:
            return None
        if tuned.config == tuned.default:
            return STOCK_LIMIT[self.answer.workload.dtype], float("inf")
        return ERROR_MULTIPLE * v.stock_error + FLOOR, ROW_ERROR_MULTIPLE * v.stock_row_error + FLOOR

    def to_dict(self) -> dict[str, Any]:
        limit, row_limit = self.limits or (None, None)
        return {
            "study": self.answer.study_id,
            "workload": self.answer.workload.to_dict(),
            "label": self.answer.workload.label,
            "policy": self.answer.policy,
            "config": self.config.to_dict(),
            "verdict": str(self.verdict),
            "reason": self.reason,
            "verification": self.verification.to_dict() if self.verification else None,
            "limit": limit,
            "row_limit": row_limit,
            "instead": self.instead.to_dict() if self.instead else None,
        }


def verify(
    runner: Runner, store: Store, place: Place, answers: Sequence[Published], *, draws: int = DRAWS
) -> Iterator[Checked]:
    """Verify answers on ``draws`` sets of fresh inputs each, and withdraw what fails; yields as they come.

    Raises:
        InputError: if another process measures on the device.
        MachineError: if the machine fails, not a config.
    """
    todo: deque[Published] = deque()
    for answer in answers:
        if reason := _elsewhere(answer, place):
            yield Checked(answer, Verdict.SKIPPED, reason)
        else:
            todo.append(answer)
    if not todo:
        return
    pool, sandbox = runner.children(StudySettings())
    for answer in todo:  # all at once: compilers work ahead of the device
        _compiles(pool, answer)
    while todo:
        answer = todo.popleft()
        checked = _check(pool, sandbox, answer, draws)
        if isinstance(checked, Checked):
            yield checked
            continue
        instead = _withdraw(store, answer, checked)
        yield Checked(
            answer,
            Verdict.FAILED,
            f"{checked.status}: {checked.error}",
            checked.verification,
            instead.tuned.config if instead else None,
        )
        if instead is not None:
            todo.append(instead)


def _check(pool: CompilePool, sandbox: Sandbox, answer: Published, draws: int) -> Checked | Trial:
    """Return what came of an answer, or the failed trial of its config."""
    default, config = (f.result() for f in _compiles(pool, answer))
    tuned = answer.tuned
    if default.status is not TrialStatus.OK:
        return Checked(answer, Verdict.UNJUDGED, f"the default does not compile here: {default.error}")
    try:
        bench = sandbox.open(answer.workload, tuned.default, answer.policy, draws=draws, timed=False)
        trial = _attempt(sandbox, bench, tuned.config, config)
        bench.close()
    except DefaultError as e:
        return Checked(answer, Verdict.UNJUDGED, str(e))
    if trial.status is not TrialStatus.OK and tuned.config == tuned.default:
        return Checked(answer, Verdict.UNJUDGED, f"the default fails here: {trial.error}", trial.verification)
    return Checked(answer, Verdict.PASSED, "", trial.verification) if trial.status is TrialStatus.OK else trial


def _attempt(sandbox: Sandbox, bench: Bench, config: Config, compiled: Compiled) -> Trial:
    """Verify one config; what fails otherwise than by its numbers has a second try in a fresh child."""
    if compiled.status is not TrialStatus.OK:
        return Trial(config, compiled.status, compiled.error, compiled.seconds)
    trial = bench.attempt(config, compiled, measure=False)
    if trial.status not in (TrialStatus.OK, TrialStatus.INCORRECT):
        sandbox.close()
        trial = bench.attempt(config, compiled, measure=False)
    return trial


def _withdraw(store: Store, answer: Published, failed: Trial) -> Published | None:
    """Record the failure and publish what is right instead; None if the study has another answer by now."""
    handle = store.study(answer.study_id)
    trials = {t.config.key: t for t in handle.trials()}
    known = trials.get(failed.config.key)
    if known is not None:  # what compiling told of it stays
        failed = replace(failed, compile_s=known.compile_s, resources=known.resources)
    trials[failed.config.key] = failed
    settings = StudySettings(**handle.settings)
    instead = finals.without_failed(answer.tuned, trials, answer.workload, settings)
    record = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": f"{failed.config.family} {failed.config.label}",
        "status": str(failed.status),
        "error": failed.error,
        "version": answer.version,
    }
    return store.answer(handle) if handle.withdraw(answer.tuned, failed, instead, record) else None


def _compiles(pool: CompilePool, answer: Published) -> list[Future[Compiled]]:
    return [pool.submit(config, answer.workload) for config in (answer.tuned.default, answer.tuned.config)]


def _elsewhere(answer: Published, place: Place) -> str:
    """Return why an answer cannot be verified here, or the empty string."""
    if answer.target.key != place.target.key:
        return f"tuned on {answer.target.model} ({answer.target.key}), this is {place.target.key}"
    here = place.toolchain.to_dict()
    differs = [f"{n} {v or '-'} (here {here[n] or '-'})" for n, v in answer.toolchain.to_dict().items() if v != here[n]]
    return f"tuned with {', '.join(differs)}: other code than was tuned" if differs else ""
