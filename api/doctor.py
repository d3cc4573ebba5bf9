"""``flashtune doctor``: look at everything that flashtune needs here, and say what to do about the rest.

Makes nothing that is missing, and leaves nothing but a marker file in a fleet's shared folder. The looks
themselves are in ``api.checks`` (the machine and its software), ``api.checks_keeping`` (database, cache,
room), ``api.checks_fleet`` (what waits, who works) and ``api.checks_service`` (broker, shared folder, API).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from api import checks, checks_fleet, checks_keeping, checks_service
from api import options as o
from api.checks import Check, Level
from db import engine as engines
from tuner import target
from tuner.errors import InputError
from workers.settings import Settings

_STYLE = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor(db: o.DatabaseOption = None, json: o.JsonOption = False) -> None:
    """Check this machine, and the fleet around it; exits with 1 if something would fail, with each next step."""
    if db is not None:
        engines.parse(db)  # a wrong option is no finding
    with o.stderr.status("looking at this machine"):
        found = list(_checks(db))
    failed = sum(c.level is Level.FAIL for c in found)
    if json:
        o.print_json({"ok": not failed, "checks": [asdict(c) for c in found]})
    else:
        o.stdout.print(_table(found))
        warned = sum(c.level is Level.WARN for c in found)
        o.stdout.print(f"{len(found)} checks: {failed} failed, {warned} warnings", highlight=False)
    if failed:
        raise typer.Exit(1)


def _checks(db: str | None) -> Iterator[Check]:
    yield from _run("python", checks.python)
    yield from _run("packages", checks.packages)
    try:
        settings = Settings.from_env()
    except InputError as e:
        yield checks.failed("settings", e)
        return
    yield from _run("gpu", lambda: checks.gpu(settings.visible_devices))
    yield from _run("torch", lambda: checks.torch(settings.visible_devices))
    yield from _run("FA4", checks.flash_attention)
    yield from _run("cuobjdump", checks.cuobjdump)
    place = db or settings.database_url
    database = _run("database", lambda: checks_keeping.database(place))
    yield from database
    yield from _run("disk [database]", lambda: checks_keeping.database_disk(place))
    yield from _run("cache folder", lambda: checks_keeping.cache_folder(settings.cache_dir))
    yield from _run("disk", lambda: checks_keeping.disk(settings.cache_dir))
    yield from _run("memory", lambda: checks_keeping.memory(settings.compile_workers))
    yield from _run("device lock", lambda: checks_keeping.device_lock(settings.cache_dir))
    yield from _shared(settings, place, usable=all(c.level is not Level.FAIL for c in database))


def _shared(settings: Settings, place: str, usable: bool) -> Iterator[Check]:
    """Look at what several machines share; ``usable`` tells whether the database can be asked."""
    seen: list[checks_fleet.Fleet] = []
    if usable:
        yield from _run("clock", lambda: checks_service.clock(place))
        yield from _run("fleet", lambda: _fleet(settings, place, seen))
    else:
        yield Check("fleet", Level.WARN, "not looked at, since the database cannot be used", "see to that one first")
    workers = [w for fleet in seen for w in fleet.workers]
    yield from _run("artifact folder", lambda: checks_service.artifact_folder(settings.artifact_dir, workers))
    if (folder := settings.artifact_dir) is not None:
        yield from _run("disk [artifacts]", lambda: checks_keeping.disk(folder, "artifacts", "FLASHTUNE_ARTIFACT_DIR"))
    yield from _run("broker", lambda: checks_service.broker(settings.broker_url))
    yield from _run("service", lambda: checks_service.service(settings))


def _fleet(settings: Settings, place: str, seen: list[checks_fleet.Fleet]) -> list[Check]:
    fleet = checks_fleet.look(place)
    if fleet is None:
        return [Check("fleet", Level.OK, "nothing to look at: the database has no tables of this version yet")]
    seen.append(fleet)
    here = target.probe("auto", settings.visible_devices)
    return [*checks_fleet.fleet(fleet), *checks_fleet.versions(fleet, here, target.toolchain())]


def _run(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """Run one check; one that breaks is a finding, and the others still run."""
    try:
        return check()
    except InputError as e:
        return [checks.failed(name, e)]
    except Exception as e:
        return [Check(name, Level.FAIL, f"the check itself broke: {type(e).__name__}: {e}", "report this")]


def _table(found: list[Check]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "check", "seen", "next step"):
        table.add_column(column, overflow="fold", no_wrap=column in ("", "check"))
    for c in found:
        level = Text(str(c.level), style=_STYLE[c.level])
        table.add_row(level, escape(c.name), escape(c.seen), escape(c.next_step))
    return table
