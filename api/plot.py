"""Draws ``api.picture.Picture``: a PNG by matplotlib, or a page by plotly that needs no network.

Imports either package only when it draws.

    >>> write(Path("study.png"), prepare(trials, tuned, title="causal", subtitle=""))  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import io
import os
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from api.picture import Picture, Point
from tuner.errors import InputError
from tuner.trial import TrialStatus

WIDTH_PX, HEIGHT_PX = 1200, 600

_SPEEDUP = "speedup over the default (x)"
_TRIAL = "trial number, in the order of the search"
_INK, _GREY, _PALE = "#222222", "#777777", "#E8E8E8"
# Matplotlib's marker, plotly's, and a colour: the shape says where a config failed, the colour how.
_FAILED = {
    TrialStatus.INFEASIBLE: ("+", "cross-thin", "#999999"),
    TrialStatus.COMPILE_ERROR: ("x", "x-thin", "#B8860B"),
    TrialStatus.COMPILE_CRASH: ("x", "x-thin", "#A00000"),
    TrialStatus.COMPILE_TIMEOUT: ("x", "x-thin", "#6A5ACD"),
    TrialStatus.RUN_ERROR: ("X", "x", "#B8860B"),
    TrialStatus.RUN_CRASH: ("X", "x", "#A00000"),
    TrialStatus.RUN_TIMEOUT: ("X", "x", "#6A5ACD"),
    TrialStatus.INCORRECT: ("P", "cross", "#D62728"),
    TrialStatus.OK: ("+", "cross-thin", "#222222"),  # without a time that is a number
}
_HOVER_LINES = 12


def kind(path: Path) -> str:
    """Return ``.png`` or ``.html``. Raises InputError for any other suffix."""
    if path.suffix.lower() not in (".png", ".html"):
        raise InputError(f"cannot plot to {str(path)!r}: its suffix must be .png or .html")
    return path.suffix.lower()


def write(path: Path, picture: Picture) -> None:
    """Draw to ``path``, whole or not at all.

    Raises:
        InputError: if the path cannot be written, or the drawing package is missing.
    """
    write_with(path, lambda: png(picture), lambda: html(picture))


def write_with(path: Path, as_png: Callable[[], bytes], as_html: Callable[[], str]) -> None:
    """Write what one of two functions draws to ``path``, whole or not at all. Raises as ``write`` does."""
    try:
        data = as_png() if kind(path) == ".png" else as_html().encode()
    except ModuleNotFoundError as e:
        raise InputError(f"cannot plot to {str(path)!r}: {e.name} is not installed; pip install {e.name}") from e
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as e:
        raise InputError(f"cannot write the plot {str(path)!r}: {e.strerror}; choose another path") from e
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def png(picture: Picture) -> bytes:
    """Draw with matplotlib, off screen: WIDTH_PX x HEIGHT_PX."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_PX / 100, HEIGHT_PX / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    figure.text(0.012, 0.94, picture.title, fontsize=13, fontweight="bold", color=_INK, parse_math=False)
    figure.text(0.012, 0.895, picture.subtitle, fontsize=9, color=_GREY, parse_math=False)
    figure.text(0.055, 0.835, _search_title(picture), fontsize=10)
    figure.text(0.49, 0.835, picture.finals_title, fontsize=10)
    _png_search(figure.add_axes((0.055, 0.22, 0.41, 0.6)), picture)
    _png_finals(figure.add_axes((0.665, 0.22, 0.21, 0.6)), picture)
    legend: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        legend |= zip(labels, handles, strict=True)
    figure.legend(
        legend.values(),
        legend.keys(),
        loc="lower left",
        bbox_to_anchor=(0.045, 0),
        ncols=7,
        fontsize=8.5,
        frameon=False,
    )
    out = io.BytesIO()
    canvas.print_png(out)  # type: ignore[no-untyped-call]
    return out.getvalue()


