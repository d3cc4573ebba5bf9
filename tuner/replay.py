"""Replays the search on recorded tables: what would it have found, and how far is that from the best?

Regret is the time of the chosen config divided by the best time in the cell's table: 1 is perfect.
Cells teach each other as studies in one database do, but **never a cell itself**: its neighbours are the
cells of other workloads (leave one out). The stock config's time is known to a study before anything
else; a strategy that begins with it pays one config of its budget for it.

===================  ======================================================================
strategy             what proposes
===================  ======================================================================
``ours``             ``tuner.search`` with the other cells as priors, after the stock config
``cold``             the same without priors
``first``            ``cold``, beginning with the family's own first configs; these were chosen
                     on the sweep of ``tests/fixtures``, so there it has seen the answers
``tpe``              Optuna's TPE as it comes, without the stock config
``random``           configs at random, without the stock config
``random+default``   the same after the stock config
===================  ======================================================================
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tuner.config import Config
from tuner.errors import InputError
from tuner.families import REGISTRY, load
from tuner.families.base import KernelFamily, Space
from tuner.priors import Neighbour
from tuner.spec import StudySettings
from tuner.tables import Cell, Row
from tuner.target import Target
from tuner.trial import Trial
from tuner.workload import Workload

STRATEGIES = ("ours", "cold", "first", "tpe", "random", "random+default")
_WITH_DEFAULT = ("ours", "cold", "first", "random+default")
_NOWHERE = Workload(batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_k=1, head_dim=8)


@dataclass(frozen=True)
class Replay:
    """One strategy on one cell with one seed: ``regrets[i]`` is the regret after i + 1 configs."""

    cell: str
    strategy: str
    seed: int
    regrets: tuple[float, ...]
    configs: tuple[str, ...]  # keys in the order of evaluation

    @property
    def regret(self) -> float:
        return self.regrets[-1]

    def at(self, count: int) -> float:
        """Return the regret after ``count`` configs, or after all if the search stopped before."""
        return self.regrets[min(count, len(self.regrets)) - 1]

    def to_dict(self) -> dict[str, Any]:
        return {
            "cell": self.cell,
            "strategy": self.strategy,
            "seed": self.seed,
            "regret": self.regret,
            "evaluated": len(self.configs),
            "regrets": list(self.regrets),
            "configs": list(self.configs),
        }


class Proposer(Protocol):
    """What a strategy is to a replay: ``tuner.search.Search``, or chance."""

    def ask(self, count: int) -> list[Config]: ...

    def tell(self, trial: Trial) -> None: ...


class Recorded:
    """A family as far as a table knows it: its space is what was recorded, the rest is infeasible."""

    def __init__(self, cell: Cell, *, first: bool = False) -> None:
        self.name, self.version = cell.family
        self._keys = {r.config.key for r in cell.rows}
        names = sorted({k for k, _ in cell.rows[0].config.params})
        self._space = {n: tuple(sorted({r.config[n] for r in cell.rows}, key=_order)) for n in names}
        family = load(self.name) if first and self.name in REGISTRY and cell.workload else None
        self._first = family.first(cell.workload) if family and cell.workload else ()

    def space(self, workload: Workload) -> Space:
        return self._space

    def first(self, workload: Workload) -> tuple[Config, ...]:
        return self._first

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        return "" if config.key in self._keys else "was not recorded"


class Chance:
    """Proposes a cell's configs in random order."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self._left = random.Random(seed).sample([r.config for r in cell.rows], len(cell.rows))

    def ask(self, count: int) -> list[Config]:
        asked, self._left = self._left[:count], self._left[count:]
        return asked

    def tell(self, trial: Trial) -> None:
        pass


def neighbours_of(cell: Cell, cells: Sequence[Cell]) -> list[Neighbour]:
    """Return what the other cells know, as studies: those of other workloads of the same policy.

    A second table of the same workload is the same cell, wherever it was recorded.
    """
    if cell.workload is None:
        return []
    found = []
    for other in cells:
        if other.workload is None or other.workload.key == cell.workload.key or other.policy != cell.policy:
            continue
        reference = other.default_us or other.best.time_us or 1.0
        trials = [other.trial(r, reference) for r in other.rows]
        stock = other.stock_trial()
        found.append(Neighbour(other.workload, other.target, tuple([stock, *trials] if stock else trials)))
    return found


