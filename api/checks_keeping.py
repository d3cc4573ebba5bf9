"""What ``flashtune doctor`` finds out about where flashtune keeps things: database, cache, disk, memory.

Makes nothing and locks nothing for longer than a look.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from api.checks import Check, Level
from db import engine as engines
from db.session import Database, open_database

_GIB = 1 << 30
_FREE_DISK_BYTES = 5 * _GIB  # compiled kernels of some hundred studies, and room for the database
_WORKER_BYTES = 2 * _GIB  # what compiling one FA4 kernel has been seen to take, with some to spare


def database(place: str) -> list[Check]:
    """Open the database, see its schema and begin a transaction that could write.

    Raises:
        StorageError: if it cannot be used, with the next step.
    """
    url = engines.parse(place)
    if url.drivername == "sqlite" and not os.path.lexists(str(url.database)):
        return [_missing_file(Path(str(url.database)))]
    label, revision, known = _revisions(place)
    if revision is None and url.drivername != "sqlite":
        return [Check("database", Level.OK, f"{label}: no tables yet, the first tune makes them")]
    if revision in known[1:]:
        seen = f"{label}: schema {revision} is older than {known[0]}; the next tune upgrades it"
        return [Check("database", Level.WARN, seen, "keep a copy of it first")]
    open_database(place, create=False, read_only=True).close()  # says what else may be wrong with it
    return [Check("database", Level.OK, f"{label}: schema {revision}, writable")]


def _missing_file(path: Path) -> Check:
    if reason := _cannot_make(path.parent):
        return Check("database", Level.FAIL, f"{path} does not exist, and {reason}", "choose another path with --db")
    return Check("database", Level.OK, f"{path} does not exist yet: the first tune makes it")


@contextmanager
def opened(place: str) -> Iterator[Database]:
    """Give the database at ``place`` as it is: neither made nor upgraded. Raises StorageError."""
    url = engines.parse(place)
    if url.drivername == "sqlite":
        label = str(url.database)
        engines.check_file(label, create=False)
        engine = engines.sqlite(label, create=False, read_only=False)
    else:
        label = url.set(query={}).render_as_string(hide_password=True)
        engine = engines.postgresql(url, label)
    database = Database(engine, label, read_only=False)
    try:
        yield database
    finally:
        database.close()


def _revisions(place: str) -> tuple[str, str | None, list[str]]:
    """Return the database's label, its schema's revision and those that are known, newest first."""
    from db import migrations  # Alembic takes long to import

    # SQLite takes the write lock here, and nothing is written
    with opened(place) as database, database.write() as session:
        connection = session.connection()
        return database.label, migrations.revision(connection), migrations.revisions(connection)


def cache_folder(folder: Path) -> list[Check]:
    """Look whether compiled kernels can be kept, and whether nobody else could have put code there."""
    name, other = "cache folder", "set FLASHTUNE_CACHE_DIR to another folder"
    if not folder.exists():
        if reason := _cannot_make(folder):
            return [Check(name, Level.FAIL, f"{folder} cannot be made: {reason}", other)]
        return [Check(name, Level.OK, f"{folder} does not exist yet: the first tune makes it")]
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.getuid():
        seen = f"{folder} belongs to user {found.st_uid}, and what lies there is loaded as native code"
        return [Check(name, Level.FAIL, seen, other)]
    if mode & 0o022:
        seen = f"{folder} has mode {mode:04o}: others can put code there, which is loaded as native code"
        return [Check(name, Level.FAIL, seen, f"empty it and run chmod 700 {folder}")]
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        seen = f"{folder} is on a filesystem mounted noexec: compiled kernels cannot be loaded from it"
        return [Check(name, Level.FAIL, seen, other)]
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        return [Check(name, Level.FAIL, f"{folder} cannot be written: {e.strerror}", other)]
    if mode != 0o700:
        return [Check(name, Level.WARN, f"{folder} has mode {mode:04o}, not 0700", f"run chmod 700 {folder}")]
    return [Check(name, Level.OK, f"{folder}, mode 0700, writable")]


def disk(folder: Path, what: str = "", setting: str = "FLASHTUNE_CACHE_DIR") -> list[Check]:
    """Look at the free space of a folder: of compiled kernels, unless ``what`` says of what else."""
    name = f"disk [{what}]" if what else "disk"
    free = shutil.disk_usage(_existing(folder)).free
    seen = f"{free / _GIB:.1f} GiB free for {folder}"
    if free < _FREE_DISK_BYTES:
        next_step = f"free some space, or set {setting} to a place on another disk"
        return [Check(name, Level.WARN, f"{seen}, below {_FREE_DISK_BYTES // _GIB} GiB", next_step)]
    return [Check(name, Level.OK, seen)]


def database_disk(place: str) -> list[Check]:
    """Look at the free space of a database that is a file here; a server's disk is not seen from here."""
    url = engines.parse(place)
    if url.drivername != "sqlite":
        return []
    return disk(Path(str(url.database)).parent, "database", "FLASHTUNE_DATABASE_URL")


def memory(workers: int) -> list[Check]:
    """Compare the free memory with what the compiling processes may take together."""
    available = available_memory_bytes()
    seen = (
        f"{available / _GIB:.1f} GiB available, {workers} compile worker(s) may take {_WORKER_BYTES // _GIB} GiB each"
    )
    if workers * _WORKER_BYTES > available:
        fitting = max(1, available // _WORKER_BYTES)
        return [Check("memory", Level.WARN, seen, f"set FLASHTUNE_COMPILE_WORKERS={fitting}, or free some memory")]
    return [Check("memory", Level.OK, seen)]


def available_memory_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return what may still be taken: of the machine, or of this container if that is less."""
    kib = re.search(r"^MemAvailable:\s+(\d+) kB$", proc.read_text(), flags=re.MULTILINE)
    available = int(kib[1]) * 1024 if kib else 0
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), flags=re.MULTILINE)
    except OSError:  # no cgroup v2, or the machine's own root group
        return available
    if limit == "max":
        return available
    return max(0, min(available, int(limit) - used + (int(cached[1]) if cached else 0)))


def device_lock(folder: Path) -> list[Check]:
    """Look whether another flashtune holds a device."""
    held = []
    for path in sorted(folder.glob("device-*.lock")):
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            device = path.stem.removeprefix("device-")
            held.append(f"process {os.read(fd, 32).decode().strip()} is measuring on {device}")
        finally:
            os.close(fd)
    if held:
        return [Check("device lock", Level.WARN, "; ".join(held), "wait for it, or use another device")]
    return [Check("device lock", Level.OK, "no other flashtune is measuring")]


def _cannot_make(folder: Path) -> str:
    """Return why a folder cannot be made or written; empty if it can."""
    nearest = _existing(folder)
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} cannot be written"
    return ""


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())