def _png_search(axes: Any, picture: Picture) -> None:
    _png_frame(axes, _TRIAL)
    axes.set_ylabel(_SPEEDUP, fontsize=9)
    axes.set_ylim(*picture.y_range)
    axes.set_xlim(*_x_range(picture))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.axhline(1.0, color=_INK, lw=1, label="default (1x)")
    axes.axhline(1 + picture.margin, color=_INK, lw=1, ls=":", label=_margin(picture))
    if picture.best:
        axes.step(*zip(*picture.best, strict=True), where="post", color=_GREY, lw=1.5, label="best so far")
    for family, color in picture.colors.items():
        if found := picture.measured(family):
            x, y = [p.number for p in found], [p.speedup for p in found]
            axes.scatter(x, y, s=26, color=color, zorder=3, label=family)
    for status, points in picture.failed().items():
        marker, _, color = _FAILED[status]
        x = [p.number for p in points]
        axes.scatter(x, [picture.floor] * len(x), s=34, marker=marker, color=color, zorder=3, label=_failure(status))


def _png_finals(axes: Any, picture: Picture) -> None:
    _png_frame(axes, _SPEEDUP)
    if not picture.finals:
        axes.set_axis_off()
        return
    axes.axvline(1.0, color=_INK, lw=1)
    axes.axvspan(1.0, 1 + picture.margin, color=_GREY, alpha=0.18, lw=0, label="within the margin")
    for y, f in enumerate(picture.finals):
        color, role = picture.colors[f.config.family], picture.role(f.config)
        marker, size, weight = ("*", 12, "bold") if "winner" in role else ("o", 5, "normal")
        axes.plot([f.low, f.high], [y, y], color=color, lw=2, marker="|", ms=9, mew=2, zorder=3)
        axes.plot(f.speedup, y, marker=marker, ms=size, color=color, mec=_INK, mew=0.7, zorder=4)
        text = f"{f.speedup:.3f}x  {f.median_us:.4g} us"
        axes.text(1.03, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8, fontweight=weight)
    axes.plot([], [], marker="*", ms=11, color="white", mec=_INK, ls="", label="winner")
    axes.set_yticks(range(len(picture.finals)), _finalists(picture), fontsize=8, linespacing=1.05)
    for f, text in zip(picture.finals, axes.get_yticklabels(), strict=True):
        text.set_fontweight("bold" if f.config == picture.winner else "normal")
    axes.set_ylim(len(picture.finals) - 0.4, -0.6)
    axes.xaxis.get_major_locator().set_params(nbins=5)


