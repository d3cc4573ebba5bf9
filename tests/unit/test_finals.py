"""The finals: who takes part, who is left out when it fails, and what is answered. The bench is a script."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from tuner import stats
from tuner.children import ChildFailure
from tuner.config import Config
from tuner.errors import DefaultError, MachineError
from tuner.finals import finalists, hold, without_failed
from tuner.plan import Plan
from tuner.sandbox import FinalistFailed, Rounds
from tuner.spec import StudySettings, StudySpec
from tuner.target import Toolchain, named
from tuner.trial import Measurement, Trial, TrialStatus, TunedConfig, Verdict, Verification
from tuner.workload import Workload

SETTINGS = StudySettings(finalists=3, seed=5)
SPEC = StudySpec(
    Workload(batch=1, heads_q=12, heads_kv=1, seqlen_q=128, seqlen_k=128, head_dim=64),
    named("fake"),
    Toolchain(),
    "graph",
    ("fake/1", "sdpa_cpu/1"),
)
DEFAULT, RIVAL = Config.make("fake", 1), Config.make("sdpa_cpu", 1)
LOST = ChildFailure("crash", "the measuring process died of SIGKILL")


def fake(variant: int) -> Config:
    return Config.make("fake", 1, variant=variant)


def trial(config: Config, ratio: float) -> Trial:
    """A right trial of a config that is ``ratio`` times as fast as the default; its error tells it from others."""
    error = 0.001 * int(config.get("variant") or 0)
    return Trial(
        config,
        TrialStatus.OK,
        verification=Verification(error, error, 0.002, 0.002, draws=2, seed=1, passed=True),
        measurement=Measurement("graph", (100 / ratio,), (100.0,), ratio, 100 / ratio),
    )


def failed(config: Config) -> Trial:
    return Trial(config, TrialStatus.RUN_TIMEOUT, "scripted")


def plan(ratios: dict[Config, float], *others: Trial) -> Plan:
    made = Plan(SPEC, SETTINGS)
    for t in (trial(DEFAULT, 1.0), *(trial(c, r) for c, r in ratios.items()), *others):
        made.tell(t)
    return made


@dataclass
class ScriptedBench:
    """Finalists take 100 us / their speed, with a noise of ``sigma``; some fail, and some calls lose the child."""

    speed: dict[Config, float]
    sigma: float = 0.0
    unbuildable: Sequence[Config] = ()
    crashing: Sequence[Config] = ()  # when measured
    losses: int = 0  # so many calls of rounds end with a lost child
    dropped: int = 0
    held: list[list[Config]] = field(default_factory=list)
    asked: list[tuple[int, int]] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)  # of all rounds

    def start_finals(self, configs: Sequence[Config]) -> None:
        self.held.append(list(configs))
        for config in configs:
            if config in self.unbuildable:
                raise FinalistFailed(config, TrialStatus.RUN_ERROR, "cannot be built (scripted)")

    def rounds(self, count: int, seed: int) -> Rounds:
        self.asked.append((count, seed))
        if self.losses:
            self.losses -= 1
            raise LOST
        for config in self.held[-1]:
            if config in self.crashing:
                raise FinalistFailed(config, TrialStatus.RUN_CRASH, "died of SIGSEGV (scripted)")
        rng = random.Random(seed)
        row = [100 / self.speed[c] for c in self.held[-1]]
        times = [[us * rng.lognormvariate(0, self.sigma) for us in row] for _ in range(count)]
        self.times += times
        return Rounds(times, self.dropped, [None] * count, [])


def held(
    bench: ScriptedBench, made: Plan, kept: list[Trial], incumbent: Config | None = None, settings: object = SETTINGS
) -> TunedConfig:
    return hold(bench, made, SPEC, settings, incumbent, kept.append)  # type: ignore[arg-type]


def played(speed: dict[Config, float], incumbent: Config | None = None, **script: object) -> TunedConfig:
    """Finals on a bench where configs are as fast as their trials said."""
    bench = ScriptedBench({DEFAULT: 1.0, **speed}, **script)  # type: ignore[arg-type]
    return held(bench, plan(speed), [], incumbent)


def test_tuned_configs_near_the_best_are_in_and_the_best_come_first() -> None:
    made = plan({fake(0): 1.88, fake(1): 2.0, fake(2): 1.91, fake(3): 1.0})
    assert finalists(made, SETTINGS, None) == [DEFAULT, fake(1), fake(2)]


def test_no_more_tuned_configs_than_asked_for_and_equals_by_key() -> None:
    made = plan({fake(n): 1.5 for n in (3, 1, 2, 0)})
    assert finalists(made, SETTINGS, None) == [DEFAULT, fake(0), fake(1), fake(2)]


def test_stocks_that_work_are_in_however_slow_and_do_not_count() -> None:
    tuned = {fake(n): 1.5 for n in range(3)}
    assert finalists(plan({RIVAL: 0.1, **tuned}), SETTINGS, None) == [DEFAULT, RIVAL, *tuned]
    assert finalists(plan(tuned, failed(RIVAL)), SETTINGS, None) == [DEFAULT, *tuned]


def test_a_fast_stock_does_not_raise_the_bar_for_tuned_configs() -> None:
    assert finalists(plan({RIVAL: 9.0, fake(0): 0.9}), SETTINGS, None) == [DEFAULT, RIVAL, fake(0)]


def test_what_failed_is_out_and_the_default_alone_is_enough() -> None:
    assert finalists(plan({}, failed(fake(0))), SETTINGS, None) == [DEFAULT]
    assert finalists(Plan(SPEC, SETTINGS), SETTINGS, None) == [DEFAULT]


def test_the_incumbent_joins_once_if_it_works() -> None:
    made = plan({**{fake(n): 2.0 for n in range(3)}, fake(7): 1.1, RIVAL: 1.0}, failed(fake(8)))
    tuned = [fake(0), fake(1), fake(2)]
    assert finalists(made, SETTINGS, fake(7)) == [DEFAULT, RIVAL, *tuned, fake(7)]
    for no_news in (None, fake(1), RIVAL, DEFAULT, fake(8), fake(9)):  # the last two failed, and never ran
        assert finalists(made, SETTINGS, no_news) == [DEFAULT, RIVAL, *tuned]


def test_the_fastest_is_published_with_its_evidence() -> None:
    tuned = played({RIVAL: 1.05, fake(3): 1.2, fake(4): 1.15}, sigma=0.001, dropped=2)
    assert (tuned.verdict, tuned.config, tuned.default, tuned.ties) == (Verdict.PUBLISHED, fake(3), DEFAULT, ())
    assert tuned.speedup == pytest.approx(1.2, rel=0.002)
    assert 1.02 < tuned.low <= tuned.speedup <= tuned.high
    assert tuned.verification == trial(fake(3), 1.2).verification
    assert {f.config: f.error for f in tuned.finalists} == {DEFAULT: 0, RIVAL: 0, fake(3): 0.003, fake(4): 0.004}
    assert (tuned.rounds, tuned.rounds_dropped) == (20, 2)
    assert [len(f.samples_us) for f in tuned.finalists] == [20] * 4
    assert (tuned.confidence, tuned.margin) == (0.95, 0.02)


@pytest.mark.parametrize("speed", [{}, {fake(3): 0.9}, {fake(3): 1.01}])
def test_the_default_is_kept_where_nothing_beats_it_by_the_margin(speed: dict[Config, float]) -> None:
    tuned = played(speed)
    assert (tuned.verdict, tuned.config, tuned.speedup) == (Verdict.KEPT_DEFAULT, DEFAULT, 1.0)
    assert tuned.verification == trial(DEFAULT, 1.0).verification


def test_the_incumbent_keeps_its_place_within_the_margin() -> None:
    tuned = played({fake(3): 1.01}, incumbent=fake(3))
    assert (tuned.verdict, tuned.config) == (Verdict.PUBLISHED, fake(3))


def test_rounds_double_until_the_decision_is_settled_or_there_are_no_more() -> None:
    shown: list[tuple[int, int]] = []
    bench = ScriptedBench({DEFAULT: 1.0, fake(3): 1.02}, sigma=0.02)  # at the margin: no look can tell
    settings = replace(SETTINGS, min_rounds=10, max_rounds=50)
    tuned = hold(bench, plan({fake(3): 1.02}), SPEC, settings, None, [].append, lambda *n: shown.append(n))  # type: ignore[arg-type]
    assert bench.asked == [(10, 5), (10, 15), (20, 25)]  # new rounds and their seed; 80 would be too many
    assert shown == [(0, 50), (10, 50), (20, 50), (40, 50)]
    assert tuned.rounds == 40
    three_looks = stats.decide([DEFAULT, fake(3)], bench.times, DEFAULT, stats.Rules(0.02, 0.01, 0.95, looks=3))
    assert tuned.finalists == tuple(replace(f, error=f.config.get("variant", 0) / 1000) for f in three_looks.finalists)


@pytest.mark.parametrize(
    ("how", "status"), [("unbuildable", TrialStatus.RUN_ERROR), ("crashing", TrialStatus.RUN_CRASH)]
)
def test_a_finalist_that_fails_is_left_out_and_the_next_best_wins(how: str, status: TrialStatus) -> None:
    """More of them than the child may be lost."""
    speed = {fake(n): 2.0 - n / 20 for n in range(6)}
    made, kept = plan(speed), list[Trial]()
    bench = ScriptedBench({DEFAULT: 1.0, **speed}, **{how: [fake(n) for n in range(4)]})  # type: ignore[arg-type]
    tuned = held(bench, made, kept)
    assert tuned.config == fake(4)
    assert [t.config for t in kept] == [fake(n) for n in range(4)]
    for t in kept:
        assert (t.status, t.measurement) == (status, None)
        assert "scripted" in t.error
        assert t.verification == trial(t.config, 1.0).verification  # its run was right all the same
        assert made.trials[t.config.key] == t
    assert bench.held[-1] == [DEFAULT, fake(4), fake(5)]


def test_a_failed_finalist_is_stored_before_the_plan_knows() -> None:
    """If it cannot be stored, the caller's plan says what the store says."""
    made = plan({fake(0): 2.0})

    def refuse(t: Trial) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        hold(ScriptedBench({}, unbuildable=[fake(0)]), made, SPEC, SETTINGS, None, refuse)  # type: ignore[arg-type]
    assert made.trials[fake(0).key] == trial(fake(0), 2.0)


