"""A cheap model of one family's configs: what is known of them, here and in neighbouring studies.

A Gaussian process over (workload, config). Its covariance is the product of how alike two workloads
are (``tuner.priors``) and how alike two configs are, so trials of neighbours and of this study are
one set of data, and a neighbour's opinion fades as trials of our own come in. It models the log of
(time of the stock config / time), the scale in which a twofold slowdown is as far as a twofold gain.

The scale of everything is estimated with the rest, under an inverse-gamma prior, so predictions are
Student's t (Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, sections 2.2, 5.4 and
9.9). No randomness: the same data give the same answer.

    model = Surrogate(space, points, evidence, alike)
    model.add(3); model.tell(3, 0.05)     # points by their index
    model.expected_gain(best=0.0)         # one number a point
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.config import Config, Param
from tuner.families.base import Space

Array = npt.NDArray[np.float64]

_SAME_WORD = 0.7  # covariance of two configs that differ in one flag or word
_STEPS = 2.5  # steps of a number over which configs stay alike; half of its range where that is more
_ADDITIVE = 0.3  # share of the variance that is a sum over tunables, the rest is their interaction
_OFFSET = 0.1  # variance of what all configs of a study share, in units of the configs'
_NOISE = 0.002  # variance of a measurement, in the same units
_OWN = 0.01  # variance of what tunables do not explain: nobody knows a config before it is measured
_BAD = 0.2  # beyond 20% behind the stock config, how far does not matter any more
_GROW = 64  # rows
_SCALE_WEIGHT, _SCALE = 2.0, 0.001  # the prior of the variance: worth 2 * 2 trials, a spread of 3%


class Surrogate:
    """Gains of ``points``, of which some were tried; built for one study and kept while it lasts.

    ``evidence`` holds (config, log gain or None if it failed, number of its study); ``alike`` is the
    (studies + 1) x (studies + 1) matrix of likenesses with this study last. ``trust`` from 0 to 1 scales
    how much the others say about this one: which value fits is for ``fit`` to compare.
    """

    def __init__(
        self,
        space: Space,
        points: Sequence[Config],
        evidence: Sequence[tuple[Config, float | None, int]] = (),
        alike: Sequence[Sequence[float]] = ((1.0,),),
        trust: float = 1.0,
    ) -> None:
        self._space = space
        self._ladders = {k: sorted(v) if all(type(x) is int for x in v) else None for k, v in space.items()}
        self._places = {
            k: {(type(x), x): float(i) for i, x in enumerate(self._ladders[k] or v)} for k, v in space.items()
        }
        self._points = self._encode(points)
        self._rows: list[int] = []  # points added, in order
        self._spreads: list[float] = []  # of each row, given those before
        self._gains: dict[int, float] = {}
        self._tried: Array = np.zeros(len(points))  # how many alike were tried, and worked
        self._worked: Array = np.zeros(len(points))
        self._variance: Array = np.full(len(points), 1.0 + _OFFSET)  # given everything added, before scaling
        self._z_prior: Array = np.zeros(0)
        self._v: Array = np.zeros((_GROW, len(points)))  # L^-1 K(data, points); its first _used rows count
        self._used = 0
        usable = [(c, g, s) for c, g, s in evidence if self._fits(c)]
        self._take_evidence(usable, np.asarray(alike, dtype=np.float64), trust)

    @property
    def evidence(self) -> int:
        """How many trials of neighbours it knows that were measured."""
        return len(self._z_prior)

    @property
    def told(self) -> int:
        """How many points of this study were measured."""
        return len(self._gains)

    def add(self, point: int) -> None:
        """Take note that a point is being tried: its neighbourhood becomes less interesting."""
        if point in self._rows:
            return
        before = self._v[: self._used, point]
        cov = self._covariance(self._points[[point]], self._points)[0] + _OFFSET
        spread = math.sqrt(max(cov[point] + _NOISE - float(before @ before), _NOISE / 2))
        if self._used == len(self._v):
            self._v = np.concatenate([self._v, np.zeros((_GROW, len(self._points)))])
        self._v[self._used] = (cov - before @ self._v[: self._used]) / spread
        self._variance = np.maximum(self._variance - self._v[self._used] ** 2, 0.0)
        self._used += 1
        self._rows.append(point)
        self._spreads.append(spread)

    def tell(self, point: int, gain: float | None) -> None:
        """Take a result in: the log of (stock / time), or None if the config failed. Later ones replace it."""
        self.add(point)
        if point not in self._gains:
            near = self._product(self._points[[point]], self._points)[0]
            self._tried += near
            self._worked += near if gain is not None else 0.0
        self._gains.pop(point, None)
        if gain is not None:
            self._gains[point] = _squash(gain)

    def expected_gain(self, best: float) -> Array:
        """Return by how much each point may be expected to beat a log gain of ``best``; 0 for those added.

        Expected improvement (Jones, Schonlau & Welch 1998) times the chance that the config works at all.
        """
        from scipy.special import ndtr

        mean, spread, _ = self._predict()
        z = (mean - best) / spread
        gain = spread * (z * ndtr(z) + np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)) * self._chance_of_working()
        gain[self._rows] = 0.0
        return np.asarray(gain, dtype=np.float64)

    def chance_of_better(self, best: float) -> float:
        """Bound the chance that some point not yet added has a log gain above ``best``.

        The sum of the points' chances: too large where points are alike, so never too sure.
        """
        from scipy.special import stdtr

        mean, spread, freedom = self._predict()
        chances = stdtr(freedom, (mean - best) / spread) * self._chance_of_working()
        chances[self._rows] = 0.0
        return min(1.0, float(chances.sum()))

    def fit(self) -> float:
        """Return the log of the density that it gave to the gains of this study, each before it was told."""
        return self._replay()[3]

    def _predict(self) -> tuple[Array, Array, float]:
        """Return mean and spread of each point's log gain, and the degrees of freedom."""
        z, scale, freedom, _ = self._replay()
        return z @ self._v[: self._used], np.sqrt(scale * (self._variance + _OWN)), freedom

    def _replay(self) -> tuple[Array, float, float, float]:
        """Go through the gains in order; return them whitened, the scale, its degrees of freedom, and the fit."""
        z = np.zeros(self._used)
        n0 = len(self._z_prior)
        z[:n0] = self._z_prior
        freedom = 2 * _SCALE_WEIGHT + n0
        squares = 2 * _SCALE_WEIGHT * _SCALE + float(self._z_prior @ self._z_prior)
        fit = 0.0
        for i, point in enumerate(self._rows, start=n0):
            if (gain := self._gains.get(point)) is not None:  # one without a result is as expected, for now
                z[i] = (gain - float(self._v[:i, point] @ z[:i])) / self._spreads[i - n0]
                fit += _log_t(float(z[i]), freedom, squares / freedom) - math.log(self._spreads[i - n0])
                squares, freedom = squares + float(z[i] ** 2), freedom + 1
        return z, squares / freedom, freedom, fit

    def _chance_of_working(self) -> Array:
        return np.asarray((1 + self._worked) / (1 + self._tried), dtype=np.float64)

    def _take_evidence(self, usable: list[tuple[Config, float | None, int]], alike: Array, trust: float) -> None:
        from scipy.linalg import solve_triangular

        if not usable:
            return
        theirs = self._encode([c for c, _, _ in usable])
        of = np.array([s for _, _, s in usable], dtype=np.intp)  # their studies
        here = trust * alike[-1]
        ok = np.array([g is not None for _, g, _ in usable])
        near = self._product(theirs, self._points) * here[of][:, None]
        self._tried += near.sum(axis=0)
        self._worked += near[ok].sum(axis=0)
        theirs, of = theirs[ok], of[ok]
        gains = np.array([_squash(g) for _, g, _ in usable if g is not None])
        self._used = len(gains)
        cov = self._covariance(theirs, theirs) * alike[of][:, of]
        cov += _OFFSET * (of[:, None] == of[None, :])
        lower = _factor(cov)
        across = self._covariance(theirs, self._points) * here[of][:, None]
        self._v = np.asarray(solve_triangular(lower, across, lower=True), dtype=np.float64)
        self._z_prior = np.asarray(solve_triangular(lower, gains, lower=True), dtype=np.float64)
        self._variance = np.maximum(self._variance - (self._v**2).sum(axis=0), 0.0)

    def _fits(self, config: Config) -> bool:
        """Tell whether a neighbour's config is about the same tunables; its values may be others."""
        params = dict(config.params)
        return params.keys() == self._space.keys() and all(
            (type(v), v) in self._places[k] or (self._ladders[k] and type(v) is int) for k, v in params.items()
        )

    def _encode(self, configs: Sequence[Config]) -> Array:
        """Return configs as rows of places: where a value stands among its tunable's, between two if it is none."""
        rows = [[self._place(k, dict(c.params)[k]) for k in self._space] for c in configs]
        return np.array(rows, dtype=np.float64).reshape(len(configs), len(self._space))

    def _place(self, name: str, value: Param) -> float:
        place, ladder = self._places[name].get((type(value), value)), self._ladders[name]
        if place is not None or ladder is None:
            return place or 0.0
        return float(np.interp(float(value), [float(v) for v in ladder], range(len(ladder))))

    def _parts(self, a: Array, b: Array) -> list[Array]:
        """Return one matrix of covariances a tunable."""
        parts = []
        for i, ladder in enumerate(self._ladders.values()):
            apart = np.abs(a[:, i, None] - b[None, :, i])
            if ladder:
                parts.append(np.exp(-apart / max(_STEPS, (len(ladder) - 1) / 2)))
            else:
                parts.append(np.where(apart > 0, _SAME_WORD, 1.0))
        return parts

    def _product(self, a: Array, b: Array) -> Array:
        return np.asarray(np.prod(self._parts(a, b), axis=0), dtype=np.float64)

    def _covariance(self, a: Array, b: Array) -> Array:
        parts = self._parts(a, b)
        together: Any = _ADDITIVE * sum(parts) / len(parts) + (1 - _ADDITIVE) * np.prod(parts, axis=0)
        return np.asarray(together, dtype=np.float64)


def _factor(cov: Array) -> Array:
    """Return the lower Cholesky factor of a covariance with noise; more noise where it is none.

    Likenesses of studies need not form a covariance: the parameters of patterns count only between equal names.
    """
    from scipy.linalg import LinAlgError, cholesky

    for noise in (_NOISE, 10 * _NOISE, 100 * _NOISE):
        try:
            return np.asarray(cholesky(cov + noise * np.eye(len(cov)), lower=True), dtype=np.float64)
        except LinAlgError:
            continue
    return np.asarray(np.diag(np.sqrt(np.diag(cov) + len(cov))), dtype=np.float64)  # each says a little, alone


def _log_t(x: float, freedom: float, variance: float) -> float:
    """Return the log density of Student's t of a scale at ``x``."""
    half = (freedom + 1) / 2
    constant = math.lgamma(half) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi * variance)
    return constant - half * math.log1p(x * x / (freedom * variance))


def _squash(gain: float) -> float:
    """Compress what is far behind: the model need not spend its flexibility on how bad the bad are."""
    return gain if gain > -_BAD else -_BAD * (2 - math.exp((gain + _BAD) / _BAD))
