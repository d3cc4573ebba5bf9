"""``flashtune worker``: this process becomes one member of a fleet.

One role a command: a node with eight GPUs runs eight that measure, each with its ``--device``, and
beside them, here or elsewhere, some that compile and at least one that controls.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from api import options as o
from workers.member import Member
from workers.settings import Settings, without_secrets


def worker(
    role: Annotated[
        str, typer.Option(help="compile: CPUs; measure: one GPU; control: the dispatcher, at least one a fleet.")
    ],
    device: Annotated[
        str, typer.Option(help="What to measure on: auto, cuda:N, a GPU's UUID (GPU-...) or cpu. [default: auto]")
    ] = "",
    arch: Annotated[str, typer.Option(help="What to compile for: sm_90a, sm_100a or cpu.")] = "",
    compile_workers: Annotated[
        int | None,
        typer.Option(
            "--compile-workers",
            "--concurrency",
            min=1,
            help="Compiling processes. Default: FLASHTUNE_COMPILE_WORKERS, or cores - 1.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name in logs. Default: the queue and the process id.")] = "",
    json: o.JsonOption = False,
) -> None:
    """Work for a fleet until stopped: needs FLASHTUNE_BROKER_URL and a PostgreSQL database.

    SIGTERM finishes what is being measured, gives the rest back and signs off; a second one ends at once.
    """
    settings = Settings.from_env()
    member = Member.find(settings, role, device=device, arch=arch, name=name, compile_workers=compile_workers)
    if json:
        o.print_json_line(asdict(member))
    where = f" on {member.device}" if member.device else ""
    o.stderr.print(
        f"{member.name} takes {member.queue}{where} from {without_secrets(settings.broker_url or '')}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    member.become()
