"""``flashtune verify``: verify published configs again, with other inputs, and withdraw what fails."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from api import options as o
from api.tables import kernel_name
from db.store import Published, Store
from tuner.errors import InputError
from workers.runner import Place, Runner
from workers.settings import Settings
from workers.verifying import DRAWS, Checked, Verdict
from workers.verifying import verify as verify_again

_MAX_DRAWS = 64


def verify(
    study: Annotated[
        list[str] | None, typer.Argument(help="Ids of studies, or the beginnings of ids; see `flashtune studies`.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every answer that the database publishes.")] = False,
    draws: Annotated[int, typer.Option(help="Sets of fresh random inputs for each config.")] = DRAWS,
    device: o.DeviceOption = "auto",
    fake_script: o.FakeScriptOption = None,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Verify published configs again in a fresh process; one that fails is withdrawn, and the exit code is 1.

    What was tuned on another target or with another toolchain is skipped, and said.
    """
    if bool(study) == every:
        raise InputError("name studies, or give --all for every published answer: one of the two")
    if not 1 <= draws <= _MAX_DRAWS:
        raise InputError(f"draws is {draws}; it must be from 1 to {_MAX_DRAWS}")
    settings = Settings.from_env()
    place = Place.find(settings, device=device, script=o.read_script(fake_script))
    settings.check_cache_dir()
    checked: list[Checked] = []
    with o.open_store(db, create=False) as store, Runner(settings, store, place) as runner:
        answers = store.published() if every else _answers(store, study or [])
        for one in verify_again(runner, store, place, answers, draws=draws):
            checked.append(one)
            o.stderr.print(
                f"{one.answer.study_id} {one.answer.workload.label}: {one.verdict}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    if json:
        counts = {str(v): sum(c.verdict is v for c in checked) for v in Verdict}
        o.print_json({"counts": counts, "draws": draws, "checked": [c.to_dict() for c in checked]})
    else:
        o.stdout.print(_table(checked))
    if any(c.verdict in (Verdict.FAILED, Verdict.UNJUDGED) for c in checked):
        raise typer.Exit(1)


def _answers(store: Store, refs: list[str]) -> list[Published]:
    found: dict[str, Published] = {}
    for ref in refs:
        answer = store.answer(store.study(ref))
        if answer is None:
            raise InputError(f"study {ref} has no answer to verify; see `flashtune show {ref}`")
        found[answer.study_id] = answer
    return list(found.values())


def _table(checked: list[Checked]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("study", no_wrap=True)
    for column in ("workload", "policy", "kernel"):
        table.add_column(column, overflow="fold")
    for column in ("error", "allowed", "worst row", "allowed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for c in checked:
        v, limits = c.verification, c.limits
        numbers = [""] * 4
        if v is not None and limits is not None:
            numbers = [f"{x:.2e}" for x in (v.error, limits[0], v.row_error, limits[1])]
        words = [str(c.verdict), c.reason, f"now {kernel_name(c.instead)}" if c.instead else ""]
        table.add_row(
            c.answer.study_id,
            escape(c.answer.workload.label),
            c.answer.policy,
            kernel_name(c.config),
            *numbers,
            escape("; ".join(w.split("\n")[0] for w in words if w)),
            style="bold red" if c.verdict in (Verdict.FAILED, Verdict.UNJUDGED) else None,
        )
    return table
