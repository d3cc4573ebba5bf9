"""Owns the device: verifies and measures, one request at a time. May be killed at any moment.

A script, not a module to import: ``tuner.sandbox`` starts it with the target pinned in the
environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tuner import _child_io
from tuner.bench import Bench, BenchError
from tuner.config import Config
from tuner.families.base import Room
from tuner.lab import open_lab
from tuner.target import Target
from tuner.workload import Workload

_benches: dict[str, Bench] = {}  # by workload, default and policy


def handle(request: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Answer ``open``, ``close``, ``attempt``, ``finals``, ``rounds`` or ``parts`` for one workload's bench."""
    operation, key = request["op"], request["bench"]
    if operation == "close":
        _benches.pop(key, None)
        _free()
        return {"ok": True}
    if operation == "open":
        try:
            _benches[key] = _open(request)
        except BenchError as e:
            return {"ok": False, "error": str(e)}
        return {"ok": True}
    bench = _benches[key]
    if operation == "attempt":
        return bench.attempt(Config.from_dict(request["config"]), request["verify"], say, measure=request["measure"])
    try:
        if operation == "finals":
            bench.prepare_finals([Config.from_dict(c) for c in request["configs"]], say)
            return {"ok": True}
        if operation == "parts":
            return {"parts": bench.parts(say)}
        return bench.rounds(request["count"], request["seed"], say)
    except Exception as e:
        return {"ok": False, "error": _child_io.error_text(e)}


def _open(request: dict[str, Any]) -> Bench:
    workload, default = Workload.from_dict(request["workload"]), Config.from_dict(request["default"])
    room = Room(Target(**request["target"]), Path(request["cache_dir"]), request.get("script", ""))
    try:
        lab = open_lab(default, workload, room, request["policy"])
    except Exception as e:
        raise BenchError(_child_io.error_text(e)) from e
    first = int.from_bytes(os.urandom(4), "little")  # inputs are fresh every time
    seeds = [first + n for n in range(request["draws"])]
    repeatable, timed = workload.deterministic, request["timed"]
    return Bench(lab, default, workload.dtype, request["policy"], seeds, repeatable, timed)


def _free() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    _child_io.serve(handle)
