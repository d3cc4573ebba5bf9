"""Nodes whose times differ from their class's, found and told from those that only ran other studies."""

from __future__ import annotations

import math
import random

import pytest

from tuner.agreement import SUSPICIOUS, Reading, deviations


def readings(slow: dict[str, float], studies: int = 5, noise: float = 0.005) -> list[Reading]:
    """Return what nodes read in the same studies: each study has its own time, each node its own factor."""
    rng = random.Random(7)
    return [
        Reading(f"study{s}", node, (50.0 + 100.0 * s) * factor * math.exp(rng.gauss(0, noise)))
        for s in range(studies)
        for node, factor in slow.items()
        for _ in range(9)
    ]


def test_one_slow_node_is_found_and_the_others_are_not_blamed() -> None:
    found = deviations(readings({"a": 1.0, "b": 1.0, "c": 1.06, "d": 1.0}))
    assert found["c"].share == pytest.approx(0.06, abs=0.01)
    assert [node for node, d in found.items() if d.suspicious] == ["c"]


def test_a_node_that_is_too_fast_is_found_as_well() -> None:
    found = deviations(readings({"a": 1.0, "b": 0.9, "c": 1.0}))
    assert found["b"].suspicious and found["b"].share == pytest.approx(-0.1, abs=0.01)


def test_of_two_nodes_each_is_off_by_half() -> None:
    found = deviations(readings({"a": 1.0, "b": 1.1}))
    half = math.sqrt(1.1) - 1
    assert found["b"].share == pytest.approx(half, abs=0.01) and found["a"].share == pytest.approx(-half, abs=0.01)


def test_nodes_of_one_class_within_noise_are_not_suspicious() -> None:
    found = deviations(readings({"a": 1.0, "b": 1.01, "c": 0.99}))
    assert not any(d.suspicious for d in found.values())
    assert all(abs(d.share) < SUSPICIOUS for d in found.values())


def test_nodes_that_shared_no_study_are_not_compared() -> None:
    assert deviations([Reading("s", "a", 100.0), Reading("t", "b", 200.0)]) == {}


def test_one_outlier_does_not_make_a_node_suspicious() -> None:
    taken = readings({"a": 1.0, "b": 1.0, "c": 1.0})
    assert not deviations([*taken, Reading("study1", "c", 10_000.0)])["c"].suspicious
    assert deviations(taken)["c"].studies == 5
