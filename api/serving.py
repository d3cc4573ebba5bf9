"""``flashtune serve``: the HTTP API on a port.

Beyond loopback it begins only if an API key exists, and then every request needs one.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from api import options as o


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine only with API keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    rate: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests a minute of a key that has no rate of its own. Default: 60000, or none here."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line for each request.")] = False,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Serve the HTTP API until interrupted."""
    from api.http.server import Server  # heavy, and needed here alone

    log_to_stderr(quiet)
    with o.open_store(db) as store, Server(store, host, port, rate_per_minute=rate) as server:
        if json:
            o.print_json({"url": server.url, "database": store.location, "keys_required": server.keys_required})
            sys.stdout.flush()
        keys = "every request needs a key" if server.keys_required else "open to everyone on this machine"
        o.stderr.print(
            f"serving {server.url} ({keys}), database {store.location}", markup=False, highlight=False, soft_wrap=True
        )
        server.run()


def log_to_stderr(quiet: bool = False) -> None:
    """Write what the server says to standard error, a line for each request unless ``quiet``."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("flashtune", logging.WARNING if quiet else logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