@pytest.mark.parametrize("how", ["unbuildable", "crashing"])
def test_a_default_that_fails_is_an_error_and_no_trial(how: str) -> None:
    made, kept = plan({fake(0): 2.0}), list[Trial]()
    with pytest.raises(DefaultError, match=r"^the default fake failed in the finals: .*scripted"):
        held(ScriptedBench({}, **{how: [DEFAULT]}), made, kept)  # type: ignore[arg-type]
    assert kept == []
    assert made.trials[DEFAULT.key] == trial(DEFAULT, 1.0)


def test_a_child_lost_twice_is_forgiven() -> None:
    speed, kept = {DEFAULT: 1.0, fake(0): 2.0}, list[Trial]()
    bench = ScriptedBench(speed, losses=2)
    assert held(bench, plan({fake(0): 2.0}), kept).config == fake(0)
    assert bench.held == [[DEFAULT, fake(0)]] * 3
    assert kept == []


def test_a_child_lost_three_times_is_the_machine() -> None:
    kept = list[Trial]()
    bench = ScriptedBench({DEFAULT: 1.0, fake(0): 2.0}, losses=3)
    with pytest.raises(MachineError, match=r"^the finals did not end after 3 tries: .*SIGKILL") as error:
        held(bench, plan({fake(0): 2.0}), kept)
    assert type(error.value) is MachineError  # not that the default failed
    assert (len(bench.held), kept) == (3, [])


