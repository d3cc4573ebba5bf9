"""What to try in one study: every family's stock config, then what each family's search proposes.

Holds no process and no file, and is rebuilt from stored trials at any moment: the loop of one
process (``tuner.study``) and the engine of many share it.

    plan = Plan(spec, settings)
    plan.tell(trial)                      # what is stored
    plan.reserve(config)                  # what another process tries now
    batch = plan.new_stocks() + plan.ask(8)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tuner import families
from tuner.config import Config
from tuner.priors import Neighbour
from tuner.spec import StudySettings, StudySpec
from tuner.trial import Trial, TrialStatus

if TYPE_CHECKING:
    from tuner.search import Search

# Successive halving over repeats: so many samples for all leaders, for the better half of them, and so on.
# Beyond the last number the screening is as good as it gets.
_REFINE_UP_TO = (60, 120, 240, 300)


class Plan:
    """The configs of one study: tried, being tried, and to be tried, each at most once.

    ``stocks`` are the families' stock configs in the spec's order, ``default`` the first of them,
    and ``trials`` what came of the configs by their key. ``priors`` are studies of other workloads.
    """

    def __init__(self, spec: StudySpec, settings: StudySettings, priors: Sequence[Neighbour] = ()) -> None:
        self._spec, self._settings, self._priors = spec, settings, priors
        self._members = [families.load(name.partition("/")[0]) for name in spec.families]
        self.stocks = [f.stock(spec.workload) for f in self._members]
        self.default = self.stocks[0]
        self.trials: dict[str, Trial] = {}
        self._taken: dict[str, Config] = {}  # asked or reserved
        self._made: list[Search] | None = None

    @property
    def _searches(self) -> list[Search]:
        """The families' searches, made when something is first asked: a large space takes half a second."""
        if self._made is None:
            from tuner.search import Search  # Optuna takes 0.3 s to import, and most commands plan nothing

            spec, s = self._spec, self._settings
            self._made = [
                Search(
                    f,
                    spec.workload,
                    spec.target,
                    budget=s.max_trials,
                    seed=s.seed,
                    priors=self._priors,
                    margin=s.margin,
                    confidence=s.confidence,
                )
                for f in self._members
                if f.space(spec.workload)
            ]
            for search in self._made:
                for trial in self.trials.values():
                    search.tell(trial)
                for config in self._taken.values():
                    search.reserve(config)
        return self._made

    @property
    def left(self) -> int:
        """How many configs ``ask`` may still return in all; stock configs cost none of them."""
        return sum(s.left for s in self._searches)

    def ask(self, ahead: int, outstanding: Mapping[str, int] | None = None) -> list[Config]:
        """Return new configs, so many that each family has up to ``ahead`` of them being tried.

        ``outstanding`` says how many of a family, by its name, are being tried already. Families
        without anything to tune, whose budget is spent, or where nothing is left to gain, get none.
        """
        out = outstanding or {}
        configs = [c for s in self._searches for c in s.ask(max(0, ahead - out.get(s.family.name, 0)))]
        self._taken |= {c.key: c for c in configs}
        return configs

    def reserve(self, config: Config) -> None:
        """Take note that another process tries ``config``: it is not proposed, and counts against the budget.

        Safe to repeat, and to call for what this plan proposed itself or was told of.
        """
        if self.known(config.key):
            return
        self._taken[config.key] = config
        for search in self._made or ():
            search.reserve(config)

    def tell(self, trial: Trial) -> None:
        """Take a trial in; a second one of the same config replaces the first."""
        self.trials[trial.config.key] = trial
        for search in self._made or ():
            search.tell(trial)

    def known(self, key: str) -> bool:
        """Tell whether the config of this key was tried, or is being tried."""
        return key in self.trials or key in self._taken

    def new_stocks(self) -> list[Config]:
        """Return the stock configs that nobody tried or tries."""
        return [c for c in self.stocks if not self.known(c.key)]

    def measured(self) -> list[Trial]:
        """Return the trials that worked and have a ratio to the default."""
        return [t for t in self.trials.values() if t.status is TrialStatus.OK and t.ratio is not None]

    def to_refine(self, finalists: int) -> Trial | None:
        """Return the leader to measure again while there is time; None if all have enough samples.

        By successive halving (Jamieson & Talwalkar 2016): a few samples for all leaders, then twice as
        many for the better half, and so on; within a round the one with the fewest goes first.
        """
        leaders = sorted(self.measured(), key=lambda t: -(t.ratio or 0.0))[: finalists + 2]
        for halvings, enough in enumerate(_REFINE_UP_TO):
            few = [t for t in leaders[: max(1, len(leaders) >> halvings)] if _samples(t) < enough]
            if few:
                return min(few, key=_samples)
        return None

    def best(self) -> Trial | None:
        """Return the fastest trial so far."""
        return max(self.measured(), key=lambda t: t.ratio or 0.0, default=None)


def _samples(trial: Trial) -> int:
    return len(trial.measurement.samples_us) if trial.measurement else 0
