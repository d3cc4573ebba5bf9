"""What the finals say: paired log-ratios, bootstrap intervals, winner, ties.

Rounds are paired: in each, every finalist is measured once, in random order. A finalist's speedup
over another is exp of the 20%-trimmed mean over rounds of log(time of the other / its own time);
the interval is a percentile bootstrap of that. The confidence is split (Bonferroni) over finalists
and over looks, so that looking often at many does not make a winner of noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.config import Config
from tuner.trial import Finalist, Verdict

_TRIM = 0.2
_RESAMPLES = 5000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A speedup with its bounds; above 1 is faster."""

    speedup: float
    low: float
    high: float


def speedup(of: Sequence[float] | Floats, over: Sequence[float] | Floats, confidence: float, seed: int = 0) -> Interval:
    """Return how much faster ``of`` is than ``over``, from times paired by round.

    Deterministic for a seed. A constant ratio gives an interval of no width.
    """
    logs = np.log(np.asarray(over, dtype=float) / np.asarray(of, dtype=float))
    estimate = float(_center(logs))
    if float(np.ptp(logs)) == 0.0:
        return Interval(*(float(np.exp(estimate)),) * 3)
    from scipy import stats  # takes a second to import: only for who decides something

    found = stats.bootstrap(
        (logs,),
        _center,
        n_resamples=_RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    low, high = min(found.low, estimate), max(found.high, estimate)
    return Interval(float(np.exp(estimate)), float(np.exp(low)), float(np.exp(high)))


@dataclass(frozen=True)
class Decision:
    """The finals' outcome. ``settled`` says that more rounds would not change it."""

    winner: Config
    verdict: Verdict
    interval: Interval
    finalists: tuple[Finalist, ...]
    ties: tuple[Config, ...]
    reason: str
    settled: bool


@dataclass(frozen=True)
class Rules:
    """How the finals are decided; fractions, as in StudySettings."""

    margin: float
    tie_margin: float
    confidence: float
    looks: int


def decide(
    configs: Sequence[Config],
    times: Sequence[Sequence[float]],
    default: Config,
    rules: Rules,
    incumbent: Config | None = None,
) -> Decision:
    """Name the winner of paired rounds; ``times[r][i]`` is config i in round r.

    A config wins over the default only if its interval lies above 1 + margin. Among those that do,
    the fastest and everything not shown slower than it by more than tie_margin are tied, and the
    tie goes, in this order, to the config published before, to one that needs no tuning, and to
    the first by key. The config published before keeps its place as long as it is shown faster
    than the default at all: a winner near the margin must not come and go.
    """
    table = np.asarray(times, dtype=float)
    level = 1 - (1 - rules.confidence) / (max(1, len(configs) - 1) * rules.looks)
    column = {c: table[:, i] for i, c in enumerate(configs)}
    over_default = {c: speedup(column[c], column[default], level) for c in configs}
    fastest = max(configs, key=lambda c: over_default[c].speedup)
    behind = {c: speedup(column[fastest], column[c], level) for c in configs}  # >1: c is slower
    tied = {c for c in configs if c == fastest or behind[c].low <= 1 + rules.tie_margin}
    finalists = tuple(
        Finalist(
            config=c,
            median_us=float(np.median(column[c])),
            speedup=over_default[c].speedup,
            low=over_default[c].low,
            high=over_default[c].high,
            samples_us=tuple(float(x) for x in column[c]),
            tied_with_best=c in tied,
        )
        for c in configs
    )
    bar = {c: 1.0 if c == incumbent else 1 + rules.margin for c in configs}
    eligible = [c for c in configs if c != default and over_default[c].low > bar[c]]
    settled = _settled(bar, default, over_default, behind, rules)
    if not eligible:
        return _kept(default, fastest, over_default, finalists, rules, settled)
    best = max(eligible, key=lambda c: over_default[c].speedup)
    group = [c for c in eligible if c == best or speedup(column[best], column[c], level).low <= 1 + rules.tie_margin]
    group.sort(key=lambda c: (c != incumbent, not c.is_stock, c.key))
    winner = group[0]
    gain = over_default[winner]
    reason = f"faster than the default by {_percent(gain.speedup)}, at least {_percent(gain.low)}"
    if len(group) > 1:
        reason += f"; tied with {len(group) - 1} other(s), taken by the stable rule"
    return Decision(winner, Verdict.PUBLISHED, gain, finalists, tuple(group[1:]), reason, settled)


def _kept(
    default: Config,
    fastest: Config,
    over_default: dict[Config, Interval],
    finalists: tuple[Finalist, ...],
    rules: Rules,
    settled: bool,
) -> Decision:
    ties = tuple(c for c, i in over_default.items() if c != default and i.high >= 1 - rules.tie_margin)
    if fastest == default:
        reason = "nothing is faster than the default"
    else:
        best = over_default[fastest]
        reason = (
            f"the fastest, {fastest.family} {fastest.label}, gains {_percent(best.speedup)} (at least "
            f"{_percent(best.low)}), which is not shown to be above the margin of {rules.margin:.1%}"
        )
    return Decision(default, Verdict.KEPT_DEFAULT, over_default[default], finalists, ties, reason, settled)


def _settled(
    bar: dict[Config, float],
    default: Config,
    over_default: dict[Config, Interval],
    behind: dict[Config, Interval],
    rules: Rules,
) -> bool:
    """Tell whether every interval that matters lies on one side of its threshold."""
    for c, threshold in bar.items():
        if c == default:
            continue
        i, gap = over_default[c], behind[c]
        contender = i.high > threshold
        if contender and i.low <= threshold:
            return False
        if contender and gap.low <= 1 + rules.tie_margin < gap.high:
            return False
    return True


def _center(x: Floats, axis: int = -1) -> Floats:
    from scipy import stats

    return np.asarray(stats.trim_mean(x, _TRIM, axis=axis))


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}%"
