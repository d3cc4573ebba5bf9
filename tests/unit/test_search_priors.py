"""The search with neighbours, and when it stops: transfer, early stop, determinism."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from tuner.config import Config
from tuner.families.base import Space
from tuner.priors import Neighbour
from tuner.search import Search
from tuner.target import Target, named
from tuner.trial import Measurement, Trial, TrialStatus
from tuner.workload import Workload

WORKLOAD = Workload(batch=1, heads_q=1, heads_kv=1, seqlen_q=512, seqlen_k=512, head_dim=64)
FAKE = named("fake")
SPACE: Space = {"a": tuple(range(12)), "b": tuple(range(0, 128, 16)), "flag": (True, False)}
STOCK = Config.make("hill", 1)


class Hill:
    """A family of 192 configs; what they take is up to the test."""

    name, version = "hill", 1

    def __init__(self, first: tuple[Config, ...] = ()) -> None:
        self._first = first

    def space(self, workload: Workload) -> Space:
        return SPACE

    def first(self, workload: Workload) -> tuple[Config, ...]:
        return self._first

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        return ""


def config(a: int, b: int, flag: bool) -> Config:
    return Config.make("hill", 1, a=a, b=b, flag=flag)


def gain(at: tuple[int, int], config: Config) -> float:
    """The log of stock / time: 0.1 at the top, falling with the distance."""
    far = 0.03 * abs(int(config["a"]) - at[0]) + 0.03 * abs(int(config["b"]) // 16 - at[1])
    return 0.1 - far - (0.0 if config["flag"] else 0.05)


def trial(config: Config, log_gain: float) -> Trial:
    ratio = math.exp(log_gain)
    return Trial(config, TrialStatus.OK, measurement=Measurement("graph", (1.0,), (ratio,), ratio, 1.0))


def neighbour(top: tuple[int, int], seqlen: int = 1024, offset: float = 0.0, tried: int = 60) -> Neighbour:
    """A study of a like workload, of 60 configs at random; ``offset``: its default is another family's."""
    points = [config(a, b, f) for a in SPACE["a"] for b in SPACE["b"] for f in (True, False)]  # type: ignore[arg-type]
    some = random.Random(seqlen).sample(points, tried)
    trials = [trial(STOCK, offset), *(trial(c, gain(top, c) + offset) for c in some)]
    return Neighbour(WORKLOAD.with_(seqlen_q=seqlen, seqlen_k=seqlen), FAKE, tuple(trials))


def search(priors: Sequence[Neighbour] = (), *, budget: int = 12, margin: float | None = None, seed: int = 0) -> Search:
    return Search(Hill(), WORKLOAD, FAKE, budget=budget, seed=seed, priors=priors, margin=margin)  # type: ignore[arg-type]


def run(found: Search, of: Callable[[Config], float], ahead: int = 1) -> list[tuple[Config, float]]:
    found.tell(trial(STOCK, 0.0))
    tried = []
    while configs := found.ask(ahead):
        for c in configs:
            tried.append((c, of(c)))
            found.tell(trial(c, of(c)))
    return tried


