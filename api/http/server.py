"""A port that serves the API, with the bounds that uvicorn and httptools do not have by themselves."""

from __future__ import annotations

import gc
import ipaddress
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.http.app import make_app
from db.store import Store
from tuner.errors import InputError

KEY_RATE_PER_MINUTE = 60_000  # of keys without a rate of their own, beyond loopback
_MAX_HEAD_BYTES = 64 << 10
_STREAMS_END_S = 3  # a stream that is open when the server stops is cut then; its client resumes
_THREAD_TURN_S = 0.0005  # Python's 5 ms would let a thread that reads the database delay lookups by as much


class Server:
    """The API on a port that is taken from the beginning. Use it as a context manager."""

    def __init__(self, store: Store, host: str, port: int, *, rate_per_minute: int | None = None) -> None:
        """Take the port.

        Raises:
            InputError: if it cannot be taken, or is beyond loopback and no key exists.
        """
        loopback = _is_loopback(host)
        if not loopback and not store.keys.any():
            raise InputError(
                f"{host} can be reached from other machines, and no API key exists; make one first: "
                "flashtune keys create NAME --scope admin"
            )
        self.keys_required = not loopback or store.keys.any()
        self._socket = _listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        if not loopback and rate_per_minute is None:
            rate_per_minute = KEY_RATE_PER_MINUTE
        self.app = make_app(store, require_key=not loopback, loopback=loopback, rate_per_minute=rate_per_minute)
        self._server = uvicorn.Server(_config(self.app))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def run(self) -> None:
        """Serve until interrupted, or until ``stop``. May run in any thread."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(_THREAD_TURN_S)
        gc.collect()
        gc.freeze()  # what is loaded stays: going through it again and again stops lookups for 0.1 s
        try:
            self._server.run(sockets=[self._socket])
        finally:
            sys.setswitchinterval(before)

    def stop(self) -> None:
        """Make ``run`` return soon. Any thread may call it."""
        self._server.should_exit = True


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a bound on the size of a request's head, which httptools lacks."""

    _head_bytes = 0
    _in_head = True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._in_head = 0, True

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")


def _config(app: Callable[..., Any]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttp,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level=None,
        access_log=False,  # it has query strings
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_STREAMS_END_S,
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as e:
        raise InputError(
            f"cannot listen on {host} port {port}: {e.strerror}; choose another with --host, --port"
        ) from e
