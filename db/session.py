"""Opening a database, its transactions, and what its failures are called.

Turns every error of the drivers into a
``StorageError`` of one line: which database, what happened, what to do next.

    >>> database = open_database("/srv/flashtune/flashtune.db")  # doctest: +SKIP
    >>> with database.write() as session:  # doctest: +SKIP
    ...     session.add(...)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Float, func, inspect, select
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from db import engine as engines
from db.engine import ACCESS, RESTORE
from db.models import Base
from tuner.errors import InputError, StorageError, Unavailable, Unreadable

T = TypeVar("T")

_ADVISORY_LOCK = 0x666C617368  # "flash" in ASCII: any number that others are unlikely to lock

_AGAIN = "two transactions were in each other's way: run again"
_SPACE = "free some disk space and run again: what was stored before is intact"
_BUSY = "another process keeps it locked: wait until that one is done, then run again"
_CROWDED = "wait a little, then try again"
_SERVER = "check the URL, and that the server runs and takes connections"
# By SQLite's error name, and by PostgreSQL's SQLSTATE or its class (the first two characters).
_NEXT_STEP = {
    "SQLITE_NOTADB": RESTORE,
    "SQLITE_CORRUPT": RESTORE,
    "SQLITE_READONLY": ACCESS,
    "SQLITE_CANTOPEN": ACCESS,
    "SQLITE_PERM": ACCESS,
    "SQLITE_BUSY": _BUSY,
    "SQLITE_FULL": _SPACE,
    "SQLITE_IOERR": "check the disk and its free space, then run again",
    "08": _SERVER,
    "28": "check the user and the password in the URL",
    "40": _AGAIN,
    "3D": "create that database, or correct its name in the URL",
    "25": "connect to a server that takes writes",
    "42501": "grant this user the right to create and change tables there",
    "53": "give the server more room (disk, memory, connections) and run again",
    "53100": _SPACE,
    "55P03": _BUSY,
    "57": _SERVER,
}


class Database:
    """An open database: every transaction commits as a whole or leaves no trace."""

    def __init__(self, engine: Engine, label: str, read_only: bool) -> None:
        self.label = label  # the path, or the URL without its secrets
        self.dialect = engine.dialect.name
        self._engine = engine
        self._writer = engine.execution_options(sqlite_begin="BEGIN IMMEDIATE", sqlite_synchronous="FULL")
        self._single = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._soft_writer = engine.execution_options(sqlite_begin="BEGIN IMMEDIATE", sqlite_synchronous="NORMAL")
        self._read_only = read_only

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Give a session that sees one state of the data and changes nothing."""
        with self.errors(), Session(self._engine) as session:
            yield session

    @contextmanager
    def write(self, *, alone: bool = False) -> Iterator[Session]:
        """Give a session that is committed at the end, durably, or rolled back by an exception.

        ``alone`` keeps out every other such transaction; SQLite has one writer at a time anyway.
        """
        if self._read_only:
            raise self.error("it was opened read-only", "open it for writing")
        with self.errors(), Session(self._writer) as session, session.begin():
            if alone:
                self._lock(session.connection())
            yield session

    @contextmanager
    def write_soft(self) -> Iterator[Connection]:
        """Give a connection that is committed at the end without waiting for the disk.

        A killed process loses nothing of it. A power failure may lose the last moments, though never
        half a transaction: for what is done again then, as leases.
        """
        with self.write_fast() as connection:
            if self.dialect == "postgresql":
                connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
            yield connection

    @contextmanager
    def write_fast(self) -> Iterator[Connection]:
        """Give a connection for small, frequent results: durable on PostgreSQL, as ``write_soft`` on SQLite.

        SQLite syncs once a transaction, 150 to 200 times a second on a plain disk; PostgreSQL syncs many at once.
        """
        if self._read_only:
            raise self.error("it was opened read-only", "open it for writing")
        with self.errors(), self._soft_writer.begin() as connection:
            yield connection

    @contextmanager
    def one_statement(self) -> Iterator[Connection]:
        """Give a connection on which each statement is a transaction of its own, and one round trip."""
        if self._read_only:
            raise self.error("it was opened read-only", "open it for writing")
        with self.errors(), self._single.connect() as connection:
            yield connection

    def clock(self) -> Any:
        """Return the time now in seconds since 1970, by the one clock that all workers share, as SQL.

        SQLite's users are on one machine, and read that one's.
        """
        if self.dialect == "postgresql":
            return func.extract("epoch", func.clock_timestamp())
        return func.clock(type_=Float)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what SQLAlchemy and the JSON reader raise into StorageError."""
        try:
            yield
        except SQLAlchemyError as e:
            cause = getattr(e, "orig", None)
            if isinstance(cause, TypeError):  # a value without a JSON form: a fault of the caller's code
                raise cause from e
            what, next_step = _explain(e)
            kind = Unavailable if next_step in (_SERVER, _BUSY, _AGAIN, _CROWDED) else StorageError
            raise kind(str(self.error(what, next_step))) from e
        except json.JSONDecodeError as e:
            raise self.error(f"it holds JSON that cannot be read ({e})", RESTORE) from e

    def value(self, make: Callable[[Any], T], stored: Any) -> T:
        """Build a value of ``tuner`` from its stored form; Unreadable if that form is wrong."""
        try:
            return make(stored)
        except (InputError, AttributeError, KeyError, TypeError, ValueError) as e:
            text = f"it holds a value that cannot be read ({type(e).__name__}: {e})"
            next_step = f"upgrade flashtune if a newer one wrote it, or {RESTORE}"
            raise Unreadable(f"database {self.label}: {text}; {next_step}") from e

    def error(self, what: str, next_step: str) -> StorageError:
        return StorageError(f"database {self.label}: {what}; {next_step}")

    def prepare(self, create: bool) -> None:
        """Bring the schema to the newest revision, or refuse and change nothing.

        Opened read-only, the schema must be there and new enough.
        """
        from db import migrations  # Alembic: heavy, and needed here alone

        with self.errors():
            with self._engine.connect() as connection:
                self._lock(connection)  # or another process's upgrade might show up halfway
                current = self._is_current(connection, create)
            if self._read_only:
                if not current:
                    raise self.error("its tables are those of an older flashtune", "open it for writing once")
                return
            if self.dialect == "sqlite":
                engines.use_wal(self._engine)
            if not current:
                with self._writer.begin() as connection:
                    self._lock(connection)
                    migrations.upgrade(connection)  # nothing, if another process was faster

    def fold(self) -> None:
        """Bring all of a SQLite database into its one file, without a write-ahead log beside it."""
        with self.errors():
            engines.leave_wal(self._engine)

    def close(self) -> None:
        self._engine.dispose()

    def _lock(self, connection: Connection) -> None:
        if self.dialect == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK)))

    def _is_current(self, connection: Connection, create: bool) -> bool:
        from db import migrations

        at, known = migrations.revision(connection), migrations.revisions(connection)
        if at is None:
            tables = set(inspect(connection).get_table_names())
            # a PostgreSQL database may be shared with others, a file is ours or it is not
            strange = sorted(tables if self.dialect == "sqlite" else tables & set(Base.metadata.tables))
            if strange:
                raise self.error(f"it holds tables of something else ({strange[0]})", "choose another database")
            if not create:
                raise self.error("it holds no flashtune tables yet", "tune or submit something first")
        elif at not in known:
            raise self.error(f"its schema {at} is newer than this flashtune knows ({known[0]})", "upgrade flashtune")
        return at == known[0]


def open_database(place: str, *, create: bool = True, read_only: bool = False) -> Database:
    """Open the database at a file path or SQLAlchemy URL, with its schema at the newest revision.

    Two processes may do so at once. Neither a file nor a server's tables change if this fails.

    Raises:
        StorageError: if it is missing and not to be made, is no database of ours, or cannot be reached.
    """
    create = create and not read_only
    url = engines.parse(place)
    if url.drivername == "sqlite":
        path = str(url.database)
        engines.check_file(path, create)
        database = Database(engines.sqlite(path, create, read_only), path, read_only)
    else:
        label = url.set(query={}).render_as_string(hide_password=True)
        database = Database(engines.postgresql(url, label), label, read_only)
    try:
        database.prepare(create)
    except BaseException:
        database.close()
        raise
    return database


def _explain(error: SQLAlchemyError) -> tuple[str, str]:
    """Return what happened, in one line, and what to do next."""
    if isinstance(error, PoolTimeout):
        return "all its connections are in use", _CROWDED
    cause = getattr(error, "orig", None) or error
    what = getattr(getattr(cause, "diag", None), "message_primary", None) or str(cause)
    name = getattr(cause, "sqlite_errorname", None)
    state = getattr(cause, "sqlstate", None) or ""
    codes = ["_".join(name.split("_")[:2])] if name else [state, state[:2]]
    next_step = next((_NEXT_STEP[code] for code in codes if code in _NEXT_STEP), None)
    if next_step is None:  # psycopg has no SQLSTATE for a connection that never came about
        next_step = _SERVER if not name and not state and isinstance(error, OperationalError) else RESTORE
    return " ".join(what.split()), next_step