def test_a_neighbours_winner_is_tried_first() -> None:
    (first,) = search([neighbour((7, 3))]).ask(1)
    assert abs(int(first["a"]) - 7) + abs(int(first["b"]) // 16 - 3) <= 2
    assert first["flag"]


@pytest.mark.parametrize("offset", [0.0, 0.4, -0.4])
def test_the_default_of_a_neighbours_study_may_be_another_familys(offset: float) -> None:
    assert search([neighbour((7, 3), offset=offset)]).ask(3) == search([neighbour((7, 3))]).ask(3)


def test_trials_of_our_own_outweigh_a_neighbour_that_misleads() -> None:
    tried = run(search([neighbour((1, 6))], budget=24), lambda c: gain((9, 2), c))
    assert abs(int(tried[0][0]["a"]) - 1) <= 2
    assert max(g for _, g in tried) >= 0.1 - 0.03  # at most one step from the top


def test_with_neighbours_less_is_needed_than_without_and_without_less_than_by_chance() -> None:
    """Mean distance from the top, after 8 of 192 configs: 0.000, 0.020 and 0.093 (2026-12-01)."""
    behind: dict[str, list[float]] = {"priors": [], "none": [], "chance": []}
    for seed, top in enumerate([(2, 2), (9, 5), (6, 1), (4, 6), (10, 3), (7, 7)]):
        near = [neighbour((top[0], max(top[1] - 1, 0))), neighbour(top, seqlen=2048)]
        behind["priors"].append(0.1 - max(g for _, g in run(search(near, budget=8, seed=seed), partial(gain, top))))
        behind["none"].append(0.1 - max(g for _, g in run(search(budget=8, seed=seed), partial(gain, top))))
        drawn = random.Random(seed).sample(search().feasible, 8)
        behind["chance"].append(0.1 - max(gain(top, c) for c in drawn))
    means = {name: statistics.mean(values) for name, values in behind.items()}
    assert means["priors"] < 0.01
    assert means["priors"] < means["none"] < 0.5 * means["chance"]


def test_the_same_priors_trials_and_seed_propose_the_same() -> None:
    near = [neighbour((7, 3)), neighbour((6, 3), seqlen=2048)]
    runs = [[c.key for c, _ in run(search(p), lambda c: gain((8, 4), c), ahead=4)] for p in (near, near[::-1])]
    assert runs[0] == runs[1]
    half = runs[0][:8]
    again = search(near)
    again.tell(trial(STOCK, 0.0))
    for key in half:
        c = next(c for c in again.feasible if c.key == key)
        again.tell(trial(c, gain((8, 4), c)))
    assert [c.key for c in again.ask(4)] == runs[0][8:]  # rebuilt from what is stored


def test_without_enough_priors_the_familys_first_go_first() -> None:
    first = (config(0, 0, False), config(11, 112, False))
    for near, wanted in (([], True), ([neighbour((7, 3), tried=10)], True), ([neighbour((7, 3))], False)):
        found = Search(Hill(first), WORKLOAD, FAKE, budget=12, seed=0, priors=near)  # type: ignore[arg-type]
        assert (tuple(found.ask(2)) == first) is wanted


def test_a_space_within_the_budget_is_tried_whole_the_most_promising_first() -> None:
    tried = run(search([neighbour((7, 3))], budget=192, margin=0.02), lambda c: gain((7, 3), c))
    assert len({c.key for c, _ in tried}) == 192
    assert max(g for _, g in tried[:3]) >= 0.1 - 0.03


def test_of_a_very_large_space_it_knows_what_neighbours_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.guess.MAX_POINTS", 30)
    near = neighbour((7, 3), tried=25)
    (first, *rest) = search([near], budget=60).ask(60)
    best = max((t for t in near.trials if not t.config.is_stock), key=lambda t: t.ratio or 0.0)
    assert gain((7, 3), first) >= gain((7, 3), best.config) - 0.03
    assert len({c.key for c in (first, *rest)}) == 60  # beyond what it knows TPE goes on
    assert search([near], budget=60).ask(60) == [first, *rest]


@pytest.mark.parametrize("room", [170, 190, 191])
def test_a_space_a_little_larger_than_what_it_models_is_sampled(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr("tuner.guess.MAX_POINTS", room)  # of 192 points, 25 of which neighbours tried
    proposed = search([neighbour((7, 3), tried=25)], budget=60).ask(60)
    assert len({c.key for c in proposed}) == 60


def test_a_lucky_first_measurement_that_is_taken_back_does_not_stop_the_search() -> None:
    lucky, plain = search(budget=60, margin=0.02), search(budget=60, margin=0.02)
    for searching in (lucky, plain):
        for c in searching.ask(6):
            if searching is lucky:
                searching.tell(trial(c, 3.0))
            searching.tell(trial(c, 0.0))
    assert lucky._guess._best == plain._guess._best == 0.0


def test_priors_of_another_family_or_tunables_say_nothing() -> None:
    near = neighbour((7, 3))
    odd = Neighbour(
        near.workload,
        FAKE,
        tuple(Trial(Config.make("hill", 2, **dict(t.config.params)), t.status, measurement=t.measurement)
              for t in near.trials),
    )  # fmt: skip
    assert search([odd]).ask(12) == search().ask(12)


def test_it_stops_early_where_all_is_flat_and_not_where_it_is_steep() -> None:
    flat_there = Neighbour(
        neighbour((7, 3)).workload,
        FAKE,
        tuple(trial(t.config, 0.002 * (i % 3)) for i, t in enumerate(neighbour((7, 3)).trials)),
    )
    flat = run(search([flat_there], budget=48, margin=0.02), lambda c: 0.001 * (int(c["a"]) % 2))
    assert 3 <= len(flat) < 12
    # neighbours say that it is flat, and it is not: the first trials contradict them
    surprised = run(search([flat_there], budget=48, margin=0.02), lambda c: gain((9, 2), c))
    assert max(g for _, g in surprised) >= 0.1 - 0.03
    assert len(surprised) > len(flat)


@pytest.mark.parametrize("flat", [True, False])
def test_without_priors_half_of_the_budget_is_used(flat: bool) -> None:
    def of(c: Config) -> float:
        return 0.001 * (int(c["a"]) % 2) if flat else 3 * gain((9, 2), c)

    tried = run(search(budget=60, margin=0.02), of)
    assert len(tried) >= 31
    assert (len(tried) < 60) is flat or max(g for _, g in tried) == pytest.approx(0.3)
    assert len(run(search(budget=60), of)) == 60  # without a margin it never stops


def test_what_other_families_reach_has_to_be_beaten() -> None:
    """A rival twice as fast as everything here ends the search of a family that cannot come near."""
    found = search([neighbour((7, 3))], budget=48, margin=0.02)
    found.tell(trial(Config.make("rival", 1), math.log(2.0)))
    assert len(run(found, lambda c: gain((7, 3), c))) == 3


def test_a_stopped_search_goes_on_when_a_late_result_gives_hope() -> None:
    found = search([neighbour((7, 3))], budget=48, margin=0.02)
    found.tell(trial(Config.make("rival", 1), 0.101))
    found.tell(trial(STOCK, 0.0))
    late = config(0, 112, False)
    for c in found.ask(8):
        found.tell(trial(c, gain((7, 3), c)))
    stopped = found.ask(4)
    found.tell(trial(late, 0.11))  # where neighbours had expected nothing
    assert not stopped
    assert len(found.ask(4)) == 4