def _png_frame(axes: Any, x_label: str) -> None:
    axes.set_xlabel(x_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color=_PALE, lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def html(picture: Picture) -> str:
    """Draw with plotly; pointing at a trial shows its config, status and error text."""
    from plotly.subplots import make_subplots  # type: ignore[import-untyped]

    titles = (_search_title(picture), picture.finals_title)
    figure = make_subplots(rows=1, cols=2, column_widths=[0.58, 0.42], horizontal_spacing=0.2, subplot_titles=titles)
    _html_search(figure, picture)
    _html_finals(figure, picture)
    figure.update_layout(
        template="plotly_white",
        title={"text": f"<b>{escape(picture.title)}</b><br><sup>{escape(picture.subtitle)}</sup>", "x": 0.01},
        height=HEIGHT_PX + 80,
        margin={"t": 120},
        legend={"orientation": "h", "y": -0.15},
        hoverlabel={"align": "left"},
    )
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page


def _html_search(figure: Any, picture: Picture) -> None:
    at = {"row": 1, "col": 1}
    figure.update_xaxes(title_text=_TRIAL, range=_x_range(picture), **at)
    figure.update_yaxes(title_text=_SPEEDUP, range=picture.y_range, **at)
    figure.add_hline(1.0, line={"color": _INK, "width": 1}, name="default (1x)", showlegend=True, **at)
    dotted = {"color": _INK, "width": 1, "dash": "dot"}
    figure.add_hline(1 + picture.margin, line=dotted, name=_margin(picture), showlegend=True, **at)
    if picture.best:
        x, y = zip(*picture.best, strict=True)
        line = {"shape": "hv", "color": _GREY}
        figure.add_scatter(x=x, y=y, mode="lines", line=line, name="best so far", hoverinfo="skip", **at)
    for family, color in picture.colors.items():
        _html_points(figure, picture, picture.measured(family), family, {"color": color, "size": 8})
    for status, points in picture.failed().items():
        _, symbol, color = _FAILED[status]
        marker = {"color": color, "symbol": symbol, "size": 9, "line": {"color": color, "width": 2}}
        _html_points(figure, picture, points, _failure(status), marker)


def _html_points(figure: Any, picture: Picture, points: Sequence[Point], name: str, marker: dict[str, Any]) -> None:
    if not points:
        return
    x = [p.number for p in points]
    y = [picture.floor if p.speedup is None else p.speedup for p in points]
    texts = [_hover(p) for p in points]
    figure.add_scatter(x=x, y=y, mode="markers", marker=marker, name=name, text=texts, hoverinfo="text", row=1, col=1)


def _html_finals(figure: Any, picture: Picture) -> None:
    at = {"row": 1, "col": 2}
    if not picture.finals:
        figure.update_xaxes(visible=False, **at)
        figure.update_yaxes(visible=False, **at)
        return
    rows = list(range(len(picture.finals)))
    for y, f in enumerate(picture.finals):
        role, color = picture.role(f.config), picture.colors[f.config.family]
        symbol, size = ("star", 15) if "winner" in role else ("circle", 9)
        figure.add_scatter(
            x=[f.speedup],
            y=[y],
            error_x={"array": [f.high - f.speedup], "arrayminus": [f.speedup - f.low], "color": color},
            marker={"color": color, "symbol": symbol, "size": size, "line": {"color": _INK, "width": 1}},
            mode="markers",
            text=[f"<b>{escape(f.config.key)}</b><br>{role}: {f.speedup:.4f}x [{f.low:.4f}, {f.high:.4f}]<br>"
                  f"median {f.median_us:.4g} us"],
            hoverinfo="text",
            showlegend=False,
            **at,
        )  # fmt: skip
    names = [escape(text).replace("\n", "<br>") for text in _finalists(picture)]
    figure.update_xaxes(title_text=_SPEEDUP, **at)
    figure.update_yaxes(tickvals=rows, ticktext=names, range=[len(rows) - 0.4, -0.6], **at)
    figure.add_vline(1.0, line={"color": _INK, "width": 1}, **at)
    figure.add_vrect(1.0, 1 + picture.margin, fillcolor=_GREY, opacity=0.18, line_width=0, **at)


def _hover(point: Point) -> str:
    trial = point.trial
    lines = [f"trial {point.number}: {trial.status}" + (f", {point.speedup:.4f}x" if point.speedup is not None else "")]
    if trial.measurement is not None:
        lines.append(f"median {trial.measurement.median_us:.4g} us ({trial.measurement.policy})")
    for paragraph in trial.error.split("\n"):
        lines += textwrap.wrap(paragraph, 90)
    if len(lines) > _HOVER_LINES:
        lines[_HOVER_LINES:] = ["..."]
    return "<br>".join([f"<b>{escape(trial.config.key)}</b>", *map(escape, lines)])


def _finalists(picture: Picture) -> list[str]:
    roles = [picture.role(f.config) for f in picture.finals]
    return [
        text if role == "finalist" else f"{text}\n({role})" for text, role in zip(picture.labels, roles, strict=True)
    ]


def _search_title(picture: Picture) -> str:
    return "search history" if picture.points else "no trials yet"


def _x_range(picture: Picture) -> tuple[float, float]:
    trials = max(len(picture.points), 1)
    beside = max(0.5, 0.02 * trials)  # room for the marks of the first and the last
    return 1 - beside, trials + beside


def _failure(status: TrialStatus) -> str:
    return "ok, but not measured" if status is TrialStatus.OK else str(status)


def _margin(picture: Picture) -> str:
    return f"margin ({1 + picture.margin:.3g}x)"
