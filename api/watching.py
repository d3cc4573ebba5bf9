"""``flashtune watch``: a job as it goes, live on a terminal, a line or a JSON document an event elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from api import options as o
from api.jobs import JobArgument
from api.service import Service, open_service
from api.tables import answer_text, job_table
from db.values import JobState
from tuner.errors import FlashtuneError


class WatchingEnded(FlashtuneError):
    """A person stopped watching: exit code 130, and the job goes on."""


def watch(
    job: JobArgument,
    url: o.UrlOption = None,
    db: o.DatabaseOption = None,
    json: o.JsonLinesOption = False,
) -> None:
    """Follow a job to its end, from its beginning; exit code 1 if a workload failed or the job was cancelled."""
    with open_service(url, db, read_only=True) as service:
        follow(service, job, json=json)


def follow(service: Service, ref: str, *, json: bool = False) -> None:
    """Show a job's events up to the last, then how it ended.

    Raises:
        typer.Exit: 1 if a workload failed or the job was cancelled.
        WatchingEnded: on Ctrl-C.
    """
    job = service.job(ref)
    try:
        if json:
            for event in service.events(job["id"]):
                o.print_json_line(event)
        else:
            _show(service, job)
    except KeyboardInterrupt:
        text = f"stopped watching; job {job['id']} goes on, and `flashtune watch {job['id']}` shows it again"
        raise WatchingEnded(text) from None
    job = service.job(job["id"])
    if not json:
        o.stdout.print(job_table(job))
    if job["state"] != JobState.DONE:
        raise typer.Exit(1)


def _show(service: Service, job: Mapping[str, Any]) -> None:
    board = Board(job)
    if not o.stdout.is_terminal:
        for event in service.events(job["id"]):
            board.take(event)
            o.stdout.print(board.line(event), markup=False, highlight=False, soft_wrap=True)
            o.stdout.file.flush()  # a pipe's reader follows too
        return
    with Live(board.table(o.stdout.height), console=o.stdout, transient=True) as live:
        for event in service.events(job["id"]):
            board.take(event)
            live.update(board.table(o.stdout.height))


class Board:
    """What the events of a job have told so far, by workload."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._title = f"job {job['id']}" + (f", {job['name']}" if job["name"] else "")
        self._items: dict[str, dict[str, Any]] = {
            item["name"]: {"state": str(JobState.QUEUED), "study": None, "answer": "", "error": ""}
            for item in job["items"]
        }
        # by study, since two workloads may share one; by config, since each of the two is told of a trial
        self._trials: dict[str, dict[str, float | None]] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in the next event."""
        kind, data = event["kind"], event["data"]
        item = self._items.get(str(data.get("name")), {})
        if kind == "bound":
            item |= {"state": str(JobState.RUNNING), "study": data["study"]}
        elif kind == "item_done":
            item |= {"state": str(JobState.DONE), "answer": answer_text(data["answer"])}
        elif kind == "item_failed":
            item |= {"state": str(JobState.FAILED), "error": data["error"]}
        elif kind in ("trial", "quarantined"):
            self._trials.setdefault(data["study"], {})[_kernel(data)] = data["ratio"]
        elif kind == JobState.CANCELLED:
            for left in self._items.values():
                if not JobState(left["state"]).ended:
                    left["state"] = str(JobState.CANCELLED)

    def table(self, height: int) -> Table:
        """Return the board as a table of at most ``height`` lines, what runs first."""
        ended = sum(JobState(item["state"]).ended for item in self._items.values())
        table = Table(
            title=escape(f"{self._title}: {ended} of {len(self._items)} workloads ended"),
            title_justify="left",
            caption_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
        )
        for column in ("workload", "state", "trials", "best so far", "answer"):
            table.add_column(column, no_wrap=True, justify="right" if column == "trials" else "left")
        rows = sorted(self._items.items(), key=lambda row: row[1]["state"] != JobState.RUNNING)
        room = max(1, height - 6)  # title, head and its rules, caption
        for name, item in rows[:room]:
            trials = self._trials.get(item["study"], {})
            best = max(((ratio, kernel) for kernel, ratio in trials.items() if ratio is not None), default=None)
            table.add_row(
                escape(name),
                item["state"],
                str(len(trials)) if item["study"] else "",
                escape(f"{best[0]:.3f}x {best[1]}") if best else "",
                escape(item["answer"] or item["error"]),
            )
        if len(rows) > room:
            table.caption = f"and {len(rows) - room} more"
        return table

    def line(self, event: Mapping[str, Any]) -> str:
        """Return one event as a line for a log."""
        kind, data = event["kind"], event["data"]
        names = [str(data["name"])] if "name" in data else self._names(data.get("study"))
        about = f"{', '.join(names)}: " if names else ""
        at = datetime.fromisoformat(event["at"])
        return f"{at:%H:%M:%S} {about}{_said(kind, data)}"

    def _names(self, study: str | None) -> list[str]:
        return [name for name, item in self._items.items() if study is not None and item["study"] == study]


def _said(kind: str, data: Mapping[str, Any]) -> str:
    if kind in ("trial", "quarantined"):
        speed = "" if data["ratio"] is None else f" {data['ratio']:.3f}x"
        why = f" ({data['error'].splitlines()[0]})" if data["error"] else ""
        return f"{_kernel(data)}: {data['status']}{speed}{why}"
    if kind == "submitted":
        return f"submitted with {data['workloads']} workload(s)"
    if kind == "bound":
        return f"begun as study {data['study']} on {data['class']}"
    if kind == "item_done":
        return answer_text(data["answer"]) + (" (from the database)" if data["known"] else "")
    if kind == "item_failed":
        return f"failed: {data['error']}"
    if kind in ("done", "failed"):
        return f"{kind}: " + ", ".join(f"{count} {state}" for state, count in data["counts"].items())
    return kind


def _kernel(data: Mapping[str, Any]) -> str:
    return f"{data['family']} {data['config']}".strip()
