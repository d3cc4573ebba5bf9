"""The finals' statistics: exact cases, coverage on synthetic rounds, and decisions that must not come from noise."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from tuner.config import Config
from tuner.stats import Decision, Rules, decide, speedup
from tuner.trial import Verdict

Times = npt.NDArray[np.float64]

RULES = Rules(margin=0.02, tie_margin=0.01, confidence=0.95, looks=3)
DEFAULT = Config.make("stock_a", 1)
OTHER_STOCK = Config.make("stock_b", 1)
A, B, C = (Config.make("tuned", 1, tile=n) for n in (1, 2, 3))


def rounds(
    seed: int, count: int, speeds: Sequence[float], sigma: float = 0.006, drift: float = 0.02, outliers: float = 0.02
) -> Times:
    """Rounds of samples taken one after the other in random order: correlated noise, a slow wave, outliers."""
    rng = np.random.default_rng(seed)
    out, state, clock = np.empty((count, len(speeds))), 0.0, int(rng.integers(0, 300))
    for r in range(count):
        for i in rng.permutation(len(speeds)):
            state = 0.5 * state + rng.normal(0, sigma) * math.sqrt(0.75)
            clock += 1
            slow = rng.uniform(1.2, 2.0) if rng.random() < outliers else 1.0
            out[r, i] = 100 / speeds[i] * math.exp(state + drift * math.sin(2 * math.pi * clock / 300)) * slow
    return out


def around(speed: float, wobble: float, count: int = 20) -> list[float]:
    """A column whose speedup over a default of 100 us lies evenly in speed * exp(+-wobble)."""
    steps = [wobble * (2 * i / (count - 1) - 1) for i in range(count)]
    return [100 / speed * math.exp(s) for s in random.Random(0).sample(steps, count)]


def judge(columns: dict[Config, list[float]], incumbent: Config | None = None, rules: Rules = RULES) -> Decision:
    count = len(next(iter(columns.values())))
    columns = {DEFAULT: [100.0] * count, **columns}
    return decide(list(columns), list(zip(*columns.values(), strict=True)), DEFAULT, rules, incumbent)


@pytest.mark.parametrize("ratio", [1.25, 0.5, 1.0])
def test_a_constant_ratio_has_an_interval_of_no_width(ratio: float) -> None:
    found = speedup([8.0, 16.0, 4.0, 32.0], [8 * ratio, 16 * ratio, 4 * ratio, 32 * ratio], 0.95)
    assert found.low == found.high == found.speedup == pytest.approx(ratio, rel=1e-12)


def test_one_round_is_an_interval_of_no_width() -> None:
    found = speedup([8.0], [10.0], 0.95)
    assert (found.low, found.speedup, found.high) == pytest.approx((1.25, 1.25, 1.25))


def test_the_estimate_is_the_trimmed_mean_of_the_paired_log_ratios() -> None:
    of, over = rounds(0, 25, (1.1, 1.0)).T
    logs = sorted(math.log(b / a) for a, b in zip(of, over, strict=True))
    kept = logs[5:-5]  # a fifth off each end
    found = speedup(of, over, 0.95)
    assert found.speedup == pytest.approx(math.exp(sum(kept) / len(kept)), rel=1e-12)
    assert found.low < found.speedup < found.high


def test_exchanging_the_two_inverts_the_speedup() -> None:
    of, over = rounds(1, 30, (1.1, 1.0)).T
    assert speedup(of, over, 0.95).speedup == pytest.approx(1 / speedup(over, of, 0.95).speedup, rel=1e-12)


def test_what_falls_on_both_of_a_pair_changes_nothing() -> None:
    of, over = rounds(2, 20, (1.05, 1.0)).T
    clocks = np.geomspace(1, 3, 20)
    calm, stormy = speedup(of, over, 0.95), speedup(of * clocks, over * clocks, 0.95)
    assert (stormy.low, stormy.speedup, stormy.high) == pytest.approx((calm.low, calm.speedup, calm.high), rel=1e-9)


def test_a_few_wild_rounds_do_not_move_the_estimate() -> None:
    of, over = rounds(3, 20, (1.05, 1.0), sigma=0.002, outliers=0).T
    of[[4, 11]] *= 2
    assert speedup(of, over, 0.95).speedup == pytest.approx(1.05, abs=0.004)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    seeds, level = 200, 0.95
    for count in (20, 40):
        found = [speedup(*rounds(s, count, (1.03, 1.0)).T, level) for s in range(seeds)]
        covered = sum(i.low <= 1.03 <= i.high for i in found) / seeds
        too_high = sum(i.low > 1.03 for i in found) / seeds
        tail = (1 - level) / 2
        assert covered >= level - 3 * math.sqrt(level * (1 - level) / seeds)
        assert too_high <= tail + 3 * math.sqrt(tail * (1 - tail) / seeds)
        # and it says something: a speedup that is 2% off is ruled out nearly always
        assert sum(i.high < 1.05 for i in found) / seeds > 0.9


def test_a_higher_confidence_gives_a_wider_interval() -> None:
    of, over = rounds(4, 30, (1.05, 1.0)).T
    found = [speedup(of, over, level) for level in (0.8, 0.95, 0.999)]
    assert found[0].low > found[1].low > found[2].low
    assert found[0].high < found[1].high < found[2].high


def test_without_a_margin_noise_wins_no_more_often_than_the_confidence_allows() -> None:
    seeds, rules = 40, Rules(margin=0.0, tie_margin=0.01, confidence=0.95, looks=1)
    won = 0
    for seed in range(seeds):
        times = rounds(seed, 20, (1.0,) * 4).tolist()
        won += decide([DEFAULT, A, B, C], times, DEFAULT, rules).verdict is Verdict.PUBLISHED
    assert won / seeds <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / seeds)


@pytest.mark.parametrize("seed", range(4))
def test_the_default_is_kept_on_noise(seed: int) -> None:
    found = decide([DEFAULT, A, B, C], rounds(seed, 20, (1.0,) * 4, sigma=0.02).tolist(), DEFAULT, RULES)
    assert (found.winner, found.verdict) == (DEFAULT, Verdict.KEPT_DEFAULT)
    assert found.interval.speedup == found.interval.low == found.interval.high == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_a_gain_of_three_percent_is_published(seed: int) -> None:
    found = decide([DEFAULT, A, B], rounds(seed, 40, (1.0, 0.98, 1.03), sigma=0.003).tolist(), DEFAULT, RULES)
    assert (found.winner, found.verdict, found.ties) == (B, Verdict.PUBLISHED, ())
    assert found.interval.low > 1.02
    assert found.interval.low <= 1.03 <= found.interval.high


@pytest.mark.parametrize("seed", range(4))
def test_a_gain_of_half_a_percent_is_a_tie_with_the_default(seed: int) -> None:
    found = decide([DEFAULT, A, B], rounds(seed, 40, (1.0, 1.005, 0.9), sigma=0.003).tolist(), DEFAULT, RULES)
    assert (found.winner, found.verdict, found.ties) == (DEFAULT, Verdict.KEPT_DEFAULT, (A,))
    assert {f.config: f.tied_with_best for f in found.finalists} == {DEFAULT: True, A: True, B: False}


def test_a_tie_goes_to_the_incumbent_then_to_stock_then_to_the_first_key() -> None:
    near = {A: [96.0] * 5, B: [95.0] * 5, OTHER_STOCK: [95.5] * 5}  # within 1.06% of each other
    rules = Rules(margin=0.02, tie_margin=0.015, confidence=0.95, looks=1)
    assert judge(near, rules=rules).winner == OTHER_STOCK
    assert judge(near, incumbent=A, rules=rules).winner == A
    del near[OTHER_STOCK]
    found = judge(near, rules=rules)
    assert (found.winner, found.ties) == (A, (B,))
    assert found.interval.speedup == pytest.approx(100 / 96)


def test_no_tie_where_the_gap_is_shown() -> None:
    apart = {A: [97.0] * 5, B: [95.0] * 5}  # 2.1% apart
    assert judge(apart).winner == B
    assert judge(apart, incumbent=A).winner == B


def test_the_incumbent_stays_while_it_is_faster_at_all() -> None:
    small = {A: [98.5] * 5}  # 1.5% faster: below the margin
    assert judge(small).winner == DEFAULT
    assert judge(small, incumbent=A).winner == A
    assert judge({A: [100.5] * 5}, incumbent=A).winner == DEFAULT


def test_the_order_of_the_finalists_does_not_change_the_outcome() -> None:
    configs = [DEFAULT, A, B, C]
    times = rounds(5, 20, (1.0, 1.05, 1.052, 0.99), sigma=0.002, outliers=0)
    outcomes = set()
    for order in random.Random(0).sample(list(itertools.permutations(range(4))), 4):
        found = decide([configs[i] for i in order], times[:, order].tolist(), DEFAULT, RULES)
        outcomes.add((found.winner, found.verdict, found.interval, frozenset(found.ties), found.reason, found.settled))
    assert len(outcomes) == 1
    assert outcomes.pop()[0] == A


def test_the_same_times_give_the_same_decision() -> None:
    times = rounds(6, 20, (1.0, 1.03, 1.02)).tolist()
    assert decide([DEFAULT, A, B], times, DEFAULT, RULES) == decide([DEFAULT, A, B], times, DEFAULT, RULES)


def test_every_figure_is_finite_and_in_order() -> None:
    for times in (rounds(7, 20, (1.0, 1.03, 0.7)), rounds(7, 1, (1.0, 1.03, 0.7)), np.full((3, 3), 5.0)):
        found = decide([DEFAULT, A, B], times.tolist(), DEFAULT, RULES)
        for f, column in zip(found.finalists, times.T, strict=True):
            assert 0 < f.low <= f.speedup <= f.high < math.inf
            assert f.median_us == pytest.approx(statistics.median(column), rel=1e-12)
            assert f.samples_us == tuple(column)


@pytest.mark.parametrize(
    ("columns", "settled"),
    [
        ({A: around(1.10, 0.01)}, True),  # far above the margin
        ({A: around(0.90, 0.01)}, True),  # far below
        ({A: around(1.00, 0.01)}, True),  # a tie with the default, and well below the margin
        ({A: around(1.02, 0.02)}, False),  # on the margin
        ({A: around(1.10, 0.001), B: around(1.12, 0.001)}, True),  # shown to be slower than the best
        ({A: around(1.10, 0.001), B: around(1.102, 0.001)}, True),  # shown to be tied with it
        ({A: around(1.10, 0.02), B: around(1.111, 0.001)}, False),  # neither
    ],
)
def test_settled_says_whether_more_rounds_could_change_it(columns: dict[Config, list[float]], settled: bool) -> None:
    assert judge(columns).settled is settled


def test_an_incumbent_is_settled_at_its_own_bar() -> None:
    columns = {A: around(1.002, 0.02)}  # as fast as the default, or not: decides whether it keeps its place
    assert judge(columns).settled
    assert not judge(columns, incumbent=A).settled
