"""The child's side of ``children``: die with the parent, read requests, write answers.

Run as a script's first import; needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Ask Linux for a SIGKILL when the parent goes, so that a killed tuner leaves nothing running.

    ``parent`` is its process id as it gave it: in a container the tuner may well be process 1.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we asked
        sys.exit(1)


class Pipe:
    """Requests in, answers and events out, as JSON lines."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._in = os.fdopen(read_fd, "r", encoding="utf-8")
        self._out = os.fdopen(write_fd, "w", encoding="utf-8")
        os.set_inheritable(read_fd, False)  # compilers that we start must not hold the pipes open
        os.set_inheritable(write_fd, False)

    def requests(self) -> Iterator[dict[str, Any]]:
        for line in self._in:
            yield json.loads(line)

    def send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def serve(handle: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], dict[str, Any]]) -> None:
    """Answer requests until the parent closes the pipe. ``handle`` gets (request, send_event)."""
    die_with_parent(int(sys.argv[3]))
    if sys.argv[4]:
        with contextlib.suppress(Exception):  # whoever needs it will say so
            importlib.import_module(sys.argv[4])
    pipe = Pipe(int(sys.argv[1]), int(sys.argv[2]))
    for request in pipe.requests():
        pipe.send(handle(request, pipe.send))


def error_text(e: BaseException, limit: int = 4000) -> str:
    """Return ``Type: message``, cut to what a database column and a person can take."""
    text = f"{type(e).__name__}: {e}".strip()
    return text if len(text) <= limit else text[: limit - 4] + " ..."
