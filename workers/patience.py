"""Waiting for a database that is away for a moment: a restart must cost time, not results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from tuner.errors import Unavailable

T = TypeVar("T")

PATIENCE_S = 600.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 5.0

log = logging.getLogger("flashtune.worker")


def patiently(call: Callable[[], T], stop: Callable[[], bool] = lambda: False, for_s: float = PATIENCE_S) -> T:
    """Return what ``call`` returns, trying again while the database cannot be reached.

    Repeating is safe for everything the store offers: a commit that had succeeded unheard is then
    refused as stale.

    Raises:
        Unavailable: after ``for_s`` seconds, or once ``stop`` says so.
    """
    deadline, wait_s = time.monotonic() + for_s, _FIRST_WAIT_S
    while True:
        try:
            return call()
        except Unavailable as e:
            if stop() or time.monotonic() + wait_s > deadline:
                raise
            log.warning("%s; trying again in %.1f s", e, wait_s)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
