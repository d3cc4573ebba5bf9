"""``flashtune studies`` and ``flashtune show``: what was tuned, and everything known about one study."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from api import options as o
from api import picture, plot
from api.tables import finals_table, trials_table
from db.store import StudyHandle, StudyRow
from tuner.spec import StudySettings
from tuner.trial import Trial, TrialStatus, TunedConfig


def studies(
    limit: Annotated[int, typer.Option("--limit", "-n", help="How many, the newest first.")] = 20,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """List the studies of the database, the newest first."""
    with o.open_store(db, create=False, read_only=True) as store:
        rows = store.studies(limit)
    if json:
        o.print_json([_row_dict(row) for row in rows])
    else:
        o.stdout.print(_studies_table(rows))


def show(
    study: Annotated[str, typer.Argument(help="A study's id, or the beginning of it; see `flashtune studies`.")],
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw search and finals to FILE.png or FILE.html.")
    ] = None,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Show one study: its finals, and every trial with what became of it."""
    if plot_file is not None:
        plot.kind(plot_file)  # refused before anything is read
    with o.open_store(db, create=False, read_only=True) as store:
        handle = store.study(study)
        trials, tuned, stats = list(handle.trials()), handle.tuned(), handle.stats()
        facts = _facts(handle, trials, tuned, stats)
    if plot_file is not None:
        _plot(plot_file, handle, facts, trials, tuned)
        o.stderr.print(f"wrote {plot_file}", markup=False, highlight=False, soft_wrap=True)
    if json:
        o.print_json(facts)
    else:
        _print(handle, facts, trials, tuned)


def _plot(
    path: Path, handle: StudyHandle, facts: Mapping[str, Any], trials: list[Trial], tuned: TunedConfig | None
) -> None:
    target = f"{handle.target.model} ({handle.target.arch})"
    verdict = f"{tuned.verdict}: {tuned.reason}" if tuned else "no answer yet"
    drawn = picture.prepare(
        trials,
        tuned,
        title=f"{handle.workload.label}, {handle.workload.dtype} {handle.workload.op} on {target}",
        subtitle=f"study {handle.id}, policy {handle.policy}, {facts['state']}; {verdict}",
        margin=float(facts["settings"].get("margin", StudySettings.margin)),
    )
    plot.write(path, drawn)


def _facts(
    handle: StudyHandle, trials: list[Trial], tuned: TunedConfig | None, stats: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "id": handle.id,
        "run": handle.run,
        "workload": handle.workload.to_dict(),
        "target": handle.target.to_dict(),
        "toolchain": handle.toolchain.to_dict(),
        "policy": handle.policy,
        "families": list(handle.families),
        "state": "done" if handle.done else "running",
        "created_at": handle.created_at.isoformat(),
        "settings": handle.settings,
        "stats": dict(stats),
        "tuned": tuned.to_dict() if tuned else None,
        "trials": [t.to_dict() for t in trials],
    }


def _print(handle: StudyHandle, facts: Mapping[str, Any], trials: list[Trial], tuned: TunedConfig | None) -> None:
    for name, text in _header(handle, facts, trials):
        o.stdout.print(f"{name + ':':<11}{text}", markup=False, highlight=False, soft_wrap=True)
    o.stdout.print()
    if tuned is not None:
        o.stdout.print(finals_table(handle.workload.label, handle.workload, tuned))
    if trials:
        o.stdout.print(trials_table(trials))


def _header(handle: StudyHandle, facts: Mapping[str, Any], trials: list[Trial]) -> list[tuple[str, str]]:
    target, stats = handle.target, facts["stats"]
    tools = ", ".join(f"{name} {version}" for name, version in handle.toolchain.to_dict().items() if version)
    ok = sum(t.status is TrialStatus.OK for t in trials)
    lines = [
        ("study", f"{handle.id}, run {handle.run}, {facts['state']}, begun {handle.created_at:%Y-%m-%d %H:%M} UTC"),
        ("workload", f"{handle.workload.label}, {handle.workload.dtype} {handle.workload.op}"),
        ("target", f"{target.model} ({target.arch})"),
        ("toolchain", tools),
        ("policy", f"{handle.policy}; families {', '.join(handle.families)}"),
        ("trials", f"{ok} ok of {len(trials)}"),
    ]
    if stats:
        lines.append(
            (
                "search",
                f"{stats['trials_new']} configs in {stats['wall_s']:.1f} s ({stats['trials_per_s']:.2f} configs/s), "
                f"on the device {stats['device_s']:.1f} s, compiling {stats['compile_s_total']:.1f} s",
            )
        )
        lines += [("note", note) for note in stats["notes"]]
        for w in stats.get("withdrawn", ()):
            lines.append(("withdrawn", f"{w['at']} {w['config']}: {w['status']}, {w['error']}"))
    return lines


def _row_dict(row: StudyRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "run": row.run,
        "workload": row.workload.to_dict(),
        "label": row.workload.label,
        "target": row.target.to_dict(),
        "policy": row.policy,
        "state": row.state,
        "trials": row.trials,
        "ok": row.ok,
        "verdict": row.verdict,
        "config": row.config.to_dict() if row.config else None,
        "speedup": row.speedup,
        "created_at": row.created_at.isoformat(),
        "finished_at": row.finished_at.isoformat() if row.finished_at else None,
    }


def _studies_table(rows: list[StudyRow]) -> Table:
    """Return two lines a study, so that it can be read on a terminal of 80 columns."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in (
        "id",
        "workload",
        "target",
        "policy\nstate",
        "ok of\ntrials",
        "verdict, speedup\nwinner",
        "when\n(UTC)",
    ):
        table.add_column(column, overflow="fold", no_wrap=column == "id")
    for row in rows:
        answer = "" if row.speedup is None else f"{row.verdict}, {row.speedup:.3f}x"
        table.add_row(
            row.id,
            escape(row.workload.label),
            escape(row.target.model),
            f"{row.policy}\n{row.state}",
            f"{row.ok} of\n{row.trials}",
            f"{answer}\n{row.config.family} {row.config.label}" if row.config else "",
            f"{row.finished_at or row.created_at:%Y-%m-%d\n%H:%M}",
        )
    return table
