"""One flashtune a device: two that measure at once measure each other."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tuner.errors import InputError
from tuner.target import Target


def lock_device(folder: Path, target: Target) -> int | None:
    """Hold a device against every other flashtune of this folder; closing the descriptor lets it go.

    None for the fake device, of which everybody has an own one.

    Raises:
        InputError: naming the process that has it.
    """
    if target.device == "fake":
        return None
    path = folder / f"device-{target.uuid or target.device}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode().strip()
        os.close(fd)
        raise InputError(
            f"process {holder} is measuring on {target.model}; wait for it, or use another device"
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, str(os.getpid()).encode())
    return fd
