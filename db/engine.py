"""From what a person writes to an engine: the path or URL, the file, the driver's settings.

Owns what SQLite and PostgreSQL need to be told, and the form of stored JSON. Opening a file looks at
it first without SQLite, which may write to a damaged one.

    >>> parse("postgresql://ann@db/fleet").drivername
    'postgresql+psycopg'
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, InvalidatePoolError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from tuner.errors import StorageError

LOCK_WAIT_S = 30.0
CONNECT_WAIT_S = 10
PING_AFTER_S = 1.0  # a connection that idled for longer is tried before it is used: a round trip
RESTORE = "restore a backup, or move it away and tune again"
ACCESS = "check the permissions of the file and of its folder, or choose another path"

_HEADER = b"SQLite format 3\0"


def parse(place: str) -> URL:
    """Return a URL whose driver is ``sqlite``, with an absolute path, or ``postgresql+psycopg``."""
    if "://" not in place:
        return _file(place)
    shown = re.sub(r"//.*@|\?.*", lambda m: "//***@" if m[0][0] == "/" else "?***", place, flags=re.DOTALL)
    example = "write a file path, or postgresql+psycopg://user@host/name"
    try:
        url = make_url(place)
    except (ArgumentError, ValueError):
        raise StorageError(f"database URL {shown!r} cannot be read; {example}") from None
    if url.drivername in ("sqlite", "sqlite+pysqlite"):
        if url.query:
            raise StorageError(f"database URL {shown!r} has options after '?', and SQLite takes none here; {example}")
        return _file(url.database or "")
    if url.drivername not in ("postgresql", "postgresql+psycopg"):
        raise StorageError(f"database URL {shown!r} names {url.drivername!r}, which is not supported; {example}")
    if "@" in (url.host or ""):
        raise StorageError(f"database URL {shown!r} has a second @; write an @ in the password as %40")
    return url.set(drivername="postgresql+psycopg")


def _file(path: str) -> URL:
    if "\0" in path:
        raise StorageError(f"database path {path!r} has a NUL character; leave it out")
    if path in ("", ":memory:"):
        raise StorageError(f"database path {path!r} would keep nothing; give the path of a file")
    return URL.create("sqlite", database=os.path.abspath(os.path.expanduser(path)))


def check_file(path: str, create: bool) -> None:
    """Refuse what SQLite should not touch, and make the folder of a file that is to be made."""
    try:
        if not os.path.lexists(path) and create:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            return
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise StorageError(f"database {path}: it is not a regular file; choose another path")
        fault = _fault(path)
    except FileNotFoundError as e:
        if create:
            raise StorageError(f"database {path}: cannot be made ({e.strerror}); choose another path") from e
        raise StorageError(f"database {path}: there is no such file; check the path, or tune something first") from e
    except OSError as e:
        raise StorageError(f"database {path}: {e.strerror}; {ACCESS}") from e
    if fault:
        raise StorageError(f"database {path}: {fault}; {RESTORE}")


def _fault(path: str) -> str:
    """Say what is wrong with a SQLite file, from its header, without SQLite: that may write to it."""
    for _ in range(2):  # once more, for a process that was writing to the file between the two looks
        with open(path, "rb") as file:
            head, size = file.read(100), os.fstat(file.fileno()).st_size
        if not head:
            return ""
        if not head.startswith(_HEADER[: len(head)]):
            return "file is not a database"
        # https://www.sqlite.org/fileformat.html: the page count holds if both change counters agree
        page_bytes = int.from_bytes(head[16:18], "big")
        pages = int.from_bytes(head[28:32], "big") if head[24:28] == head[92:96] else 0
        whole = len(head) == 100 and size >= pages * (65536 if page_bytes == 1 else page_bytes)
        if whole or any(os.path.exists(path + beside) for beside in ("-wal", "-journal")):
            return ""
    return f"the file is truncated ({size} bytes)"


def sqlite(path: str, create: bool, read_only: bool) -> Engine:
    may_write = os.access(path, os.W_OK)
    if not read_only and not may_write and os.path.exists(path):
        raise StorageError(f"database {path}: it cannot be written; {ACCESS}")
    # read-only, too, it is opened for writing where that is allowed: only then does SQLite clear its -wal file away
    mode = "rwc" if create else "rw" if may_write else "ro"
    engine = create_engine(
        URL.create("sqlite", database=f"file:{quote(os.fsencode(path))}", query={"mode": mode, "uri": "true"}),
        connect_args={"timeout": LOCK_WAIT_S},
        **_COMMON,
    )

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None  # BEGIN is ours, below
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA synchronous=FULL")
        connection.create_function("clock", 0, time.time)  # SQLite's own has only milliseconds

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        statement = options.get("sqlite_begin", "BEGIN")
        if statement:
            if level := options.get("sqlite_synchronous"):  # of this transaction: connections are pooled
                connection.exec_driver_sql(f"PRAGMA synchronous={level}")
            connection.exec_driver_sql(statement)

    return engine


def use_wal(engine: Engine) -> None:
    """Switch the file to write-ahead logging, which it remembers."""
    deadline = time.monotonic() + LOCK_WAIT_S
    with engine.connect().execution_options(sqlite_begin=None) as connection:
        while connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() != "wal":
            try:
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
                return
            except OperationalError as e:
                # SQLite does not wait here when two connections switch at once
                if getattr(e.orig, "sqlite_errorname", "") != "SQLITE_BUSY" or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def leave_wal(engine: Engine) -> None:
    """Fold the write-ahead log into the file, so that the one file is all there is."""
    with engine.connect().execution_options(sqlite_begin=None) as connection:
        connection.exec_driver_sql("PRAGMA journal_mode=DELETE")


def postgresql(url: URL, label: str) -> Engine:
    try:
        engine = create_engine(
            url,
            connect_args={"connect_timeout": CONNECT_WAIT_S},
            **_COMMON,
        )
    except ModuleNotFoundError as e:
        raise StorageError(f"database {label}: {e.name} is not installed; pip install 'psycopg[binary]'") from e

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.execute(f"SET lock_timeout = {int(LOCK_WAIT_S * 1000)}")
        connection.commit()

    @event.listens_for(engine, "checkin")
    def returned(_: object, record: ConnectionPoolEntry) -> None:
        record.info["returned"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def taken(connection: Any, record: ConnectionPoolEntry, _: object) -> None:
        if time.monotonic() - record.info.get("returned", 0.0) < PING_AFTER_S:
            return
        try:  # the server may have been restarted since the last call
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as e:
            raise InvalidatePoolError("the server closed the connection") from e  # the pool makes another

    return engine


_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _to_json(value: Any) -> str:
    """Write JSON that every reader takes: a wrong kernel's error may be NaN, which JSON has not."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_tagged(value), allow_nan=False)


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, dict):
        return {k: _tagged(v) for k, v in value.items()}
    return [_tagged(v) for v in value] if isinstance(value, (list, tuple)) else value


def _untagged(value: dict[str, Any]) -> Any:
    if value.keys() == {"$float"} and value["$float"] in _NOT_FINITE:
        return _NOT_FINITE[value["$float"]]
    return value


def _from_json(text: str | bytes) -> Any:
    return json.loads(text, object_hook=_untagged)


_COMMON: dict[str, Any] = {
    "json_serializer": _to_json,
    "json_deserializer": _from_json,
    "hide_parameters": True,  # whole trials would fill the traceback
}
