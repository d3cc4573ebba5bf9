"""The whole service in one process: dispatcher, compilers and the measuring child, without a broker.

The same steps as a fleet's, on the same tables; SQLite is enough.
"""

from __future__ import annotations

import logging
import threading

from db.store import Store
from tuner.errors import FlashtuneError
from workers.dispatch import Dispatcher
from workers.engine import Engine
from workers.identity import ROLES
from workers.settings import Settings

log = logging.getLogger("flashtune.dispatch")


def run(settings: Settings, store: Store, stop: threading.Event, *, device: str = "auto") -> None:
    """Serve jobs until ``stop`` is set.

    Raises:
        InputError: if the device is not there, or another process measures on it.
    """
    with Engine(settings, store, ROLES, device=device) as engine:
        worker = threading.Thread(target=engine.run, args=(stop,), name="engine", daemon=True)
        worker.start()
        dispatcher = Dispatcher(store, keep=settings.keep)
        while not stop.is_set():
            try:
                dispatcher.tick()
            except FlashtuneError as e:
                log.error("%s", e)
            except Exception:
                log.exception("the dispatcher's look failed; it looks again in %.1f s", settings.tick_s)
            stop.wait(settings.tick_s)
        worker.join(timeout=60)
