"""The finals of one study: who takes part, paired rounds until the decision is settled, the answer.

What is decided from the rounds is ``tuner.stats``; who measures them is the bench.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner import families, stats
from tuner.children import ChildFailure
from tuner.config import Config
from tuner.errors import DefaultError, MachineError
from tuner.plan import Plan
from tuner.sandbox import Bench, FinalistFailed
from tuner.spec import StudySettings, StudySpec
from tuner.trial import Finalist, Trial, TrialStatus, TunedConfig
from tuner.workload import JOINT_OP, Workload

_REACH = 0.95  # a tuned config more than this behind the best tuned one is no finalist
_RETRIES = 3

Say = Callable[[int, int], None]  # rounds done, and rounds at most


def finalists(plan: Plan, settings: StudySettings, incumbent: Config | None) -> list[Config]:
    """Return the default, the other stock configs that work, and the best tuned ones.

    ``incumbent``, the config published before, takes part as long as it works.
    """
    works = {t.config for t in plan.measured()}
    stocks = [c for c in plan.stocks if c in works and c != plan.default]
    tuned = sorted(
        (t for t in plan.measured() if not t.config.is_stock),
        key=lambda t: (-(t.ratio or 0.0), t.config.key),
    )
    near = [t.config for t in tuned if (t.ratio or 0.0) >= _REACH * (tuned[0].ratio or 0.0)]
    chosen = near[: settings.finalists]
    if incumbent is not None and incumbent in works and incumbent not in (*chosen, *stocks, plan.default):
        chosen.append(incumbent)
    return [plan.default, *stocks, *chosen]


def hold(
    bench: Bench,
    plan: Plan,
    spec: StudySpec,
    settings: StudySettings,
    incumbent: Config | None,
    keep: Callable[[Trial], None],
    say: Say = lambda done, total: None,
) -> TunedConfig:
    """Run the finals on an open bench and return the answer.

    A finalist that fails is left out and the finals begin again: its trial, which said ok, is given
    to ``keep`` as failed before ``plan`` is told.

    Raises:
        DefaultError: if the default fails.
        MachineError: if the measuring child is lost three times without a finalist to blame.
    """
    failures = 0
    while True:
        configs = finalists(plan, settings, incumbent)
        say(0, settings.max_rounds)
        try:
            bench.start_finals(configs)
            played = _play(bench, configs, settings, incumbent, say)
            parts = bench.parts() if spec.workload.op == JOINT_OP else []
        except FinalistFailed as e:
            if e.config == plan.default:
                raise DefaultError(f"the default {e.config.family} failed in the finals: {e.error}") from None
            failed = replace(plan.trials[e.config.key], status=e.status, error=e.error, measurement=None)
            keep(failed)
            plan.tell(failed)
        except ChildFailure as e:
            failures += 1
            if failures == _RETRIES:
                raise MachineError(f"the finals did not end after {failures} tries: {e}") from None
        else:
            parts_of = dict(zip(configs, parts, strict=False))
            return _answer(played, plan.trials, plan.default, spec.workload, settings, parts_of)


def without_failed(
    tuned: TunedConfig, trials: Mapping[str, Trial], workload: Workload, settings: StudySettings
) -> TunedConfig:
    """Decide again from the rounds that were played, without finalists whose trial says ok no longer.

    ``trials`` are the study's by their config's key, ``settings`` those that it was answered under.
    """
    left = [f for f in tuned.finalists if f.config == tuned.default or _works(trials.get(f.config.key))]
    configs, times = [f.config for f in left], list(zip(*(f.samples_us for f in left), strict=True))
    decision = stats.decide(configs, times, tuned.default, _rules(settings))
    played, parts = _Played(decision, tuned.rounds, tuned.rounds_dropped), {f.config: f.parts_us for f in left}
    again = _answer(played, trials, tuned.default, workload, settings, parts)
    gone = len(tuned.finalists) - len(left)
    return replace(again, reason=f"{again.reason}; decided again without {gone} finalist(s) found wrong later")


def _works(trial: Trial | None) -> bool:
    return trial is not None and trial.status is TrialStatus.OK


@dataclass(frozen=True)
class _Played:
    """Finals that came to an end."""

    decision: stats.Decision
    rounds: int
    dropped: int


def _play(
    bench: Bench, configs: Sequence[Config], settings: StudySettings, incumbent: Config | None, say: Say
) -> _Played:
    """Run rounds until the decision is settled; each look doubles them. The first config is the default."""
    s, rules = settings, _rules(settings)
    times: list[list[float]] = []
    dropped, wanted = 0, s.min_rounds
    while True:
        rounds = bench.rounds(wanted - len(times), seed=s.seed + len(times))
        times += rounds.times
        dropped += rounds.dropped
        decision = stats.decide(configs, times, configs[0], rules, incumbent)
        say(len(times), s.max_rounds)
        if decision.settled or wanted * 2 > s.max_rounds:
            return _Played(decision, len(times), dropped)
        wanted *= 2


def _rules(settings: StudySettings) -> stats.Rules:
    s, looks = settings, 1
    while s.min_rounds * 2**looks <= s.max_rounds:
        looks += 1
    return stats.Rules(s.margin, s.tie_margin, s.confidence, looks)


def _answer(
    played: _Played,
    trials: Mapping[str, Trial],
    default: Config,
    workload: Workload,
    settings: StudySettings,
    parts: Mapping[Config, Mapping[str, float]],
) -> TunedConfig:
    decision = played.decision
    family = families.load(decision.winner.family)
    verified = {key: trial.verification for key, trial in trials.items()}
    finalists = tuple(
        replace(f, error=v.error if (v := verified.get(f.config.key)) else None, parts_us=parts.get(f.config, {}))
        for f in decision.finalists
    )
    return TunedConfig(
        config=decision.winner,
        default=default,
        verdict=decision.verdict,
        speedup=decision.interval.speedup,
        low=decision.interval.low,
        high=decision.interval.high,
        confidence=settings.confidence,
        margin=settings.margin,
        ties=decision.ties,
        finalists=finalists,
        verification=verified.get(decision.winner.key),
        reason=decision.reason,
        rounds=played.rounds,
        rounds_dropped=played.dropped,
        extras={**family.extras(decision.winner, workload), **_times(finalists, decision.winner, default)},
    )


def _times(finalists: Sequence[Finalist], winner: Config, default: Config) -> dict[str, Any]:
    """Return the median times of the winner's and the default's parts beside those of the whole."""
    times = {f.config: {**f.parts_us, JOINT_OP: f.median_us} for f in finalists if f.parts_us}
    named = {"median_us": times.get(winner), "default_median_us": times.get(default)}
    return {name: its for name, its in named.items() if its}
