"""``flashtune keys``: make, list and revoke API keys, in the database itself.

Never over HTTP: who can write to the database may make keys, and nobody needs a first key for that.
"""

from __future__ import annotations

from typing import Annotated

import typer

from api import options as o
from api.tables import keys_table
from db.values import SCOPES

app = typer.Typer(
    help="Make, list and revoke the API keys of the service.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is, for people to read.")],
    scope: Annotated[
        list[str], typer.Option("--scope", "-s", help=f"One of {', '.join(SCOPES)}; give it again for more.")
    ],
    rate_per_minute: Annotated[
        int | None, typer.Option("--rate-per-minute", help="Requests a minute; default: the server's own limit.")
    ] = None,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Make a key and print it: the only time that it is shown."""
    with o.open_store(db) as store:
        key, text = store.keys.create(name, scope, rate_per_minute)
    if json:
        o.print_json({**key.to_dict(), "key": text})
        return
    print(text)
    o.stderr.print(
        f"key {key.id} for {key.name} ({', '.join(key.scopes)}); it is not shown again: put it in FLASHTUNE_API_KEY",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command("list")
def list_keys(db: o.DatabaseOption = None, json: o.JsonOption = False) -> None:
    """List the keys without their texts, the oldest first."""
    with o.open_store(db, create=False, read_only=True) as store:
        keys = store.keys.list()
    if json:
        o.print_json([key.to_dict() for key in keys])
    else:
        o.stdout.print(keys_table(keys))


@app.command("revoke")
def revoke(
    key: Annotated[str, typer.Argument(help="A key's id, the beginning of it, or its name.")],
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Revoke a key: the service refuses it within seconds."""
    with o.open_store(db, create=False) as store:
        revoked = store.keys.revoke(key)
    if json:
        o.print_json(revoked.to_dict())
    else:
        o.stdout.print(f"key {revoked.id} of {revoked.name} is revoked", markup=False, highlight=False)
