"""Which configs to try next: enumeration where the space is small, Optuna's TPE where it is not.

Optuna is a calculator here: its study lives in memory, is rebuilt from stored trials at any
moment, and stores nothing. Constraints are the family's; an infeasible point costs no trial.

    search = Search(family, workload, target, budget=48, seed=0)
    search.tell(trial)          # also how stored trials are replayed
    search.reserve(config)      # tried by another process, result to come
    batch = search.ask(15)
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import optuna
from optuna.distributions import BaseDistribution as Distribution

from tuner.config import Config, Param
from tuner.families.base import KernelFamily
from tuner.target import Target
from tuner.trial import Trial, TrialStatus
from tuner.workload import Workload

optuna.logging.set_verbosity(optuna.logging.WARNING)

_DRAWS_PER_ASK = 40  # infeasible or known points that TPE may propose before we draw for it
_STARTUP_TRIALS = 12  # random points before TPE models anything


class Search:
    """Proposes a family's configs for one workload, each at most once."""

    def __init__(self, family: KernelFamily, workload: Workload, target: Target, *, budget: int, seed: int) -> None:
        self.family = family
        self._budget = budget
        self._known: set[str] = set()
        self._told: set[str] = set()
        self._open: dict[str, optuna.trial.Trial | int] = {}  # what a result is told by: ours, or a number
        self._others = False  # others tried something since the sampler was seeded
        space = family.space(workload)
        self.feasible = [c for c in _points(family, space) if not family.feasible(c, workload, target)]
        self._by_key = {c.key: c for c in self.feasible}
        self.enumerates = len(self.feasible) <= budget
        self._rng = random.Random(seed)
        self._shuffled = iter(self._rng.sample(self.feasible, len(self.feasible)))  # what it passed is known for good
        self._first = [c for c in family.first(workload) if c.key in self._by_key]
        self._distributions: dict[str, Distribution] = {
            k: optuna.distributions.CategoricalDistribution(v) for k, v in space.items()
        }
        self._distributions |= {k: _ladder(v) for k, v in space.items() if _is_ladder(v)}
        self._seed = seed
        self._study = optuna.create_study(sampler=_sampler(seed))

    @property
    def left(self) -> int:
        """How many configs may still be proposed."""
        return max(0, min(self._budget, len(self.feasible)) - len(self._known))

    def ask(self, count: int) -> list[Config]:
        """Return up to ``count`` new feasible configs; fewer or none when the budget is spent."""
        return list(itertools.islice(self._new(), min(count, self.left)))

    def reserve(self, config: Config) -> None:
        """Take note that a config is tried elsewhere: never proposed here, and counted against the budget.

        TPE keeps away from it, as from what it proposed itself, until its result is told.
        """
        key = config.key
        if key not in self._by_key or key in self._known:
            return
        self._known.add(key)
        self._others = True
        if not self.enumerates:
            self._open[key] = len(self._study.get_trials(deepcopy=False))
            self._study.add_trial(self._stored(config, optuna.trial.TrialState.RUNNING))

    def tell(self, trial: Trial) -> None:
        """Take a trial's result in; failures are told as failed, never as a bad time.

        A config measured again is not told again: TPE would take the repeats for as many good points.
        """
        key = trial.config.key
        if trial.config.is_stock or key not in self._by_key:
            return
        self._others |= key not in self._known
        self._known.add(key)
        if self.enumerates or key in self._told:
            return
        self._told.add(key)
        ok = trial.status is TrialStatus.OK and trial.ratio
        # TPE minimizes: the negated log-speedup is symmetric around the default
        value = -math.log(trial.ratio) if ok and trial.ratio else None
        state = optuna.trial.TrialState.COMPLETE if value is not None else optuna.trial.TrialState.FAIL
        asked = self._open.pop(key, None)
        if asked is not None:
            self._study.tell(asked, values=value, state=state)
        else:
            self._study.add_trial(self._stored(trial.config, state, value))

    def _new(self) -> Iterator[Config]:
        dry = self.enumerates  # TPE that found nothing new finds nothing until it is told something
        while self.left > 0:
            config = next((c for c in self._first if c.key not in self._known), None)
            if config is None and not dry:
                config = self._draw()
                dry = config is None
            if config is None:
                config = next(c for c in self._shuffled if c.key not in self._known)
            self._known.add(config.key)
            yield config

    def _draw(self) -> Config | None:
        """Let TPE propose until a point is feasible and new; None if it does not manage."""
        if self._others:  # they began with the same seed, and it would draw what they drew
            self._study.sampler = _sampler(random.Random(f"{self._seed}/{len(self._known)}").getrandbits(32))
            self._others = False
        for _ in range(_DRAWS_PER_ASK):
            asked = self._study.ask(dict(self._distributions))
            config = Config.make(self.family.name, self.family.version, **asked.params)
            if config.key in self._by_key and config.key not in self._known:
                self._open[config.key] = asked
                return config
            self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
        return None

    def _stored(
        self, config: Config, state: optuna.trial.TrialState, value: float | None = None
    ) -> optuna.trial.FrozenTrial:
        return optuna.trial.create_trial(
            params=dict(config.params),
            distributions=dict(self._distributions),
            value=value,
            state=state,
        )


def _sampler(seed: int) -> optuna.samplers.TPESampler:
    return optuna.samplers.TPESampler(
        seed=seed, multivariate=True, constant_liar=True, n_startup_trials=_STARTUP_TRIALS
    )


def _points(family: KernelFamily, space: object) -> Iterator[Config]:
    assert isinstance(space, dict)
    if not space:
        return
    for values in itertools.product(*space.values()):
        yield Config.make(family.name, family.version, **dict(zip(space, values, strict=True)))


def _is_ladder(values: tuple[Param, ...]) -> bool:
    """Tell whether values are evenly spaced whole numbers, so that near ones behave alike."""
    if len(values) < 3 or any(type(v) is not int for v in values):
        return False
    steps = {int(b) - int(a) for a, b in itertools.pairwise(values)}
    return len(steps) == 1 and steps.pop() > 0


def _ladder(values: tuple[Param, ...]) -> optuna.distributions.IntDistribution:
    return optuna.distributions.IntDistribution(int(values[0]), int(values[-1]), step=int(values[1]) - int(values[0]))
