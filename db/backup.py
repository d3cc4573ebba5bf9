"""Keeping the data: a backup is one SQLite file with every row, whatever database it came from.

So a backup of a PostgreSQL database can be looked at with any command that takes ``--db``, and moved
to a laptop or back. Both ways are all or nothing: a temporary file renamed, or one transaction.

    >>> backup("postgresql+psycopg://tuner@db/flashtune", Path("monday.db"))  # doctest: +SKIP
    {'studies': 24, 'trials': 848, 'tuned_configs': 24}
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Integer, Table, func, insert, select, text
from sqlalchemy.orm import Session

from db.models import Base, JobModel, StudyModel
from db.session import Database, open_database
from tuner.errors import StorageError

_CHUNK = 500  # rows a statement


def backup(place: str, destination: Path) -> dict[str, int]:
    """Write every row of the database at ``place`` into a new file; return the rows by table.

    The source may be in use: the backup holds one state of it.

    Raises:
        StorageError: if the source cannot be read, or the destination exists or cannot be written.
    """
    if destination.exists():
        raise StorageError(f"backup {destination} exists already; name another file, or remove it")
    if not destination.absolute().parent.is_dir():
        raise StorageError(f"backup {destination}: there is no folder {destination.absolute().parent}; make it first")
    part = destination.with_name(f".{destination.name}.{os.getpid()}.part")
    source = open_database(place, create=False, read_only=True)
    try:
        target = open_database(str(part))
        try:
            with source.read() as rows, target.write() as session:
                _one_state(source, rows)
                counts = _copy(rows, session)
            target.fold()
        finally:
            target.close()
        _publish(part, destination)
    finally:
        source.close()
        for leftover in (part, *(part.with_name(part.name + end) for end in ("-wal", "-shm"))):
            leftover.unlink(missing_ok=True)
    return counts


def restore(source: Path, place: str) -> dict[str, int]:
    """Copy a backup into the database at ``place``, made if missing; return the rows by table.

    Raises:
        StorageError: if the backup is damaged, or the database holds studies or jobs already. Neither changes.
    """
    kept = open_database(str(source), create=False, read_only=True)
    try:
        with kept.read() as rows:
            found = rows.execute(text("PRAGMA integrity_check")).scalar()
            if found != "ok":
                raise StorageError(f"backup {source} is damaged ({found}); take an older one")
            target = open_database(place)
            try:
                with target.write(alone=True) as session:
                    for model in (StudyModel, JobModel):
                        found = session.scalar(select(func.count()).select_from(model)) or 0
                        if found:
                            what = f"it holds {found} {model.__tablename__}"
                            raise target.error(what, "restore into an empty one, or move it away")
                    counts = _copy(rows, session)
                    _continue_numbers(target, session)
            finally:
                target.close()
    finally:
        kept.close()
    return counts


def _copy(rows: Session, session: Session) -> dict[str, int]:
    """Copy every table, parents first."""
    counts = {}
    for table in Base.metadata.sorted_tables:
        counts[table.name] = 0
        for chunk in _chunks(rows, table):
            session.execute(insert(table), chunk)
            counts[table.name] += len(chunk)
    return counts


def _chunks(rows: Session, table: Table) -> Iterator[list[dict[str, Any]]]:
    found = rows.execute(select(table).order_by(*table.primary_key.columns), execution_options={"yield_per": _CHUNK})
    for part in found.mappings().partitions():
        rows_of = [dict(row) for row in part]
        if "xid" in table.c:
            for row in rows_of:  # another server's transactions have other numbers, and are over
                row["xid"] = 0
        yield rows_of


def _one_state(source: Database, rows: Session) -> None:
    """Make all of a PostgreSQL session's reads see the same moment; SQLite's do anyway."""
    if source.dialect == "postgresql":
        rows.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"))


def _continue_numbers(target: Database, session: Session) -> None:
    """Let PostgreSQL's sequences go on after the copied numbers; SQLite looks at the rows itself."""
    if target.dialect != "postgresql":
        return
    for table in Base.metadata.sorted_tables:
        (key,) = table.primary_key.columns
        if isinstance(key.type, Integer):
            last = session.scalar(select(func.max(key)))
            if last is not None:
                session.execute(select(func.setval(func.pg_get_serial_sequence(table.name, key.name), last)))


def _publish(part: Path, destination: Path) -> None:
    """Put the finished file in its place, durably; never over another."""
    try:
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.link(part, destination)  # unlike a rename, this fails if somebody was faster
        folder = os.open(destination.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as e:
        raise StorageError(f"cannot write the backup {destination}: {e.strerror}; choose another place") from e
