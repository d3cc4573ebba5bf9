"""The surrogate against the textbook: the same Gaussian process by dense algebra, written down again here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tuner.config import Config
from tuner.families.base import Space
from tuner.surrogate import Surrogate

SPACE: Space = {"flag": (True, False), "n": tuple(range(16, 144, 16)), "stages": (1, 2, 3)}


def config(flag: bool, n: int, stages: int) -> Config:
    return Config.make("family", 1, flag=flag, n=n, stages=stages)


POINTS = [config(f, n, s) for f in (True, False) for n in range(16, 144, 16) for s in (1, 2, 3)]
ALIKE = ((1.0, 0.4), (0.4, 1.0))


def covariance(a: Config, b: Config) -> float:
    """Of two configs: 0.3 of a mean over tunables and 0.7 of their product; numbers fade over at least 2.5 steps."""
    flag = 1.0 if a["flag"] == b["flag"] else 0.7
    n = math.exp(-abs(int(a["n"]) - int(b["n"])) / 16 / 3.5)  # 8 values: half of 7 steps
    stages = math.exp(-abs(int(a["stages"]) - int(b["stages"])) / 2.5)
    return 0.3 * (flag + n + stages) / 3 + 0.7 * flag * n * stages


def dense(
    theirs: list[tuple[Config, float]], mine: list[tuple[Config, float]], point: Config
) -> tuple[float, float, float]:
    """Mean, variance without the scale, and scale: Rasmussen & Williams 2006, equations 2.25 and 2.26."""
    data = [(c, 0) for c, _ in theirs] + [(c, 1) for c, _ in mine]
    y = np.array([g for _, g in theirs + mine])

    def k(a: tuple[Config, int], b: tuple[Config, int]) -> float:
        return covariance(a[0], b[0]) * ALIKE[a[1]][b[1]] + 0.1 * (a[1] == b[1])

    matrix = np.array([[k(a, b) for b in data] for a in data]) + 0.002 * np.eye(len(data))
    across = np.array([k(a, (point, 1)) for a in data])
    mean = across @ np.linalg.solve(matrix, y)
    variance = 1.1 - across @ np.linalg.solve(matrix, across)
    scale = (2 * 2.0 * 0.001 + y @ np.linalg.solve(matrix, y)) / (2 * 2.0 + len(y))
    return float(mean), float(variance), float(scale)


THEIRS = [(POINTS[i], g) for i, g in ((0, 0.02), (9, -0.1), (20, 0.05), (40, -0.15))]
MINE = [(7, 0.03), (30, -0.05), (21, 0.08)]


def model() -> Surrogate:
    return Surrogate(SPACE, POINTS, [(c, g, 0) for c, g in THEIRS], ALIKE)


def test_it_predicts_what_dense_algebra_does() -> None:
    made = model()
    for point, gain in MINE:
        made.tell(point, gain)
    mean, spread, freedom = made._predict()
    assert freedom == 4 + 7
    for i in (1, 8, 22, 47):
        wanted, variance, scale = dense(THEIRS, [(POINTS[p], g) for p, g in MINE], POINTS[i])
        assert mean[i] == pytest.approx(wanted, abs=1e-9)
        assert spread[i] == pytest.approx(math.sqrt(scale * (variance + 0.01)), rel=1e-9)


def test_the_order_in_which_results_come_does_not_matter() -> None:
    one, two = model(), model()
    for point, gain in MINE:
        one.tell(point, gain)
    for point, _ in MINE:
        two.add(point)
    for point, gain in reversed(MINE):
        two.tell(point, gain)
    assert np.allclose(one.expected_gain(0.0), two.expected_gain(0.0), rtol=1e-9, atol=1e-15)
    two.tell(7, 0.5)
    assert not np.allclose(one.expected_gain(0.0), two.expected_gain(0.0), rtol=1e-3)
    two.tell(7, 0.03)  # measured again: the later one counts, once
    assert np.allclose(one.expected_gain(0.0), two.expected_gain(0.0), rtol=1e-9, atol=1e-15)


def test_what_is_being_tried_lowers_its_neighbours_and_not_the_mean() -> None:
    one, two = model(), model()
    two.add(21)
    assert np.allclose(one._predict()[0], two._predict()[0])
    assert two._predict()[1][22] < one._predict()[1][22]
    assert two.expected_gain(0.0)[21] == 0.0


def test_expected_gain_is_the_mean_of_what_is_above_the_best() -> None:
    made = model()
    mean, spread, _ = made._predict()
    draws = np.random.default_rng(0).standard_normal(400_000)
    for i in (3, 20, 33):
        by_chance = np.maximum(mean[i] + spread[i] * draws - 0.05, 0).mean()
        assert made.expected_gain(0.05)[i] == pytest.approx(by_chance, rel=0.05)


def test_where_neighbours_failed_is_worth_less() -> None:
    failing = [(c, None, 0) for c in POINTS if not c["flag"]]
    plain, warned = model(), Surrogate(SPACE, POINTS, [*((c, g, 0) for c, g in THEIRS), *failing], ALIKE)
    ratio = warned.expected_gain(0.0) / plain.expected_gain(0.0)
    flagged = np.array([bool(c["flag"]) for c in POINTS])
    assert ratio[~flagged].max() < ratio[flagged].min() < 1
    assert warned.evidence == plain.evidence == len(THEIRS)


def test_likenesses_that_are_no_covariance_are_survived() -> None:
    """The first is like the second and the second like the third, but the first not like the third."""
    for much in (0.8, 0.99):
        alike = [[1, much, 0, 0.5], [much, 1, much, 0.5], [0, much, 1, 0.5], [0.5, 0.5, 0.5, 1]]
        assert np.linalg.eigvalsh(np.array(alike)).min() < -0.1
        evidence = [(c, 0.1 * (c == POINTS[5]), s) for s in range(3) for c in POINTS]
        made = Surrogate(SPACE, POINTS, evidence, alike)
        gains = made.expected_gain(0.0)
        assert np.isfinite(gains).all()
        assert gains.argmax() == 5
        made.tell(5, 0.2)
        assert np.isfinite(made.expected_gain(0.2)).all()


def test_values_of_a_neighbour_that_are_no_values_here_lie_between() -> None:
    there = Surrogate(SPACE, POINTS, [(config(True, 72, 2), 0.3, 0)], ALIKE)
    gains = dict(zip([c.key for c in POINTS], there.expected_gain(0.0), strict=True))
    best = max(gains, key=lambda k: gains[k])
    assert best in {config(True, 64, 2).key, config(True, 80, 2).key}
    assert gains[config(True, 64, 2).key] == pytest.approx(gains[config(True, 80, 2).key])
    other = Surrogate(SPACE, POINTS, [(Config.make("family", 1, flag=True, n=64), 0.3, 0)], ALIKE)
    assert other.evidence == 0  # other tunables: says nothing


def test_the_chance_of_better_falls_on_a_flat_table_and_stays_on_a_steep_one() -> None:
    flat, steep = Surrogate(SPACE, POINTS), Surrogate(SPACE, POINTS)
    order = np.random.default_rng(1).permutation(len(POINTS))[:30]
    chances = []
    for point in map(int, order):
        flat.tell(point, 0.001 * (point % 3))
        steep.tell(point, -0.02 * abs(point - 25))
        chances.append(flat.chance_of_better(0.02))
    assert chances[2] > 0.5
    assert chances[-1] < 0.02
    assert steep.chance_of_better(max(-0.02 * abs(p - 25) for p in map(int, order)) + 0.02) > 0.1


def test_a_config_that_fails_later_has_no_gain_any_more() -> None:
    model = Surrogate(SPACE, POINTS)
    model.tell(5, 0.3)
    assert model.told == 1
    model.tell(5, None)
    assert model.told == 0
