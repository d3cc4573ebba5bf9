"""What a suite's database says: ratios of the answers to every rival, and whether the goals are met.

Every ratio is of times from the same paired rounds: a study's finals hold all rivals that work. The
rounds are those in which the answer was chosen, so a choice among near-equals flatters it by up to the
tie margin; ``verify`` and a second run are what guards against more.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from db.store import Published, Store
from tuner import families, stats
from tuner.trial import Finalist, TrialStatus, Verdict
from tuner.workload_file import NamedWorkload

NAMES = {
    "flex_flash_stock": "FLASH",
    "flex_triton_stock": "Triton",
    "flex_triton_autotune": "Triton max-autotune",
    "cudnn": "cuDNN",
}
OVER_TRITON, OVER_FLASH, WORST = 1.5, 1.10, 0.99  # the goals
_CONFIDENCE = 0.95
_RESAMPLES = 2000
_TRIM = 0.2


@dataclass(frozen=True)
class Rival:
    """One rival of a cell, and how much faster the answer is than it, by paired rounds."""

    family: str
    median_us: float
    ratio: stats.Interval
    samples_us: tuple[float, ...]


@dataclass(frozen=True)
class CellResult:
    """One workload under one policy: the answer and its rivals. ``failed`` says which rivals do not run, and why."""

    name: str
    policy: str
    answer: Published
    winner: Finalist
    rivals: tuple[Rival, ...]
    failed: dict[str, str]

    @property
    def best(self) -> Rival:
        """The fastest rival, by the estimate."""
        return min(self.rivals, key=lambda r: r.ratio.speedup)

    def rival(self, family: str) -> Rival | None:
        return next((r for r in self.rivals if r.family == family), None)


def collect(store: Store, cells: Sequence[NamedWorkload], policy: str) -> tuple[list[CellResult], list[str]]:
    """Return what the database knows of a suite, and the names of cells without an answer.

    ``policy`` is that of cells whose file says none. Of several answers to one cell (other targets,
    other toolchains) the newest counts.
    """
    found: list[CellResult] = []
    missing: list[str] = []
    for named in cells:
        wanted = named.policy or policy
        answers = [p for p in store.published(workload_key=named.workload.key) if p.policy == wanted]
        if not answers:
            missing.append(named.name)
            continue
        found.append(_cell(store, named.name, max(answers, key=lambda p: p.published_at)))
    return found, missing


def _cell(store: Store, name: str, answer: Published) -> CellResult:
    tuned = answer.tuned
    winner = tuned.finalist(tuned.config)
    assert winner is not None  # finals hold the winner and the default
    rivals = tuple(
        Rival(f.config.family, f.median_us, stats.speedup(winner.samples_us, f.samples_us, _CONFIDENCE), f.samples_us)
        for f in tuned.finalists
        if f.config.is_stock
    )
    handle = store.study(answer.study_id)
    failed = {
        t.config.family: f"{t.status}: {t.error.splitlines()[0] if t.error else ''}"
        for t in handle.trials()
        if t.config.is_stock and t.status is not TrialStatus.OK
    }
    failed |= {
        rival: families.load(rival).refuses(answer.workload, answer.target)
        for rival in NAMES
        if rival not in {f.partition("/")[0] for f in handle.families}
    }
    return CellResult(name, answer.policy, answer, winner, rivals, {k: v for k, v in failed.items() if v})


def geometric_mean(cells: Sequence[CellResult], family: str, seed: int = 0) -> tuple[stats.Interval, int] | None:
    """Return the geometric mean of the answers' speedups over one rival, and over how many cells.

    The interval is a percentile bootstrap over cells and, within each, over rounds. None if no cell has it.
    """
    pairs = [(c.winner.samples_us, r.samples_us) for c in cells if (r := c.rival(family))]
    if not pairs:
        return None
    rng = np.random.default_rng(seed)
    centers = np.array([_resampled(of, over, rng) for of, over in pairs])  # cells x resamples
    chosen = rng.integers(0, len(pairs), size=(len(pairs), _RESAMPLES))
    means = centers[chosen, np.arange(_RESAMPLES)].mean(axis=0)
    low, high = np.quantile(means, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    estimate = statistics.fmean(np.log(r.ratio.speedup) for c in cells if (r := c.rival(family)))
    bounds = (min(float(low), estimate), estimate, max(float(high), estimate))
    low, mean, high = (float(np.exp(x)) for x in bounds)
    return stats.Interval(mean, low, high), len(pairs)


def _resampled(of: Sequence[float], over: Sequence[float], rng: np.random.Generator) -> stats.Floats:
    """Return trimmed means of log-ratios, each of rounds drawn with replacement."""
    logs = np.log(np.asarray(over) / np.asarray(of))
    drawn = np.sort(logs[rng.integers(0, len(logs), size=(_RESAMPLES, len(logs)))], axis=1)
    cut = int(_TRIM * len(logs))
    means: stats.Floats = drawn[:, cut : len(logs) - cut].mean(axis=1)
    return means


def goals(cells: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return each goal with what was found, and whether it is met: ``met``, ``missed`` or ``open``.

    A mean meets its goal if its whole interval does, and misses it if none of it does.
    """
    out: list[dict[str, Any]] = []
    for family, goal in (("flex_triton_stock", OVER_TRITON), ("flex_flash_stock", OVER_FLASH)):
        text = f"geometric mean over {NAMES[family]} as shipped at least {goal:.2f}"
        found = geometric_mean(cells, family)
        if found is None:
            out.append({"goal": text, "state": "open", "found": None, "cells": 0})
            continue
        i, count = found
        state = "met" if i.low >= goal else "missed" if i.high < goal else "open"
        out.append({"goal": text, "state": state, "found": [i.speedup, i.low, i.high], "cells": count})
    text = f"no cell below {WORST:.2f} of the best rival"
    if not cells:
        return [*out, {"goal": text, "state": "open", "found": None, "cells": 0}]
    worst = min(cells, key=lambda c: c.best.ratio.speedup)
    i = worst.best.ratio
    below = [c.name for c in cells if c.best.ratio.speedup < WORST]
    out.append(
        {
            "goal": text,
            "state": "missed" if below else "met",
            "found": [i.speedup, i.low, i.high],
            "cells": len(cells),
            "worst": worst.name,
            "below": below,
        }
    )
    return out


