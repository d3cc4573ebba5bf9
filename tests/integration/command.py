"""The installed command, run in a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FLASHTUNE = Path(sys.executable).with_name("flashtune")


def text(home: Path, *args: str) -> str:
    """Return what a command that succeeds prints."""
    done = subprocess.run(
        [FLASHTUNE, *args],
        cwd=home,
        env={**os.environ, "FLASHTUNE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def answer(home: Path, *args: str) -> Any:
    """Return the JSON that a command that succeeds prints."""
    return json.loads(text(home, *args, "--json"))
