"""What ``watch`` shows of a job's events: whose trial it was, the best so far, the end; never more than fits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from api.tables import age_text, answer_text
from api.watching import Board

ANSWER = {"verdict": "published", "label": "fake variant=2", "speedup": 1.25, "low": 1.2, "high": 1.3}
KEPT = {**ANSWER, "verdict": "kept default", "label": "fake stock", "speedup": 1.0}


def event(kind: str, **data: Any) -> dict[str, Any]:
    return {"cursor": "0-1", "job_id": "abc", "kind": kind, "at": "2026-12-01T10:20:30+00:00", "data": data}


def trial(study: str, config: str, ratio: float | None, kind: str = "trial", error: str = "") -> dict[str, Any]:
    status = "ok" if ratio else "timeout"
    data = {"study": study, "family": "fake", "config": config, "status": status, "ratio": ratio, "error": error}
    return event(kind, **data, worker="w")


def board(*names: str, name: str = "") -> Board:
    return Board({"id": "abc", "name": name, "items": [{"name": n} for n in names]})


def shown(table: Table) -> list[str]:
    console = Console(width=160, height=100)
    with console.capture() as text:
        console.print(table)
    return [" ".join(line.split()) for line in text.get().splitlines() if line.strip()]


def test_the_best_so_far_is_the_fastest_of_the_workload() -> None:
    it = board("short", "long")
    it.take(event("bound", name="short", study="s1", **{"class": "c"}))
    it.take(event("bound", name="long", study="s2", **{"class": "c"}))
    for study, config, ratio in (("s1", "a", 1.1), ("s1", "b", 1.3), ("s1", "c", None), ("s2", "d", 2.0)):
        it.take(trial(study, config, ratio))
    lines = shown(it.table(50))
    assert "job abc: 0 of 2 workloads ended" in lines
    assert "short running 3 1.300x fake b" in lines
    assert "long running 1 2.000x fake d" in lines


def test_workloads_that_share_a_study_count_its_trials_once() -> None:
    it = board("one", "same")
    for name in ("one", "same"):
        it.take(event("bound", name=name, study="s1", **{"class": "c"}))
    for _ in range(2):  # each of the two is told
        it.take(trial("s1", "a", 1.1))
    assert [line for line in shown(it.table(50)) if "running" in line] == [
        "one running 1 1.100x fake a",
        "same running 1 1.100x fake a",
    ]
    assert it.line(trial("s1", "a", 1.1)) == "10:20:30 one, same: fake a: ok 1.100x"


def test_how_each_workload_ended() -> None:
    it = board("won", "kept", "lost", "left", name="mine")
    it.take(event("item_done", name="won", study="s1", answer=ANSWER, known=False))
    it.take(event("item_done", name="kept", study="s2", answer=KEPT, known=True))
    it.take(event("item_failed", name="lost", study="s3", error="no machine [yet]"))
    assert "job abc, mine: 3 of 4 workloads ended" in shown(it.table(50))
    it.take(event("cancelled"))
    assert [line for line in shown(it.table(50)) if line.split()[0] in ("won", "kept", "lost", "left")] == [
        "won done fake variant=2 1.250x [1.200, 1.300]",
        "kept done keep the default (fake stock)",
        "lost failed no machine [yet]",
        "left cancelled",
    ]


@pytest.mark.parametrize("height", [10, 24, 60])
def test_a_large_job_fits_the_terminal_and_begins_with_what_runs(height: int) -> None:
    it = board(*(f"w{n}" for n in range(1000)))
    it.take(event("bound", name="w999", study="s1", **{"class": "c"}))
    table = it.table(height)
    console = Console(width=100, height=height)
    with console.capture() as text:
        console.print(table)
    lines = text.get().splitlines()
    assert len(lines) <= height
    assert next(line for line in lines if "w" in line and line.strip().startswith("w9")).split()[0] == "w999"
    assert f"and {1000 - table.row_count} more" in text.get()


@pytest.mark.parametrize(
    ("happened", "says"),
    [
        (event("submitted", workloads=3), "submitted with 3 workload(s)"),
        (event("bound", name="x", study="s1", **{"class": "c1"}), "x: begun as study s1 on c1"),
        (trial("s1", "a", None, error="first\nsecond"), "x: fake a: timeout (first)"),
        (trial("s1", "a", None, "quarantined", "cost 3 workers"), "x: fake a: timeout (cost 3 workers)"),
        (event("item_done", name="x", answer=KEPT, known=True), "x: keep the default (fake stock) (from the database)"),
        (event("item_failed", name="x", error="no"), "x: failed: no"),
        (event("failed", counts={"done": 2, "failed": 1}), "failed: 2 done, 1 failed"),
        (event("cancelled"), "cancelled"),
        (event("something new", what=1), "something new"),
    ],
)
def test_each_event_is_a_line(happened: dict[str, Any], says: str) -> None:
    it = board("x")
    it.take(event("bound", name="x", study="s1", **{"class": "c1"}))
    it.take(happened)
    assert it.line(happened) == f"10:20:30 {says}"


def test_an_answer_in_words() -> None:
    assert answer_text(ANSWER) == "fake variant=2 1.250x [1.200, 1.300]"
    assert answer_text(KEPT) == "keep the default (fake stock)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_an_age_is_told_in_its_largest_unit(seconds: int, text: str) -> None:
    assert age_text(timedelta(seconds=seconds)) == text