def by_policy(cells: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """Return the cells of each policy, and all of them under ``all`` if there are several policies."""
    split = {p: [c for c in cells if c.policy == p] for p in sorted({c.policy for c in cells})}
    return {"all": list(cells), **split} if len(split) > 1 else split


def document(cells: Sequence[CellResult], missing: Sequence[str]) -> dict[str, Any]:
    """Return everything as plain JSON values, raw samples included."""
    return {
        "summary": {name: goals(some) for name, some in by_policy(cells).items()},
        "means": {
            name: {
                NAMES.get(f, f): {"mean": m[0].speedup, "low": m[0].low, "high": m[0].high, "cells": m[1]}
                for f in families.REGISTRY
                if (m := geometric_mean(some, f))
            }
            for name, some in by_policy(cells).items()
        },
        "missing": list(missing),
        "cells": [_cell_dict(c) for c in cells],
    }


def _cell_dict(c: CellResult) -> dict[str, Any]:
    return {
        "name": c.name,
        "policy": c.policy,
        "study": c.answer.study_id,
        "version": c.answer.version,
        "published_at": c.answer.published_at.isoformat(),
        "workload": c.answer.workload.to_dict(),
        "target": c.answer.target.to_dict(),
        "toolchain": c.answer.toolchain.to_dict(),
        "tuned": c.answer.tuned.to_dict(),  # with the samples of every finalist, by round
        "rivals": {
            r.family: {"median_us": r.median_us, "ratio": r.ratio.speedup, "low": r.ratio.low, "high": r.ratio.high}
            for r in c.rivals
        },
        "best_rival": c.best.family,
        "failed": c.failed,
    }


def markdown(cells: Sequence[CellResult], missing: Sequence[str]) -> str:
    """Return the table of the cells and the statement of the goals, as Markdown."""
    present = {r.family for c in cells for r in c.rivals}
    columns = [f for f in families.REGISTRY if f in present]
    head = ["workload", "policy", *(NAMES.get(f, f"{f} stock") for f in columns), "answer", "us"]
    head += ["over FLASH", "over Triton", "over the best rival", "error"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for c in cells:
        lines.append("| " + " | ".join(_row(c, columns)) + " |")
    lines += ["", "Medians of paired rounds in microseconds; ratios with 95% intervals from the same rounds.", ""]
    for name, some in by_policy(cells).items():
        for g in goals(some):
            lines.append(f"- {name}: {_goal_text(g)}")
    if missing:
        lines += ["", f"Without an answer: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def _row(c: CellResult, columns: Sequence[str]) -> list[str]:
    times = [f"{r.median_us:.1f}" if (r := c.rival(f)) else "" for f in columns]
    tuned = c.answer.tuned
    kept = tuned.verdict is Verdict.KEPT_DEFAULT
    name = NAMES.get(tuned.config.family, tuned.config.family)
    label = name if tuned.config.is_stock else f"{name} {tuned.config.label}"
    over = [_ratio_text(c.rival(f)) for f in ("flex_flash_stock", "flex_triton_stock")]
    best = f"{_ratio_text(c.best)} ({NAMES.get(c.best.family, c.best.family)})"
    error = "" if c.winner.error is None else f"{c.winner.error:.1e}"
    answer = f"keep the default ({label})" if kept else f"**{label}**"
    return [c.answer.workload.label, c.policy, *times, answer, f"{c.winner.median_us:.1f}", *over, best, error]


def _ratio_text(rival: Rival | None) -> str:
    if rival is None:
        return ""
    i = rival.ratio
    return "1" if i.low == i.high == 1 else f"{i.speedup:.3f} [{i.low:.3f}, {i.high:.3f}]"


def _goal_text(g: dict[str, Any]) -> str:
    if g["found"] is None:
        return f"{g['goal']}: open, no cell has it"
    mean, low, high = g["found"]
    worst = f", worst {g['worst']}" if "worst" in g else ""
    below = f", below: {len(g['below'])}" if g.get("below") else ""
    return f"{g['goal']}: **{g['state']}**, {mean:.3f} [{low:.3f}, {high:.3f}] over {g['cells']} cells{worst}{below}"


def draw(path: Path, cells: Sequence[CellResult], title: str) -> None:
    """Draw each cell's speedups over its rivals, one panel a policy, to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {p: s for p, s in by_policy(cells).items() if p != "all"}
    rows = sum(len(s) for s in panels.values())
    ratios = [len(s) for s in panels.values()]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(10, 1.6 + 0.24 * rows), squeeze=False, sharex=True, height_ratios=ratios
    )
    present = [f for f in families.REGISTRY if any(c.rival(f) for c in cells)]
    colors = dict(zip(present, pyplot.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    for axis, (policy, some) in zip(axes[:, 0], panels.items(), strict=True):
        for family in present:
            mine = [(y, r.ratio) for y, c in enumerate(some) if (r := c.rival(family))]
            x = [i.speedup for _, i in mine]
            spread = [[i.speedup - i.low for _, i in mine], [i.high - i.speedup for _, i in mine]]
            axis.errorbar(
                x, [y for y, _ in mine], xerr=spread, fmt="o", ms=4, lw=1, color=colors[family],
                label=NAMES.get(family, f"{family} stock"),
            )  # fmt: skip
        axis.axvline(1.0, color="black", lw=0.8)
        axis.set_yticks(range(len(some)), [c.answer.workload.label for c in some], fontsize=7)
        axis.invert_yaxis()
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}x")
        axis.set_title(policy, fontsize=9, loc="left")
        axis.grid(axis="x", alpha=0.3)
    axes[0, 0].legend(fontsize=7, title="faster than", title_fontsize=7)
    axes[-1, 0].set_xlabel("speed of the answer over a rival's, from paired rounds, with 95% intervals")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
