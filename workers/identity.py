"""Who this worker is: its host, its GPU, and the keys by which the database hands it work.

A *class* is what measures alike: GPU model, power cap, toolchain. A compile key is coarser: what
makes the same object, whatever the driver, and needs no GPU.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from db.values import WorkerInfo
from tuner.target import Target, Toolchain

ROLES = ("compile", "measure", "control")


def class_key(target: Target, toolchain: Toolchain) -> str:
    """Return the key of everything that measures as this target does under this toolchain."""
    return f"{target.arch}.{_digest(target.key, toolchain.key)}"


def compile_key(arch: str, toolchain: Toolchain) -> str:
    """Return the key of everything that compiles the same objects for an architecture.

    FA4's own cache keys hold its sources, CuTeDSL and the Python version; the host code in an object
    is for the machine that compiled it. torch counts nowhere: it launches nothing there.
    """
    packages = (toolchain.flash_attn_4, toolchain.cutlass_dsl, toolchain.python, platform.machine())
    return f"{arch}.{_digest(arch, *packages)}"


def identify(roles: Sequence[str], target: Target, toolchain: Toolchain) -> WorkerInfo:
    """Return a new identity of this process."""
    now = datetime.now(UTC)
    measures = "measure" in roles
    return WorkerInfo(
        id=_pid_space() + uuid.uuid4().hex[12:],
        host=socket.gethostname(),
        pid=os.getpid(),
        roles=tuple(roles),
        class_key=class_key(target, toolchain) if measures else "",
        compile_key=compile_key(target.arch, toolchain),
        target=target if measures else None,
        toolchain=toolchain,
        started_at=now,
        heartbeat_at=now,
    )


def is_dead_here(worker: WorkerInfo) -> bool:
    """Tell whether a worker ran among the processes that this one sees, and is there no longer."""
    if not worker.id.startswith(_pid_space()):
        return False
    try:
        os.kill(worker.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def arch_of(key: str) -> str:
    """Return the architecture that a class or compile key begins with."""
    return key.partition(".")[0]


def _pid_space() -> str:
    """Return 12 digits for this boot of this machine and its namespace of process ids: containers have their own."""
    try:
        boot, space = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:  # nobody can be told to be from here
        return uuid.uuid4().hex[:12]
    return _digest(boot, space)[:12]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
