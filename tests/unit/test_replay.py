"""Replay: regret by hand, a cell never teaches itself, and budgets are kept."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from tuner import tables
from tuner.config import Config
from tuner.errors import InputError
from tuner.pattern import parse
from tuner.replay import STRATEGIES, Chance, Recorded, neighbours_of, replay, replay_all
from tuner.search import Search
from tuner.tables import Cell, Row
from tuner.target import Target, named
from tuner.trial import TrialStatus
from tuner.workload import Workload

SWEEP = Path(__file__).parents[1] / "fixtures" / "h200_fa4_fwd_sweep.jsonl"
H200 = named("sm_90a")
W = Workload(batch=1, heads_q=4, heads_kv=4, seqlen_q=512, seqlen_k=512, head_dim=64, pattern=parse("causal"))
SEQLENS = (256, 1024, 2048)


def config(a: int, b: int) -> Config:
    return Config.make("fam", 1, a=a, b=b)


def cell(seqlen: int, times: dict[tuple[int, int], float | None], default_us: float | None = 100.0) -> Cell:
    workload = W.with_(seqlen_q=seqlen, seqlen_k=seqlen)
    rows = [Row(config(*p), TrialStatus.OK if t else TrialStatus.RUN_ERROR, t) for p, t in times.items()]
    return Cell(workload.label, workload, H200, tuple(rows), default_us)


def needle(seqlen: int, seed: int) -> Cell:
    """Times without any order, and one config at half of the rest: only who has seen it finds it at once."""
    rng = random.Random(seed)
    times: dict[tuple[int, int], float | None] = {(a, b): rng.uniform(100, 120) for a in range(12) for b in range(12)}
    times[rng.randrange(12), rng.randrange(12)] = 50.0
    return cell(seqlen, times)


def test_regret_by_hand() -> None:
    table = cell(512, {(0, 0): 120.0, (0, 1): 80.0, (1, 0): 160.0, (1, 1): None})
    order = [c.key for c in Chance(table, 3).ask(4)]
    times = {r.config.key: r.time_us or math.inf for r in table.rows}
    found = replay(table, "random", seed=3, budget=3)
    best = [min(times[k] for k in order[: n + 1]) / 80 for n in range(3)]
    assert found.configs == tuple(order[:3])
    assert found.regrets == pytest.approx(best)
    assert (found.at(1), found.at(3), found.at(99)) == pytest.approx((best[0], best[2], best[2]))
    with_default = replay(table, "random+default", seed=3, budget=3)
    assert with_default.configs == ("fam/1:", *order[:2])
    assert with_default.regrets == pytest.approx([1.25, *(min(1.25, b) for b in best[:2])])


def test_the_default_may_be_the_best_of_its_table() -> None:
    table = cell(512, {(0, 0): 120.0, (0, 1): 80.0}, default_us=40.0)
    assert replay(table, "cold", seed=0, budget=1).regrets == (1.0,)
    assert replay(table, "random", seed=0, budget=2).regret == 2.0  # it does not know the default


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_finds_the_best_of_a_table_within_its_budget_and_tries_nothing_twice(strategy: str) -> None:
    table = cell(512, {(a, b): None if (a + b) % 5 == 4 else 100.0 + 3 * a + b for a in range(4) for b in range(4)})
    found = replay(table, strategy, seed=0, budget=17, margin=None)
    assert found.regret == 1.0
    assert len(set(found.configs)) == len(found.configs) <= 17
    short = replay(table, strategy, seed=0, budget=5)
    assert len(short.configs) == len(short.regrets) == 5
    assert list(short.regrets) == sorted(short.regrets, reverse=True)


def test_a_cell_has_the_others_as_neighbours_and_never_itself() -> None:
    cells = tables.read([SWEEP])
    for mine in cells:
        found = neighbours_of(mine, cells)
        assert len(found) == 7
        assert mine.workload not in {n.workload for n in found}
        assert all(n.trials[0].config.is_stock for n in found)
    # a second recording of the same workload, here or on another GPU, is the cell itself
    twice = tables.read([SWEEP, SWEEP])
    assert all(len(neighbours_of(c, twice)) == 14 for c in twice)
    h100 = Target("NVIDIA H100", "sm_90a", 132)
    moved = [Cell(c.name, c.workload, h100, c.rows, c.default_us) for c in cells]
    assert len(neighbours_of(cells[0], [*cells, *moved])) == 14


def test_a_planted_leak_would_show_and_does_not() -> None:
    """Tables without any order: the needle is found at once by who saw the cell, and else only by chance."""
    cells = [needle(s, seed) for seed, s in enumerate((512, *SEQLENS))]
    target = cells[0]
    copy = Cell("a copy under another name", target.workload, H200, target.rows, target.default_us)
    honest = replay(target, "ours", seed=0, budget=12, neighbours=neighbours_of(target, cells), margin=None)
    copied = replay(target, "ours", seed=0, budget=12, neighbours=neighbours_of(target, [*cells, copy]), margin=None)
    assert copied == honest
    # what a leak looks like: the same table as another workload's
    other = W.with_(seqlen_q=500, seqlen_k=500)
    leak = [*cells, Cell("leak", other, H200, target.rows, target.default_us)]
    leaked = replay(target, "ours", seed=0, budget=12, neighbours=neighbours_of(target, leak), margin=None)
    assert leaked.at(4) == 1.0
    assert honest.at(4) > 1.9


def test_the_others_of_another_policy_teach_nothing() -> None:
    mine, other = needle(512, 0), needle(1024, 1)
    eager = Cell(other.name, other.workload, H200, other.rows, other.default_us, "eager")
    assert len(neighbours_of(mine, [mine, other])) == 1
    assert neighbours_of(mine, [mine, eager]) == []


def test_a_foreign_cell_without_workload_or_default_is_replayed() -> None:
    rows = tuple(Row(Config.make("t4", 1, a=a, b=b), TrialStatus.OK, 10.0 + a + b) for a in range(8) for b in range(8))
    foreign = Cell("theirs", None, H200, rows)
    assert neighbours_of(foreign, [foreign, needle(512, 0)]) == []
    for strategy in STRATEGIES:
        found = replay(foreign, strategy, seed=0, budget=12)
        assert len(found.configs) == 12
    assert replay(foreign, "cold", seed=0, budget=30, margin=None).regret == 1.0


def test_the_same_seed_replays_the_same_and_noise_is_of_the_seed() -> None:
    cells = tables.read([SWEEP])[:3]
    runs = [list(replay_all(cells, STRATEGIES, seeds=2, budget=6)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 3 * len(STRATEGIES) * 2
    near = neighbours_of(cells[0], cells)
    quiet, loud, again = (
        replay(cells[0], "ours", seed=s, budget=12, neighbours=near, noise=n) for s, n in ((1, 0.0), (1, 0.2), (1, 0.2))
    )
    assert loud == again
    assert quiet != loud


def test_the_table_is_all_that_there_is() -> None:
    table = cell(512, {(0, 3): 1.0, (1, 2): 2.0, (5, 3): 3.0})
    family = Recorded(table)
    found = Search(family, W, H200, budget=10, seed=0)  # type: ignore[arg-type]
    assert {c.key for c in found.ask(10)} == {r.config.key for r in table.rows}
    assert family.space(W) == {"a": (0, 1, 5), "b": (2, 3)}
    assert family.first(W) == ()
    real = Recorded(tables.read([SWEEP])[0], first=True)
    assert real.first(W)[0]["tile_m"] == 128


@pytest.mark.parametrize(
    ("strategy", "changes", "said"),
    [
        ("fastest", {}, "strategy is 'fastest'; it must be one of ours, cold"),
        ("ours", {"budget": 0}, "budget is 0"),
        ("ours", {"ahead": 0}, "ahead is 0"),
        ("ours", {"noise": -0.1}, "noise is -0.1"),
    ],
)
def test_what_makes_no_sense_is_refused(strategy: str, changes: dict[str, float], said: str) -> None:
    with pytest.raises(InputError) as e:
        replay(needle(512, 0), strategy, seed=0, **({"budget": 12} | changes))  # type: ignore[arg-type]
    assert said in str(e.value)


def test_the_recorded_sweep_is_searched_within_the_target() -> None:
    """At most 12 configs a cell, priors from the other cells: median regret <= 1.01, worst <= 1.03; chance is worse."""
    cells = tables.read([SWEEP])
    found = list(replay_all(cells, ("ours", "random"), seeds=3))
    ours = sorted(r.regret for r in found if r.strategy == "ours")
    assert ours[len(ours) // 2] <= 1.01
    assert ours[-1] <= 1.03
    assert all(len(r.configs) <= 12 for r in found)
    assert sum(ours) < sum(r.regret for r in found if r.strategy == "random")


def test_while_nothing_worked_the_regret_is_infinite() -> None:
    table = cell(512, {(a, 0): None for a in range(9)} | {(9, 0): 50.0}, default_us=None)
    found = replay(table, "random", seed=1, budget=10)
    worked = found.configs.index(config(9, 0).key)
    assert worked > 0
    assert found.regrets == (math.inf,) * worked + (1.0,) * (10 - worked)
