"""Budgets: what may be asked for, and which asks for more."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.errors import InputError
from tuner.job import JobRequest
from tuner.spec import StudySettings

W = {"batch": 1, "heads_q": 4, "heads_kv": 4, "seqlen_q": 128, "seqlen_k": 128, "head_dim": 64}


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.05, 1e9, float("nan"), float("inf")])
def test_seconds_that_make_no_budget(seconds: float) -> None:
    with pytest.raises(InputError, match="max_seconds"):
        StudySettings(max_seconds=seconds)


@pytest.mark.parametrize("seconds", [None, 0.1, 60.0])
def test_seconds_come_back_from_plain_values(seconds: float | None) -> None:
    settings = StudySettings(max_seconds=seconds)
    assert StudySettings(**settings.to_dict()) == settings
    request = JobRequest.from_dict({"workloads": [W], "settings": {"max_seconds": seconds}})
    assert request.settings == settings
    assert JobRequest.from_dict(request.to_dict()).settings == settings


@pytest.mark.parametrize("value", ["60", True, [60]])
def test_a_job_with_seconds_that_are_no_number(value: Any) -> None:
    with pytest.raises(InputError, match=r"settings.max_seconds is .* it must be a number"):
        JobRequest.from_dict({"workloads": [W], "settings": {"max_seconds": value}})


def test_settings_stored_before_there_were_seconds_are_read() -> None:
    old = {k: v for k, v in StudySettings().to_dict().items() if k != "max_seconds"}
    assert StudySettings(**old) == StudySettings()
    assert not StudySettings().asks_more_than(old)


@pytest.mark.parametrize(
    ("stored", "asked", "more"),
    [
        ((10, None), (10, None), False),
        ((10, None), (11, None), True),
        ((10, 5.0), (10, 5.0), False),
        ((10, 5.0), (10, 6.0), True),
        ((10, 5.0), (10, 4.0), False),
        ((10, 5.0), (10, None), True),
        ((10, None), (10, 60.0), False),
        ((10, 5.0), (11, 4.0), True),
    ],
)
def test_which_budget_is_larger(stored: tuple[int, float | None], asked: tuple[int, float | None], more: bool) -> None:
    before = StudySettings(max_trials=stored[0], max_seconds=stored[1]).to_dict()
    assert StudySettings(max_trials=asked[0], max_seconds=asked[1]).asks_more_than(before) is more
