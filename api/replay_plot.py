"""Draws regret by evaluated configs: a PNG by matplotlib, or a page by plotly that needs no network."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from api import plot
from api.picture import PALETTE
from tuner.replay import Replay

_COUNT, _REGRET = "configs evaluated", "regret: time of the chosen / best time"
_INK, _GREY, _PALE = "#222222", "#777777", "#E8E8E8"
_MEAN, _TAIL = "mean over cells and seeds", "90th percentile"


def write(path: Path, found: Mapping[str, Sequence[Replay]], budget: int, title: str) -> None:
    """Draw the replays of each strategy to ``path``, whole or not at all.

    Raises:
        InputError: if the path cannot be written, or the drawing package is missing.
    """
    curves = {name: _curves(replays, budget) for name, replays in found.items()}
    plot.write_with(path, lambda: png(curves, title), lambda: html(curves, title))


def _curves(replays: Sequence[Replay], budget: int) -> tuple[list[float], list[float]]:
    """Return mean and 90th percentile of regret after 1, 2, ... configs."""
    means, tails = [], []
    for count in range(1, budget + 1):
        regrets = sorted(r.at(count) for r in replays)
        means.append(statistics.fmean(regrets))
        tails.append(regrets[max(0, -(-9 * len(regrets) // 10) - 1)])
    return means, tails


def png(curves: Mapping[str, tuple[list[float], list[float]]], title: str) -> bytes:
    """Draw with matplotlib, off screen: WIDTH_PX x HEIGHT_PX of ``api.plot``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(plot.WIDTH_PX / 100, plot.HEIGHT_PX / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    figure.text(0.012, 0.94, title, fontsize=13, fontweight="bold", color=_INK, parse_math=False)
    for left, panel, name in ((0.065, 0, _MEAN), (0.545, 1, _TAIL)):
        axes = figure.add_axes((left, 0.26, 0.43, 0.6))
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel(_COUNT, fontsize=9)
        axes.set_ylabel(_REGRET, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(color=_PALE, lw=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0.5, len(next(iter(curves.values()))[panel]) + 0.5)
        for (strategy, both), style in zip(curves.items(), _styles(), strict=False):
            numbers = range(1, len(both[panel]) + 1)
            axes.plot(numbers, both[panel], label=strategy, lw=2.2 if strategy == "ours" else 1.4, **style)
        axes.axhline(1.0, color=_INK, lw=1)
        second = [b[panel][min(1, len(b[panel]) - 1)] for b in curves.values()]
        axes.set_ylim(0.995, 1.01 * max([1.02, *filter(math.isfinite, second)]))  # inf: nothing worked yet
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.045, 0), ncols=6, fontsize=8.5, frameon=False)
    out = io.BytesIO()
    canvas.print_png(out)  # type: ignore[no-untyped-call]
    return out.getvalue()


def html(curves: Mapping[str, tuple[list[float], list[float]]], title: str) -> str:
    """Draw with plotly."""
    from plotly.subplots import make_subplots  # type: ignore[import-untyped]

    figure = make_subplots(rows=1, cols=2, subplot_titles=(_MEAN, _TAIL))
    for strategy, both in curves.items():
        for col, values in enumerate(both, start=1):
            numbers = list(range(1, len(values) + 1))
            figure.add_scatter(x=numbers, y=values, name=strategy, showlegend=col == 1, row=1, col=col)
    figure.update_xaxes(title_text=_COUNT)
    figure.update_yaxes(title_text=_REGRET)
    figure.update_layout(template="plotly_white", title=f"<b>{escape(title)}</b>", height=plot.HEIGHT_PX + 80)
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page


def _styles() -> list[dict[str, Any]]:
    """Return a colour and a dash for each of up to 28 strategies: colours repeat, dashes tell them apart."""
    return [{"color": color, "ls": dash} for dash in ("-", "--", ":", "-.") for color in PALETTE]
