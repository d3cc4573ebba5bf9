"""``flashtune backup`` and ``restore``: every study, trial and published config in one file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from api import options as o
from db import backup as keeper
from workers.settings import Settings


def backup(
    file: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")],
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Write the whole database, SQLite or PostgreSQL, into one SQLite file. It may be in use."""
    counts = keeper.backup(db or Settings.from_env().database_url, file)
    _report({"file": str(file), "rows": counts}, f"wrote {file}", counts, json)


def restore(
    file: Annotated[Path, typer.Argument(help="A file that `flashtune backup` wrote.")],
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Copy a backup into an empty database, SQLite or PostgreSQL; it is made if it is missing."""
    counts = keeper.restore(file, db or Settings.from_env().database_url)
    _report({"file": str(file), "rows": counts}, f"restored {file}", counts, json)


def _report(document: dict[str, Any], what: str, counts: dict[str, int], json: bool) -> None:
    if json:
        o.print_json(document)
    else:
        rows = ", ".join(f"{n} {table.replace('_', ' ')}" for table, n in counts.items())
        o.stdout.print(f"{what}: {rows}", markup=False, highlight=False)