def test_a_failing_finalist_does_not_make_up_for_a_lost_child() -> None:
    bench = ScriptedBench({DEFAULT: 1.0, fake(1): 1.5, fake(0): 2.0}, losses=2, crashing=[fake(0)])
    assert held(bench, plan({fake(0): 2.0, fake(1): 1.9}), []).config == fake(1)
    assert len(bench.held) == 4


def answered(trials: dict[str, Trial], *, speed: dict[Config, float]) -> TunedConfig:
    return without_failed(played(speed), trials, SPEC.workload, SETTINGS)  # type: ignore[arg-type]


def test_deciding_again_leaves_out_what_failed_later() -> None:
    speed = {fake(0): 1.5, fake(1): 1.45, RIVAL: 1.2}
    trials = dict(plan(speed).trials)
    trials[fake(0).key] = failed(fake(0))
    again = answered(trials, speed=speed)
    assert (again.config, again.verdict) == (fake(1), Verdict.PUBLISHED)
    assert again.speedup == pytest.approx(1.45)
    assert [f.config for f in again.finalists] == [DEFAULT, RIVAL, fake(1)]
    assert again.verification == trials[fake(1).key].verification
    assert again.reason.endswith("decided again without 1 finalist(s) found wrong later")


def test_deciding_again_keeps_the_default_where_nothing_else_is_right() -> None:
    speed = {fake(0): 1.5, fake(1): 1.45}
    trials = {**plan(speed).trials, **{c.key: failed(c) for c in speed}, DEFAULT.key: failed(DEFAULT)}
    again = answered(trials, speed=speed)
    assert (again.config, again.verdict, again.speedup) == (DEFAULT, Verdict.KEPT_DEFAULT, 1.0)
