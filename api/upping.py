"""``flashtune up``: the whole service in one process, for one machine: API, dispatcher, compilers, one device."""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from api import options as o
from api.serving import log_to_stderr
from db.store import Store
from tuner.target import probe
from workers import embedded
from workers.settings import Settings

if TYPE_CHECKING:
    from api.http.server import Server as HttpServer


def up(
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine only with API keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    device: o.DeviceOption = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line for each request.")] = False,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Serve the API and tune what is submitted, on this machine, without a broker."""
    from api.http.server import Server  # heavy, and needed here alone

    log_to_stderr(quiet)
    settings = Settings.from_env()
    settings = replace(settings, database_url=db or settings.database_url)
    settings.check_cache_dir()
    target = probe("fake" if settings.fake_script and device == "auto" else device, settings.visible_devices)
    with (
        Store.open(settings.database_url, lease_s=settings.lease_s) as store,
        Server(store, host, port) as server,
    ):
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        if json:
            o.print_json({"url": server.url, "database": store.location, "target": target.to_dict()})
            sys.stdout.flush()
        what = f"serving {server.url}, tuning on {target.model} ({target.arch}), database {store.location}"
        o.stderr.print(what, markup=False, highlight=False, soft_wrap=True)
        serving = threading.Thread(target=_serve, args=(server, stop), name="http", daemon=True)
        serving.start()
        try:
            embedded.run(settings, store, stop, device=device)
        finally:
            server.stop()
            serving.join(timeout=10)


def _serve(server: HttpServer, stop: threading.Event) -> None:
    """Serve until told to stop; without the API the rest of the process is of no use."""
    try:
        server.run()
    finally:
        stop.set()
