"""A fleet on PostgreSQL and RabbitMQ under SIGKILL, SIGSTOP and purged queues: nothing is lost or doubled."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos import KINDS, Run, harass, power_off, script_of, stop_past_lease
from benchmarks.chaos_checks import Script
from benchmarks.chaos_site import installation, services_missing

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(280)]

KILLS, SEED = 15, 5


@pytest.fixture(autouse=True)
def services() -> None:
    missing = services_missing()
    if missing:
        pytest.skip(missing)


def test_kills_and_purges_lose_nothing_double_nothing_and_change_no_winner(tmp_path: Path) -> None:
    script = script_of(60, workloads=3, sample_s=0.02)
    with installation("postgresql", tmp_path, script.document(), lease_s=2) as site:
        run = Run(site, script, timeout_s=200)
        harass(run, KINDS["postgresql"], KILLS, random.Random(SEED), every_s=0.8, purges=2)
        run.wait()
        result = run.result()
        run.close()
        assert result.faults == []
        assert sum(run.tally.kills.values()) >= KILLS // 3, "the job ended too early for this to be a test"
        assert run.tally.purges == 2
        assert set(run.tally.kills) == set(KINDS["postgresql"])


def test_what_kills_its_worker_each_time_is_quarantined_and_the_job_completes(tmp_path: Path) -> None:
    outcomes = {"2": {"does": "kill_worker"}, "4": {"does": "compile_kill_worker"}, "6": {"speedup": 1.3}}
    script = Script((7,), outcomes)
    with installation("postgresql", tmp_path, script.document(), lease_s=2) as site:
        run = Run(site, script, timeout_s=200)
        run.wait()
        result = run.result()
        deaths = run.query("SELECT config_key, deaths FROM work WHERE deaths >= 3")
        run.close()
        assert result.faults == []
        assert sorted(d["config_key"] for d in deaths) == ["fake/1:variant=2", "fake/1:variant=4"]
        assert [d["deaths"] for d in deaths] == [3, 3]


def test_a_worker_that_was_stopped_past_its_lease_cannot_commit(tmp_path: Path) -> None:
    script = script_of(40, workloads=2, sample_s=0.03)
    with installation("postgresql", tmp_path, script.document(), lease_s=2) as site:
        run = Run(site, script, timeout_s=200)
        refused = stop_past_lease(run)
        run.wait()
        result = run.result()
        run.close()
        assert result.faults == []
        assert refused >= 1


def test_the_work_of_a_worker_that_is_gone_goes_on_elsewhere(tmp_path: Path) -> None:
    script = script_of(40, workloads=2, sample_s=0.03)
    with installation("postgresql", tmp_path, script.document(), lease_s=2) as site:
        run = Run(site, script, timeout_s=200)
        took = power_off(run, for_s=100)
        run.wait()
        result = run.result()
        run.close()
        assert took.keys() == {"taken_back", "begun_elsewhere"}
        assert result.faults == []
