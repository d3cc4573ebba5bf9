"""A worker that has worked for long is no bigger than one that has just warmed up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import LIMIT_MB, Look, growth_mb, watch

WARM_UP, TRIALS = 700, 400  # the plans that a dispatcher remembers fill up over the first 600


def test_growth_is_the_slope_through_all_looks() -> None:
    looks = [Look(n, 100 + 0.01 * n + (5 if n == 300 else 0), 50.0) for n in range(0, 1001, 10)]
    growth = growth_mb(looks, 200)
    assert growth["trials"] == 800
    assert growth["worker_mb"] == pytest.approx(8.0, abs=1.0)
    assert growth["children_mb"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_a_worker_does_not_grow_with_its_trials(tmp_path: Path) -> None:
    growth = growth_mb(watch(tmp_path, WARM_UP + TRIALS), WARM_UP)
    # a fifth of the trials; the same again, since what fills up at first and stops weighs more here
    limit = 2 * LIMIT_MB * growth["trials"] / 2000
    assert growth["worker_mb"] < limit
    assert growth["children_mb"] < limit
