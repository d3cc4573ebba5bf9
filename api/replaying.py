"""``flashtune replay`` and ``flashtune tables``: the search on recorded tables, and tables from and to T4."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from api import options as o
from api import plot, replay_plot
from tuner import replay as replays
from tuner import t4, tables
from tuner.errors import InputError
from tuner.replay import STRATEGIES, Replay
from tuner.spec import StudySettings
from tuner.tables import Cell

TablesArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="TABLE...", help="Recorded tables: T4 (.json), or rows (.jsonl, .jsonl.gz)."),
]
StudyOption = Annotated[
    list[str] | None, typer.Option("--study", help="Also the trials of this study of the database; again for more.")
]


def replay(
    table: TablesArgument = None,
    study: StudyOption = None,
    strategy: Annotated[
        list[str] | None, typer.Option("--strategy", help=f"{', '.join(STRATEGIES)}; again for more. Default: all.")
    ] = None,
    budget: Annotated[int, typer.Option("--budget", "-n", help="Configs to evaluate in each cell.")] = 12,
    seeds: Annotated[int, typer.Option(help="Replays of each cell, with seeds 0, 1, ...")] = 20,
    ahead: Annotated[int, typer.Option(help="Configs asked before the first of them is told, as a study does.")] = 1,
    margin: Annotated[
        float, typer.Option(help="Stop early when nothing left beats the best by this fraction; -1 never stops.")
    ] = StudySettings.margin,
    noise: Annotated[float, typer.Option(help="Spread of a measurement's error, as 0.005 for half a percent.")] = 0.0,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw regret by configs to FILE.png or FILE.html.")
    ] = None,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Run the search against recorded tables, and report its regret: time of the chosen / best time."""
    if plot_file is not None:
        plot.kind(plot_file)  # refused before anything is read
    strategies = _strategies(strategy)
    if seeds < 1:
        raise InputError(f"seeds is {seeds}; it must be at least 1")
    cells = _cells(table, study, db)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=o.stderr
    ) as progress:
        task = progress.add_task("replaying", total=len(cells) * len(strategies) * seeds)
        found = list(
            replays.replay_all(
                cells,
                strategies,
                budget=budget,
                seeds=seeds,
                ahead=ahead,
                margin=margin if margin >= 0 else None,
                noise=noise,
                say=lambda done, total: progress.update(task, completed=done),
            )
        )
    if plot_file is not None:
        title = f"regret on {len(cells)} recorded cells, {seeds} seeds each"
        replay_plot.write(plot_file, {s: [r for r in found if r.strategy == s] for s in strategies}, budget, title)
        o.stderr.print(f"wrote {plot_file}", markup=False, highlight=False, soft_wrap=True)
    if json:
        o.print_json(
            {
                **{"budget": budget, "seeds": seeds, "ahead": ahead, "margin": margin, "noise": noise},
                "cells": [cell_facts(c) for c in cells],
                "summary": [summary(found, s) for s in strategies],
                "replays": [r.to_dict() for r in found],
            }
        )
    else:
        o.stdout.print(_regret_table(cells, found, strategies))