def replay(
    cell: Cell,
    strategy: str,
    *,
    seed: int,
    budget: int,
    neighbours: Sequence[Neighbour] = (),
    ahead: int = 1,
    margin: float | None = StudySettings.margin,
    noise: float = 0.0,
) -> Replay:
    """Search one cell for at most ``budget`` configs, ``ahead`` of them asked before the first is told.

    With ``noise``, the spread of the log of a measurement, the search sees times that err by it, and
    chooses by them; regret is by the table's.

    Raises:
        InputError: for an unknown strategy, a budget or ``ahead`` below 1, or a negative ``noise``.
    """
    if not 0 <= noise < 1:
        raise InputError(f"noise is {noise}; it must be from 0 to below 1, as 0.005 for half a percent")
    if strategy not in STRATEGIES:
        raise InputError(f"strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}")
    for name, value in (("budget", budget), ("ahead", ahead)):
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    stock = cell.stock_trial() if strategy in _WITH_DEFAULT else None
    proposer = _proposer(cell, strategy, seed, budget - (stock is not None), neighbours, margin)
    run = _Run(cell, proposer, seed, noise)
    rows = {r.config.key: r for r in cell.rows}
    if stock is not None:
        run.take(Row(stock.config, stock.status, cell.default_us))
    while len(run.tried) < budget and (asked := proposer.ask(min(ahead, budget - len(run.tried)))):
        for config in asked:
            run.take(rows[config.key])
    return Replay(cell.name, strategy, seed, tuple(run.regrets), tuple(run.tried))


class _Run:
    """One replay under way: what was evaluated, and the regret of what would be chosen so far."""

    def __init__(self, cell: Cell, proposer: Proposer, seed: int, noise: float) -> None:
        self._cell, self._proposer, self._seed, self._noise = cell, proposer, seed, noise
        self._reference = cell.default_us
        self._chosen = (math.inf, math.inf)  # its time as seen, and as recorded
        self.regrets: list[float] = []
        self.tried: list[str] = []

    def take(self, row: Row) -> None:
        """Evaluate a config. The stock config's time is exact: everything is measured beside it."""
        seen = row
        if row.time_us is not None:
            exact = not self._noise or row.config.is_stock
            error = 0.0 if exact else random.Random(f"{self._seed}/{row.config.key}").gauss(0.0, self._noise)
            seen = replace(row, time_us=row.time_us * math.exp(error))
            self._chosen = min(self._chosen, (seen.time_us or math.inf, row.time_us))
        self._reference = self._reference or seen.time_us  # without a default: relative to the first that worked
        self._proposer.tell(self._cell.trial(seen, self._reference or 1.0))
        self.regrets.append(self._chosen[1] / self._cell.least_us)
        self.tried.append(row.config.key)


def replay_all(
    cells: Sequence[Cell],
    strategies: Sequence[str],
    *,
    budget: int = 12,
    seeds: int = 20,
    ahead: int = 1,
    margin: float | None = StudySettings.margin,
    noise: float = 0.0,
    say: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Replay]:
    """Yield the replay of every cell by every strategy with seeds 0, 1, ...; says how many are done."""
    total, done = len(cells) * len(strategies) * seeds, 0
    for cell in cells:
        neighbours = neighbours_of(cell, cells)
        for strategy in strategies:
            for seed in range(seeds):
                yield replay(
                    cell,
                    strategy,
                    seed=seed,
                    budget=budget,
                    neighbours=neighbours,
                    ahead=ahead,
                    margin=margin,
                    noise=noise,
                )
                done += 1
                say(done, total)


def _proposer(
    cell: Cell, strategy: str, seed: int, budget: int, neighbours: Sequence[Neighbour], margin: float | None
) -> Proposer:
    if strategy.startswith("random"):
        return Chance(cell, seed)
    family: KernelFamily = Recorded(cell, first=strategy == "first")  # type: ignore[assignment]
    tpe = strategy == "tpe"
    from tuner.search import Search  # Optuna takes 0.3 s to import, and most commands replay nothing

    return Search(
        family,
        cell.workload or _NOWHERE,
        cell.target,
        budget=budget,
        seed=seed,
        priors=neighbours if strategy == "ours" else (),
        margin=None if tpe else margin,
        guess=not tpe,
    )


def _order(value: object) -> tuple[bool, Any]:
    """Sort numbers as numbers, words as words; flags, as families have them, true first."""
    return (isinstance(value, str), not value if isinstance(value, bool) else value)
