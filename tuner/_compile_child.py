"""Compiles configs, one a request. Sees no GPU, except in the lane for rivals that compile on one.

A script, not a module to import: ``tuner.compile`` starts it with the compile target in the
environment, since FA4 and CuTeDSL read it on import.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tuner import _child_io
from tuner.config import Config
from tuner.families import load
from tuner.families.base import Room
from tuner.target import Target
from tuner.workload import Workload


def handle(request: dict[str, Any], _event: Any) -> dict[str, Any]:
    """Compile one config; an ordinary exception of the compiler is an answer, not a crash."""
    room = Room(Target(**request["target"]), Path(request["cache_dir"]), request.get("script", ""))
    config, workload = Config.from_dict(request["config"]), Workload.from_dict(request["workload"])
    start = time.perf_counter()
    try:
        built = load(config.family).compile(config, workload, room)
        files = [path.relative_to(room.cache_dir).as_posix() for path in built.files]
    except Exception as e:
        return {"ok": False, "error": _child_io.error_text(e), "seconds": time.perf_counter() - start}
    seconds = time.perf_counter() - start
    return {"ok": True, "resources": built.resources.to_dict(), "files": files, "seconds": seconds}


if __name__ == "__main__":
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        os.nice(10)  # compilers fill every core; the measuring child's host times must not notice
    _child_io.serve(handle)
