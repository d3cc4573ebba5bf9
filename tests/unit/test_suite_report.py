"""What a suite's report says, on answers whose ratios are known."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import suite_report as report
from benchmarks.suite import in_turn
from db.store import Store
from tuner.config import Config
from tuner.pattern import parse
from tuner.spec import StudySettings, StudySpec
from tuner.target import Toolchain, named
from tuner.trial import Finalist, Trial, TrialStatus, TunedConfig, Verdict
from tuner.workload import Workload
from tuner.workload_file import NamedWorkload

FLASH, TRITON, CUDNN = (Config.make(n, 1) for n in ("flex_flash_stock", "flex_triton_stock", "cudnn"))
TUNED = Config.make("fa4_fwd_sm90", 1, tile_m=128)
ROUNDS = 40
SHAPE = Workload(batch=1, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_k=1024, head_dim=64)


def cell(number: int, policy: str = "graph") -> NamedWorkload:
    return NamedWorkload(f"cell {number}", SHAPE.with_(batch=number), policy)


def answer(us: dict[Config, float], sigma: float, seed: int) -> TunedConfig:
    """Finals in which every config takes its time, with a wave that all share and noise of their own."""
    rng = random.Random(seed)
    shared = [rng.lognormvariate(0, 0.2) for _ in range(ROUNDS)]
    samples = {c: tuple(t * s * rng.lognormvariate(0, sigma) for s in shared) for c, t in us.items()}
    finals = tuple(Finalist(c, us[c], 1.0, 1.0, 1.0, samples[c]) for c in us)
    published = TUNED if TUNED in us else FLASH
    verdict = Verdict.PUBLISHED if TUNED in us else Verdict.KEPT_DEFAULT
    return TunedConfig(published, FLASH, verdict, 1.0, 1.0, 1.0, 0.95, 0.02, (), finals, None, "", ROUNDS, 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "suite.db")) as store:
        yield store


def publish(store: Store, c: NamedWorkload, us: dict[Config, float], sigma: float = 0.002, *trials: Trial) -> None:
    families = ("flex_flash_stock/1", "flex_triton_stock/1", "fa4_fwd_sm90/1", "cudnn/1")
    spec = StudySpec(c.workload, named("sm_90a"), Toolchain(), c.policy, families)
    study = store.begin_study(spec, StudySettings())
    for trial in trials:
        study.add_trial(trial)
    study.finish(answer(us, sigma, c.workload.batch), {})


def test_ratios_are_paired_and_means_are_geometric(store: Store) -> None:
    cells = [cell(1), cell(2), cell(3)]
    for c, triton in zip(cells, (150.0, 200.0, 240.0), strict=True):
        publish(store, c, {FLASH: 120.0, TRITON: triton, TUNED: 100.0})
    found, missing = report.collect(store, [*cells, cell(4)], "graph")
    assert missing == ["cell 4"]
    # the wave is a hundred times the noise: unpaired, no interval would be that narrow
    assert [c.best.ratio.speedup for c in found] == pytest.approx([1.2] * 3, rel=0.002)
    assert all(c.best.ratio.high - c.best.ratio.low < 0.005 for c in found)
    mean, count = report.geometric_mean(found, "flex_triton_stock") or (None, 0)
    assert mean is not None
    assert count == 3
    assert mean.speedup == pytest.approx(math.prod((1.5, 2.0, 2.4)) ** (1 / 3), rel=0.002)
    assert 1.5 * 0.99 < mean.low < mean.speedup < mean.high < 2.4 * 1.01


def test_the_goals_are_met_missed_or_open(store: Store) -> None:
    cells = [cell(n) for n in range(1, 7)]
    for c in cells:
        publish(store, c, {FLASH: 105.0, TRITON: 160.0, CUDNN: 98.0 if c == cells[2] else 130.0, TUNED: 100.0})
    triton, flash, worst = report.goals(report.collect(store, cells, "graph")[0])
    assert (triton["state"], flash["state"], worst["state"]) == ("met", "missed", "missed")
    assert (worst["worst"], worst["below"]) == ("cell 3", ["cell 3"])
    assert worst["found"][0] == pytest.approx(0.98, rel=0.002)
    text = report.markdown(*report.collect(store, cells, "graph"))
    assert "geometric mean over Triton as shipped at least 1.50: **met**, 1.6" in text
    assert "no cell below 0.99 of the best rival: **missed**, 0.9" in text


def test_a_mean_whose_interval_spans_the_goal_is_open(store: Store) -> None:
    cells = [cell(n) for n in range(1, 7)]
    for c, flash in zip(cells, (80.0, 100.0, 110.0, 110.0, 120.0, 150.0), strict=True):
        publish(store, c, {FLASH: flash, TUNED: 100.0})
    triton, flash_goal, _ = report.goals(report.collect(store, cells, "graph")[0])
    assert (triton["state"], triton["found"]) == ("open", None)
    assert flash_goal["state"] == "open"


def test_where_the_default_is_kept_it_is_its_own_rival_at_one(store: Store) -> None:
    publish(store, cell(1), {FLASH: 100.0, TRITON: 200.0})
    (found,), _ = report.collect(store, [cell(1)], "graph")
    assert (found.best.family, found.best.ratio.speedup) == ("flex_flash_stock", 1.0)
    assert "keep the default (FLASH)" in report.markdown([found], [])


def test_a_rival_that_does_not_run_is_said_with_its_reason(store: Store) -> None:
    broken = Trial(TRITON, TrialStatus.COMPILE_ERROR, "no such tile\nmore")
    publish(store, cell(1), {FLASH: 110.0, TUNED: 100.0}, 0.002, broken)
    (found,), _ = report.collect(store, [cell(1)], "graph")
    assert found.failed == {"flex_triton_stock": "compile_error: no such tile"}


def test_policies_are_told_apart(store: Store) -> None:
    for policy, flash in (("graph", 120.0), ("eager", 200.0)):
        publish(store, cell(1, policy), {FLASH: flash, TUNED: 100.0})
    found, _ = report.collect(store, [cell(1, "graph"), cell(1, "eager")], "graph")
    assert {p: len(c) for p, c in report.by_policy(found).items()} == {"all": 2, "eager": 1, "graph": 1}
    assert [c.best.ratio.speedup for c in found] == pytest.approx([1.2, 2.0], rel=0.002)


def test_the_picture_shows_every_cell(store: Store, tmp_path: Path) -> None:
    for n in (1, 2):
        publish(store, cell(n), {FLASH: 120.0, TRITON: 150.0, TUNED: 100.0})
    found, _ = report.collect(store, [cell(1), cell(2)], "graph")
    report.draw(tmp_path / "suite.png", found, "title")
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")


def test_cells_go_in_turn_over_patterns_the_small_ones_first() -> None:
    cells = [
        NamedWorkload(f"{p} {s}", replace(SHAPE, pattern=parse(p), seqlen_q=s, seqlen_k=s), "graph")
        for p in ("full", "causal", "alibi")
        for s in (4096, 1024)
    ]
    order = [c.name for c in in_turn(cells)]
    assert sorted(order[:3]) == ["alibi 1024", "causal 1024", "full 1024"]
    assert sorted(order[3:]) == ["alibi 4096", "causal 4096", "full 4096"]
    assert len(in_turn([*cells, *cells[:1]])) == 7
