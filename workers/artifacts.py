"""How compiled objects get from the machines that compile to the machines that measure.

An object is stored under the SHA-256 of its content, in a folder that all machines share or in the
database, and lands in a cache folder only after its bytes were found to be the right ones: what lies
there is loaded as native code. Whoever is killed on the way leaves no half file under any name.

    artifacts = open_artifacts(settings, store)
    published = artifacts.publish(settings.cache_dir, compiled.files)  # where it was compiled
    artifacts.fetch(settings.cache_dir, published)                     # where it will be measured
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from db.store import Store
from tuner.artifact import Artifact, check_name
from tuner.errors import MachineError
from workers.settings import Settings

LIMIT_BYTES = 256 << 20  # for one object; FA4's forward for sm_90a and head_dim 64 takes 72 KB


class Artifacts(Protocol):
    """Where compiled objects are between the machines. Any number of threads and processes may call at once."""

    def publish(self, cache_dir: Path, names: Sequence[str]) -> tuple[Artifact, ...]:
        """Store the named files of ``cache_dir``; the same content twice is stored once.

        Raises:
            InputError: a name leaves the folder.
            MachineError: a file is not there, too large, or cannot be stored.
        """
        ...

    def fetch(self, cache_dir: Path, artifacts: Sequence[Artifact]) -> None:
        """Put ``artifacts`` into ``cache_dir`` under their names, but for those that are there already.

        Raises:
            MachineError: an object is missing or damaged, or cannot be written; those before it are in place.
        """
        ...


def open_artifacts(settings: Settings, store: Store) -> Artifacts:
    """Return the shared folder if the settings name one, else the database."""
    return FolderArtifacts(settings.artifact_dir) if settings.artifact_dir else DatabaseArtifacts(store)


class FolderArtifacts:
    """Objects in a folder that every machine mounts, as ``sha256/<first two digits>/<all digits>``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(self, cache_dir: Path, names: Sequence[str]) -> tuple[Artifact, ...]:
        return tuple([_publish(cache_dir, name, self._put) for name in names])

    def fetch(self, cache_dir: Path, artifacts: Sequence[Artifact]) -> None:
        for artifact in artifacts:
            _fetch(cache_dir, artifact, self._get, f"the folder {self._folder}")

    def _put(self, sha256: str, data: bytes) -> None:
        # Read what is there rather than trust it: an object compiled again replaces a damaged one.
        if self._get(sha256) != data:
            _write(self._folder, _stored_name(sha256), data)

    def _get(self, sha256: str) -> bytes | None:
        return _read(self._folder, _stored_name(sha256))


class DatabaseArtifacts:
    """Objects in the database, for fleets without a shared folder."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def publish(self, cache_dir: Path, names: Sequence[str]) -> tuple[Artifact, ...]:
        return tuple([_publish(cache_dir, name, self._store.artifacts_put) for name in names])

    def fetch(self, cache_dir: Path, artifacts: Sequence[Artifact]) -> None:
        for artifact in artifacts:
            _fetch(cache_dir, artifact, self._store.artifacts_get, "the database")


def _publish(cache_dir: Path, name: str, put: Callable[[str, bytes], None]) -> Artifact:
    data = _read(cache_dir, name)
    if data is None:
        raise MachineError(f"compiled object {name} is not in {cache_dir}: it will be compiled again")
    artifact = Artifact.of(name, data)
    put(artifact.sha256, data)
    return artifact


def _fetch(cache_dir: Path, artifact: Artifact, get: Callable[[str], bytes | None], where: str) -> None:
    if artifact.size_bytes > LIMIT_BYTES:
        raise MachineError(_too_large(artifact.name, artifact.size_bytes))
    here = _read(cache_dir, artifact.name)
    if here is not None and _is(artifact, here):
        return
    data = get(artifact.sha256)
    if data is None:
        raise MachineError(
            f"compiled object {artifact.name} (SHA-256 {artifact.sha256}) is not in {where}: it will be compiled again"
        )
    if not _is(artifact, data):
        raise MachineError(
            f"compiled object {artifact.name} is damaged in {where}: {len(data)} bytes with the SHA-256 "
            f"{hashlib.sha256(data).hexdigest()}, and {artifact.size_bytes} with {artifact.sha256} were "
            "published; remove it there, and it will be compiled again"
        )
    _write(cache_dir, artifact.name, data)


def _is(artifact: Artifact, data: bytes) -> bool:
    return len(data) == artifact.size_bytes and hashlib.sha256(data).hexdigest() == artifact.sha256


def _stored_name(sha256: str) -> str:
    return f"sha256/{sha256[:2]}/{sha256}"


def _too_large(name: str, size: int) -> str:
    return f"compiled object {name} takes {size} bytes; objects of up to {LIMIT_BYTES} travel between machines"


def _read(root: Path, name: str) -> bytes | None:
    """Return the content of a file below ``root``; None if no plain file has that name."""
    with _errors("read", root, name):
        try:
            with _parent(root, name) as (folder, last):
                # Not blocking: a named pipe would never open
                fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.ELOOP):  # ELOOP: the name is a link's
                return None
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return None
            if found.st_size > LIMIT_BYTES:
                raise MachineError(_too_large(name, found.st_size))
            with open(fd, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(fd)


def _write(root: Path, name: str, data: bytes) -> None:
    """Put a file below ``root``, whole or not at all; what has that name is replaced."""
    with _errors("write", root, name):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _parent(root, name, make=True) as (folder, last):
            half = f".{uuid.uuid4().hex}.tmp"
            fd = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            try:
                with open(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(fd)
                os.replace(half, last, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(half, dir_fd=folder)
                raise


@contextlib.contextmanager
def _parent(root: Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder that holds ``name``: give its descriptor and the last part of the name.

    Every step is taken from the folder before and none through a link, so that nobody who may write
    there can send the step elsewhere, not even meanwhile. ``root`` itself may be a link.
    """
    check_name(name)
    *folders, last = PurePosixPath(name).parts
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700, dir_fd=fd)
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd, last
    finally:
        os.close(fd)


@contextlib.contextmanager
def _errors(what: str, root: Path, name: str) -> Iterator[None]:
    """Turn what the file system refuses into a MachineError that says where to look."""
    try:
        yield
    except OSError as e:
        raise MachineError(
            f"cannot {what} the compiled object {name} in {root}: {e.strerror}; look at the folder's owner, "
            "mode and free space, and that nothing below it is a link"
        ) from e
