"""The measuring child is killed at chosen moments by somebody else: no verdict about a config comes of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tuner.compile import Compiled
from tuner.config import Config
from tuner.errors import MachineError
from tuner.sandbox import Bench, Rounds, Sandbox
from tuner.target import probe
from tuner.trial import TrialStatus
from tuner.workload import Workload

STOCK, VARIANT = Config.make("fake", 1), Config.make("fake", 1, variant=1)
WORKLOAD = Workload(batch=1, heads_q=4, heads_kv=1, seqlen_q=8, seqlen_k=8, head_dim=8)
OK = Compiled(TrialStatus.OK)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with Sandbox(probe("fake", None), tmp_path) as made:
        yield made


def kill(sandbox: Sandbox) -> None:
    """Kill the child as the kernel would, and wait until it is gone."""
    pid = sandbox._child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while sandbox.generation:
        time.sleep(0.01)


def test_killed_just_before_it_is_asked_the_config_is_tried_again(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = sandbox.open(WORKLOAD, STOCK, "eager")
    real, kills = Bench.ensure_open, iter([True])

    def open_and_kill(self: Bench) -> None:
        real(self)
        if next(kills, False):
            kill(sandbox)

    monkeypatch.setattr(Bench, "ensure_open", open_and_kill)
    trial = bench.attempt(VARIANT, OK)
    assert (trial.status, trial.error) == (TrialStatus.OK, "")
    assert sandbox.generation == 2


def test_killed_before_the_rounds_nobody_is_blamed(sandbox: Sandbox) -> None:
    bench = sandbox.open(WORKLOAD, STOCK, "eager")
    bench.start_finals([STOCK, VARIANT])
    kill(sandbox)
    with pytest.raises(Exception, match="gone before it was asked") as caught:
        bench.rounds(5, seed=0)
    assert getattr(caught.value, "kind", "") == "killed"
    bench.start_finals([STOCK, VARIANT])
    assert isinstance(rounds := bench.rounds(5, seed=0), Rounds)
    assert len(rounds.times) == 5


def test_killed_whenever_it_begins_the_machine_is_blamed_and_not_the_default(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sandbox._child.start
    starts = 0

    def start_and_kill() -> None:
        nonlocal starts
        real()
        starts += 1
        assert sandbox._child.pid is not None
        os.kill(sandbox._child.pid, signal.SIGKILL)

    monkeypatch.setattr(sandbox._child, "start", start_and_kill)
    with pytest.raises(MachineError, match="killed 3 times while it began"):
        sandbox.open(WORKLOAD, STOCK, "eager")
    assert starts == 3


def test_a_config_that_the_kernel_kills_each_time_is_blamed(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = sandbox.open(WORKLOAD, STOCK, "eager")
    real = Bench._ask

    def kill_and_ask(self: Bench, operation: str, **fields: Any) -> dict[str, Any]:
        kill(sandbox)
        return real(self, operation, **fields)

    monkeypatch.setattr(Bench, "_ask", kill_and_ask)
    assert bench.attempt(VARIANT, OK).status is TrialStatus.RUN_CRASH
