"""What a search believes about its family's configs: the surrogate, fed with trials and neighbours.

Translates between trials and ``tuner.surrogate``: gains are relative to the family's own stock config,
while what has to be beaten is the best of all families.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Sequence

import numpy as np

from tuner.config import Config
from tuner.families.base import KernelFamily
from tuner.priors import MAX_EVIDENCE, Neighbour, likeness, log_gains, log_ratio, nearest
from tuner.surrogate import Surrogate
from tuner.target import Target
from tuner.trial import Trial
from tuner.workload import Workload

# The surrogate's matrices have a row for each trial and a column for each point: 12 MB for 3,000 and 500.
MAX_POINTS, MAX_TRIALS = 3_000, 500
_TRUSTS = (1.0, 0.6)  # how far neighbours may be believed, or not at all: what fits this study's trials decides
_TRIALS = 5  # measured configs of this study after which it knows more than chance
_EVIDENCE = 20  # measured configs of neighbours after which it knows more than a family's first
_AGREED = 3  # measured configs that must have been compared with the priors before these end a search


class Guess:
    """Beliefs about ``points`` of one family for one workload. ``priors`` are trials of other studies.

    Of a space of more than MAX_POINTS it knows what neighbours tried, the family's first, and a sample
    drawn with ``seed``; the rest is for others to propose.
    """

    def __init__(
        self,
        family: KernelFamily,
        points: Sequence[Config],
        workload: Workload,
        target: Target,
        priors: Sequence[Neighbour] = (),
        seed: int = 0,
    ) -> None:
        self._stock_key = Config.make(family.name, family.version).key
        self._heard: dict[str, float] = {}  # log ratios to the default, of all families' configs
        self._stock = self._best = 0.0  # log ratios to the default: of the stock config, and the best of all families
        self._ratios: dict[int, float | None] = {}
        near = nearest(workload, target, priors)
        evidence = [(t.config, gain, study)
                    for study, n in enumerate(near)
                    for t, gain in log_gains(n.trials, family.name, family.version)][:MAX_EVIDENCE]  # fmt: skip
        places = [(n.workload, n.target) for n in near] + [(workload, target)]
        alike = [[likeness(*a, *b) for b in places] for a in places]
        space = family.space(workload)
        self._points = _some(points, [*(c for c, _, _ in evidence), *family.first(workload)], seed)
        self._index = {c.key: i for i, c in enumerate(self._points)}
        self._of = len(points)
        self._models = [Surrogate(space, self._points, evidence, alike, t) for t in _TRUSTS if evidence]
        self._models.append(Surrogate(space, self._points))

    @property
    def _model(self) -> Surrogate:
        """The surrogate that expected this study's trials best; of equals, the one that trusts most."""
        return max(self._models, key=lambda m: m.fit())

    @property
    def has_priors(self) -> bool:
        """Tell whether neighbours were measured often enough to begin with what they say."""
        return self._models[0].evidence >= _EVIDENCE

    @property
    def ready(self) -> bool:
        """Tell whether it has something to say."""
        return (self.has_priors or self._models[0].told >= _TRIALS) and len(self._ratios) <= MAX_TRIALS

    def note(self, key: str) -> None:
        """Take note that a config is being tried, its result to come."""
        if (point := self._index.get(key)) is not None:
            for model in self._models:
                model.add(point)

    def hear(self, trial: Trial) -> None:
        """Take a trial of any family in."""
        log = log_ratio(trial)
        self._heard[trial.config.key] = log or 0.0
        self._best = max(0.0, *self._heard.values())  # a lucky first measurement may be taken back
        if trial.config.key == self._stock_key and log is not None:
            self._stock = log
            for point, known in self._ratios.items():
                self._tell(point, known)
        elif (point_of := self._index.get(trial.config.key)) is not None:
            self._ratios[point_of] = log
            self._tell(point_of, log)

    def propose(self, known: Container[str]) -> Config | None:
        """Return the config that is expected to gain most over the best so far; None if all are known."""
        gains = self._model.expected_gain(self._best - self._stock)
        for point in np.argsort(-gains, kind="stable"):
            config = self._points[int(point)]
            if config.key not in known:
                return config
        return None

    def settled(self, margin: float, confidence: float, least: int) -> bool:
        """Tell whether, with ``confidence``, no config left beats the best by more than ``margin``.

        Never before ``least`` configs were measured, or a few where neighbours know the space.
        """
        if self._models[0].told < (_AGREED if self.has_priors else least):
            return False
        to_beat = self._best - self._stock + math.log1p(margin)
        unknown = self._of / len(self._points)  # of a very large space the rest is taken to be like the sample
        return unknown * self._model.chance_of_better(to_beat) < 1 - confidence

    def _tell(self, point: int, log: float | None) -> None:
        for model in self._models:
            model.tell(point, None if log is None else log - self._stock)


def _some(points: Sequence[Config], wanted: Sequence[Config], seed: int) -> Sequence[Config]:
    """Return all points if they are few; else those ``wanted`` that are points, and others by chance."""
    if len(points) <= MAX_POINTS:
        return points
    by_key = {c.key: c for c in points}
    chosen = {c.key: c for c in wanted if c.key in by_key}
    rest = [c for c in points if c.key not in chosen]
    others = random.Random(seed).sample(rest, min(len(rest), MAX_POINTS))
    return [*chosen.values(), *others][:MAX_POINTS]
