"""Compiling for a GPU that is not here: a process as the compiling child is one, and what its objects are for."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from tuner.compile import child_env
from tuner.target import Target

ROOT = Path(__file__).parents[2]


def in_child(script: str, folder: Path, target: Target, *args: Any) -> Any:
    """Run a script as the compiling child of ``target`` is run, and return the JSON that it prints last.

    It finds ``folder`` in ``sys.argv[1]``, and ``args`` as JSON behind it.
    """
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), *map(json.dumps, args)],
        cwd=ROOT,
        env={**os.environ, **child_env(target, folder, "")},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def architectures(data: bytes) -> list[int]:
    """Return the SM of every Hopper image in an object: low byte of e_flags, where e_machine is 190 (CUDA)."""
    starts, at = [], data.find(b"\x7fELF")
    while at >= 0:
        starts.append(at)
        at = data.find(b"\x7fELF", at + 4)
    headers = [data[at : at + 64] for at in starts]
    return [h[48] for h in headers if len(h) == 64 and struct.unpack_from("<H", h, 18)[0] == 190]
