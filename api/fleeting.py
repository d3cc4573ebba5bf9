"""``flashtune fleet``: who works, on what, and whose times differ from its class's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from api import options as o
from db.store import Store
from db.values import WorkerInfo
from tuner.agreement import Deviation, deviations


def fleet(
    every: Annotated[bool, typer.Option("--all", help="Workers that are gone, too.")] = False,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """List the workers, what each does now, and whether its measurements agree with its class's."""
    with o.open_store(db, create=False, read_only=True) as store:
        rows = fleet_rows(store, every)
    if json:
        o.print_json(rows)
        return
    table = Table(box=None, header_style="bold")
    for name in ("host", "pid", "roles", "device", "driver", "doing", "heard", "off its class by"):
        table.add_column(name)
    for row in rows:
        table.add_row(*_cells(row))
    o.stdout.print(table)


def fleet_rows(store: Store, every: bool, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the workers as plain JSON values, each with how far its times are off its class's."""
    off = deviations(store.fleet.readings())
    return [_row(w, off.get(w.node)) for w in store.fleet.workers(alive_only=not every, limit=limit)]


def _row(worker: WorkerInfo, off: Deviation | None) -> dict[str, Any]:
    deviation = {"share": off.share, "studies": off.studies, "suspicious": off.suspicious} if off else None
    return {**worker.to_dict(), "deviation": deviation}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    target, off = row["target"], row["deviation"]
    heard = (datetime.now(UTC) - datetime.fromisoformat(row["heartbeat_at"])).total_seconds()
    return (
        row["host"],
        str(row["pid"]),
        ", ".join(row["roles"]),
        f"{target['model']} {target['uuid'][:12]}".strip() if target else "",
        row["toolchain"]["driver"],
        row["doing"],
        f"{heard:.0f} s ago" if row["alive"] else "gone",
        "" if off is None else f"{off['share']:+.1%}" + (" (look at this node)" if off["suspicious"] else ""),
    )
