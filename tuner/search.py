"""Which configs to try next: all of a small space; else by what is believed, or by Optuna's TPE.

Three advisers, in this order. The **family's first** configs, while nobody knows better. The
**guess** (``tuner.guess``): once neighbouring studies or a few trials of this one tell it something,
it proposes what it expects to gain most, and says when nothing is left to gain. **TPE** begins where
nothing is known, has every sixth proposal of a long study (so that a wrong belief is outlived), and
has the part of a very large space that there are no beliefs about.

Optuna is a calculator here: its study lives in memory, is rebuilt from stored trials at any
moment, and stores nothing. Constraints are the family's; an infeasible point costs no trial. The same
seed, priors and trials give the same proposals.

    search = Search(family, workload, target, budget=48, seed=0, priors=neighbours, margin=0.02)
    search.tell(trial)          # also how stored trials are replayed
    search.reserve(config)      # tried by another process, result to come
    batch = search.ask(15)
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence

import optuna
from optuna.distributions import BaseDistribution as Distribution

from tuner.config import Config, Param
from tuner.families.base import Enumerates, KernelFamily
from tuner.guess import Guess
from tuner.priors import Neighbour
from tuner.target import Target
from tuner.trial import Trial, TrialStatus
from tuner.workload import Workload

optuna.logging.set_verbosity(optuna.logging.WARNING)

_DRAWS_PER_ASK = 40  # infeasible or known points that TPE may propose before we draw for it
_STARTUP_TRIALS = 10  # random points before TPE models anything: Optuna's default
_TPE_EVERY, _TPE_FROM = 6, 24  # its share of a study's proposals, and from which one on


class Search:
    """Proposes a family's configs for one workload, each at most once.

    ``priors`` are studies of other workloads, or of this one elsewhere. With a ``margin``, a space
    larger than the budget is left alone once, with ``confidence``, nothing in it beats the best by more
    than this fraction. ``guess=False`` leaves all to TPE.
    """

    def __init__(
        self,
        family: KernelFamily,
        workload: Workload,
        target: Target,
        *,
        budget: int,
        seed: int,
        priors: Sequence[Neighbour] = (),
        margin: float | None = None,
        confidence: float = 0.95,
        guess: bool = True,
    ) -> None:
        self.family = family
        self._budget, self._margin, self._confidence = budget, margin, confidence
        self._known: set[str] = set()
        self._told: set[str] = set()
        self._open: dict[str, optuna.trial.Trial | int] = {}  # what a result is told by: ours, or a number
        self._others = False  # others tried something since the sampler was seeded
        space = family.space(workload)
        self.feasible = list(_feasible(family, workload, target))
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
        self._guess: Guess | None = None
        if guess and (priors or not self.enumerates):
            self._guess = Guess(family, self.feasible, workload, target, priors, seed)

    @property
    def left(self) -> int:
        """How many configs may still be proposed."""
        return max(0, min(self._budget, len(self.feasible)) - len(self._known))

    def ask(self, count: int) -> list[Config]:
        """Return up to ``count`` new feasible configs; fewer or none when the budget is spent or the search settled."""
        return [] if self.settled else list(itertools.islice(self._new(), min(count, self.left)))

    @property
    def settled(self) -> bool:
        """Tell whether nothing that is left would, most likely, beat the best so far by the margin.

        A space within the budget is tried whole, and without priors half of the budget is used.
        """
        if self._guess is None or self._margin is None or self.enumerates:
            return False
        return self._guess.settled(self._margin, self._confidence, least=self._budget // 2 + 1)

    def reserve(self, config: Config) -> None:
        """Take note that a config is tried elsewhere: never proposed here, and counted against the budget.

        TPE keeps away from it, as from what it proposed itself, until its result is told.
        """
        key = config.key
        if key not in self._by_key or key in self._known:
            return
        self._know(key)
        self._others = True
        if not self.enumerates:
            self._run_in_tpe(config)

    def tell(self, trial: Trial) -> None:
        """Take a trial's result in; failures are told as failed, never as a bad time.

        A config measured again is not told again: TPE would take the repeats for as many good points.
        """
        key = trial.config.key
        if self._guess is not None:
            self._guess.hear(trial)
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
            config = self._first_or_guessed()
            if config is None and not dry:
                config = self._draw()
                dry = config is None
            if config is None:
                config = next(c for c in self._shuffled if c.key not in self._known)
            self._know(config.key)
            yield config

    def _first_or_guessed(self) -> Config | None:
        """Return what the family or the guess proposes next; None if it is TPE's turn."""
        informed = self._guess is not None and self._guess.has_priors
        if not informed and (config := next((c for c in self._first if c.key not in self._known), None)):
            return config
        number = len(self._known)
        if self._guess is None or not self._guess.ready or (number >= _TPE_FROM and number % _TPE_EVERY == 0):
            return None
        proposed = self._guess.propose(self._known)
        if proposed is not None and not self.enumerates:
            self._run_in_tpe(proposed)
        return proposed

    def _know(self, key: str) -> None:
        self._known.add(key)
        if self._guess is not None:
            self._guess.note(key)

    def _run_in_tpe(self, config: Config) -> None:
        """Have TPE keep away from a config that it did not propose, until its result is told."""
        self._open[config.key] = len(self._study.get_trials(deepcopy=False))
        self._study.add_trial(self._stored(config, optuna.trial.TrialState.RUNNING))

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


def _feasible(family: KernelFamily, workload: Workload, target: Target) -> Iterable[Config]:
    if isinstance(family, Enumerates):
        return family.points(workload, target)
    return (c for c in _points(family, family.space(workload)) if not family.feasible(c, workload, target))


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
