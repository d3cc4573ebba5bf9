"""``flashtune up`` under SIGKILL and SIGSTOP: no trial is lost, doubled, or blamed for what it did not do."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos import KINDS, Run, harass, power_off, script_of, stop_past_lease
from benchmarks.chaos_checks import Script
from benchmarks.chaos_site import installation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

KILLS, SEED = 15, 3


def test_kills_lose_nothing_double_nothing_and_change_no_winner(tmp_path: Path) -> None:
    script = script_of(30, workloads=2, sample_s=0.005)
    with installation("sqlite", tmp_path, script.document(), lease_s=2) as site:
        run = Run(site, script, timeout_s=150)
        harass(run, KINDS["sqlite"], KILLS, random.Random(SEED), every_s=0.6)
        run.wait()
        result = run.result()
        assert result.faults == []
        assert sum(run.tally.kills.values()) >= KILLS // 3, "the job ended too early for this to be a test"
        assert site.units[0].starts == 1 + run.tally.kills["up"]


def test_what_kills_its_worker_each_time_is_quarantined_and_the_job_completes(tmp_path: Path) -> None:
    outcomes = {"2": {"does": "kill_worker"}, "4": {"does": "compile_kill_worker"}, "6": {"speedup": 1.3}}
    script = Script((7,), outcomes)
    with installation("sqlite", tmp_path, script.document(), lease_s=2) as site:
        run = Run(site, script, timeout_s=150)
        run.wait()
        assert run.result().faults == []
        deaths = run.query("SELECT config_key, deaths FROM work WHERE deaths >= 3")
        assert sorted(d["config_key"] for d in deaths) == ["fake/1:variant=2", "fake/1:variant=4"]
        assert [d["deaths"] for d in deaths] == [3, 3]
        quarantined = run.query("SELECT data FROM events WHERE kind = 'quarantined'")
        assert sorted(e["data"]["config"] for e in quarantined) == ["variant=2", "variant=4"]
        # a death may be blamed on both, while one is measured and the other compiles
        assert 1 + 3 <= site.units[0].starts <= 1 + 3 + 3


def test_a_worker_that_was_stopped_past_its_lease_cannot_commit(tmp_path: Path) -> None:
    script = script_of(24, workloads=2, sample_s=0.02)
    with installation("sqlite", tmp_path, script.document(), lease_s=2, second=True) as site:
        run = Run(site, script, timeout_s=150)
        refused = stop_past_lease(run)
        run.wait()
        assert run.result().faults == []
        assert refused >= 1
        assert [unit.starts for unit in site.units] == [1, 1]


def test_the_work_of_a_worker_that_is_gone_goes_on_elsewhere(tmp_path: Path) -> None:
    script = script_of(24, workloads=2, sample_s=0.02)
    with installation("sqlite", tmp_path, script.document(), lease_s=2, second=True) as site:
        run = Run(site, script, timeout_s=150)
        assert power_off(run, for_s=100).keys() == {"taken_back", "begun_elsewhere"}
        run.wait()
        assert run.result().faults == []
