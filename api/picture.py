"""What a plot of a study shows: the history of its search, and its finals. ``api.plot`` draws it.

Speedups are times of the default over times of the config: above 1 is faster.

    >>> prepare([], None, title="causal", subtitle="").best
    ()
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.config import Config
from tuner.trial import Finalist, Trial, TrialStatus, TunedConfig

MAX_FINALS = 12  # rows that can be read in the height of the plot

# Okabe and Ito's colours, which the colour-blind tell apart; families take them in order of appearance
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C6D31", "#6A3D9A")


@dataclass(frozen=True)
class Point:
    """One trial; ``speedup`` is None for a failure."""

    number: int  # from 1, in the order of the search
    trial: Trial
    speedup: float | None


@dataclass(frozen=True)
class Picture:
    """Everything that a plot shows, whoever draws it."""

    title: str
    subtitle: str
    points: tuple[Point, ...]
    best: tuple[tuple[int, float], ...]  # (trial number, best speedup so far), from the first measured one on
    finals: tuple[Finalist, ...]  # fastest first
    finals_title: str
    labels: tuple[str, ...]  # of the finals, in lines that fit
    winner: Config | None
    default: Config | None
    margin: float
    colors: dict[str, str]  # by family

    @property
    def floor(self) -> float:
        """Where failures are drawn: below everything measured."""
        low, high = self._measured_range
        return low - 0.12 * (high - low)

    @property
    def y_range(self) -> tuple[float, float]:
        """The vertical range of the search's panel."""
        low, high = self._measured_range
        bottom = self.floor if any(p.speedup is None for p in self.points) else low
        return bottom - 0.06 * (high - low), high + 0.06 * (high - low)

    @property
    def _measured_range(self) -> tuple[float, float]:
        values = [p.speedup for p in self.points if p.speedup is not None]
        return min([*values, 0.98]), max([*values, 1.02 + self.margin])

    def measured(self, family: str) -> list[Point]:
        return [p for p in self.points if p.speedup is not None and p.trial.config.family == family]

    def failed(self) -> dict[TrialStatus, list[Point]]:
        """Return the failures by status, each in the order of the search."""
        found: dict[TrialStatus, list[Point]] = {}
        for p in self.points:
            if p.speedup is None:
                found.setdefault(p.trial.status, []).append(p)
        return found

    def role(self, config: Config) -> str:
        """Return what a finalist is: winner, default, winner and default, or finalist."""
        roles = [name for name in ("winner", "default") if config == getattr(self, name)]
        return " and ".join(roles) or "finalist"


def prepare(
    trials: Sequence[Trial], tuned: TunedConfig | None, *, title: str, subtitle: str, margin: float = 0.02
) -> Picture:
    """Return what to draw of a study; ``margin`` is for one that has no answer yet."""
    points = tuple(Point(i, t, _speedup(t)) for i, t in enumerate(trials, start=1))
    finals = _shown(tuned) if tuned else ()
    families = dict.fromkeys([p.trial.config.family for p in points] + [f.config.family for f in finals])
    return Picture(
        title=textwrap.shorten(title, 110, placeholder=" ..."),
        subtitle=textwrap.shorten(subtitle, 190, placeholder=" ..."),
        points=points,
        best=_best(points),
        finals=finals,
        finals_title=_finals_title(tuned, len(finals)) if tuned else "no finals yet",
        labels=_labels([f.config for f in finals]),
        winner=tuned.config if tuned else None,
        default=tuned.default if tuned else None,
        margin=tuned.margin if tuned else margin,
        colors={name: PALETTE[i % len(PALETTE)] for i, name in enumerate(families)},
    )


def _speedup(trial: Trial) -> float | None:
    if trial.status is not TrialStatus.OK or trial.ratio is None or not math.isfinite(trial.ratio):
        return None
    return trial.ratio


def _best(points: Sequence[Point]) -> tuple[tuple[int, float], ...]:
    line: list[tuple[int, float]] = []
    best = -math.inf
    for p in points:
        best = max(best, p.speedup if p.speedup is not None else best)
        if best > -math.inf:
            line.append((p.number, best))
    return tuple(line)


def _shown(tuned: TunedConfig) -> tuple[Finalist, ...]:
    """Return the fastest finalists, and always the winner and the default."""
    first = (tuned.config, tuned.default)
    ranked = sorted(tuned.finalists, key=lambda f: (f.config not in first, -f.speedup))[:MAX_FINALS]
    return tuple(sorted(ranked, key=lambda f: -f.speedup))


def _finals_title(tuned: TunedConfig, shown: int) -> str:
    some = f", {shown} of {len(tuned.finalists)}" if shown < len(tuned.finalists) else ""
    return f"finals{some}: {tuned.rounds} rounds, intervals at {tuned.confidence:.0%} over all"


def _labels(configs: Sequence[Config]) -> tuple[str, ...]:
    lines = 3 if len(configs) <= 8 else 2
    texts = [f"{c.family} {c.label}" for c in configs]
    return tuple("\n".join(textwrap.wrap(t, 30, max_lines=lines, placeholder=" ...")) for t in texts)