def list_tables(
    table: TablesArgument = None,
    study: StudyOption = None,
    export: Annotated[
        Path | None, typer.Option("--t4", metavar="FOLDER", help="Write each cell to a file of T4 in FOLDER.")
    ] = None,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Show recorded tables and studies' trials as cells, and export them in Kernel Tuner's T4 format."""
    cells = _cells(table, study, db)
    files = _export(cells, export) if export is not None else [None] * len(cells)
    if json:
        o.print_json([{**cell_facts(c), "file": str(f) if f else None} for c, f in zip(cells, files, strict=True)])
        return
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("cell", "configs", "failed", "best us", "stock / best", "best config"):
        shown.add_column(column, overflow="fold")
    for c in cells:
        stock = f"{c.default_us / c.least_us:.3f}" if c.default_us else "unknown"
        failed = sum(r.time_us is None for r in c.rows)
        best = f"{c.best.time_us:.1f}"
        shown.add_row(escape(c.name), str(len(c.rows)), str(failed), best, stock, escape(c.best.config.label))
    o.stdout.print(shown)
    if export is not None:
        o.stderr.print(f"wrote {len(cells)} file(s) to {export}", markup=False, highlight=False, soft_wrap=True)


def summary(found: Sequence[Replay], strategy: str) -> dict[str, Any]:
    """Return a strategy's regret over all cells and seeds: median, mean, 90th percentile, worst, configs used."""
    mine = [r for r in found if r.strategy == strategy]
    regrets = sorted(r.regret for r in mine)
    return {
        "strategy": strategy,
        "median": statistics.median(regrets),
        "mean": statistics.fmean(regrets),
        "p90": regrets[max(0, -(-9 * len(regrets) // 10) - 1)],
        "worst": regrets[-1],
        "evaluated": statistics.fmean(len(r.configs) for r in mine),
    }


def cell_facts(cell: Cell) -> dict[str, Any]:
    """Return what a cell is, without its rows, as plain JSON values."""
    return {
        "name": cell.name,
        "workload": cell.workload.to_dict() if cell.workload else None,
        "target": cell.target.to_dict(),
        "family": cell.family[0],
        "configs": len(cell.rows),
        "failed": sum(r.time_us is None for r in cell.rows),
        "default_us": cell.default_us,
        "best_us": cell.best.time_us,
        "best": cell.best.config.to_dict(),
    }


def _strategies(wanted: list[str] | None) -> list[str]:
    for name in wanted or ():
        if name not in STRATEGIES:
            raise InputError(f"strategy is {name!r}; it must be one of {', '.join(STRATEGIES)}")
    return [s for s in STRATEGIES if not wanted or s in wanted]


def _cells(paths: list[Path] | None, studies: list[str] | None, db: str | None) -> list[Cell]:
    if not paths and not studies:
        raise InputError("no table is given; name files of recorded tables, or a study with --study")
    cells = tables.read(paths or [])
    if studies:
        with o.open_store(db, create=False, read_only=True) as store:
            for ref in studies:
                handle = store.study(ref)
                mine = tables.from_trials(handle.workload, handle.target, handle.trials(), handle.policy)
                if not mine:
                    raise InputError(f"study {ref} has no tuned config with a time; see `flashtune show {ref}`")
                cells += mine
    return cells


def _export(cells: Sequence[Cell], folder: Path) -> list[Path]:
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, cell in enumerate(cells):
            slug = re.sub(r"[^A-Za-z0-9.]+", "-", cell.name).strip("-")[:100]
            file = folder / f"{number:02}-{slug}.json"
            file.write_text(t4.dumps(cell))
            files.append(file)
    except OSError as e:
        raise InputError(f"cannot write to the folder {folder}: {e.strerror}; choose another") from e
    return files


def _regret_table(cells: Sequence[Cell], found: Sequence[Replay], strategies: Sequence[str]) -> Table:
    """Return one row a cell: median and worst regret of each strategy; and one row over all."""
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, caption="regret, median / worst over the seeds", caption_justify="left"
    )
    table.add_column("cell", overflow="fold")
    for strategy in strategies:
        table.add_column(escape(strategy), justify="right", no_wrap=True)
    for name in dict.fromkeys(c.name for c in cells):
        mine = [[r.regret for r in found if r.cell == name and r.strategy == s] for s in strategies]
        table.add_row(escape(name), *(f"{statistics.median(m):.3f} / {max(m):.3f}" for m in mine))
    totals = [summary(found, s) for s in strategies]
    table.add_row("all", *(f"{t['median']:.3f} / {t['worst']:.3f}" for t in totals), style="bold")
    table.add_row("configs", *(f"{t['evaluated']:.1f}" for t in totals))
    return table
