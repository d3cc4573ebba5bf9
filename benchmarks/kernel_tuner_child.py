"""Replays T4 files with Kernel Tuner's strategies in its simulation mode; run by benchmarks/replay.py.

Needs kernel_tuner and nothing of flashtune, in an environment of its own:

    python kernel_tuner_child.py BUDGET SEEDS STRATEGY[,STRATEGY...] FILE.json...

Writes a line of JSON a replay: file, strategy, seed, and the configs evaluated in their order. A
strategy that fails says so in ``error``: a result about the strategy, not a reason to stop.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import kernel_tuner
import numpy as np
from kernel_tuner.interface import tune_cache

_TIMINGS = ("compile_time", "verification_time", "benchmark_time", "framework_time", "strategy_time")
_ERRORS = {"compile": "CompilationFailedConfig", "constraints": "InvalidConfig"}


def cache_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return a T4 document as the cache file that Kernel Tuner's simulation mode reads."""
    names = sorted(document["results"][0]["configuration"])
    entries = {}
    for result in document["results"]:
        params = {n: result["configuration"][n] for n in names}
        measured = {m["name"]: m["value"] for m in result["measurements"]}
        time = measured["time"] if result["invalidity"] == "correct" else None
        failed = _ERRORS.get(result["invalidity"], "RuntimeFailedConfig")
        entry = {**params, "time": failed if time is None else time, **dict.fromkeys(_TIMINGS, 0.0), "timestamp": ""}
        entries[",".join(str(v) for v in params.values())] = entry
    tunables = {n: sorted({e[n] for e in entries.values()}) for n in names}
    return {
        "device_name": "recorded",
        "kernel_name": "attention",
        "problem_size": [1],
        "tune_params_keys": names,
        "tune_params": tunables,
        "objective": "time",
        "cache": entries,
    }


def replay(path: str, names: list[str], strategy: str, budget: int, seed: int) -> list[dict[str, Any]]:
    """Return the distinct configs that a strategy evaluated, in their order, at most ``budget``."""
    random.seed(seed)
    np.random.seed(seed)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results, _ = tune_cache(path, strategy=strategy, strategy_options={"max_fevals": budget}, quiet=True)
    distinct = dict.fromkeys(tuple(_plain(r[n]) for n in names) for r in results)
    return [dict(zip(names, values, strict=True)) for values in distinct][:budget]


def main() -> None:
    """Replay every file by every strategy with seeds 0, 1, ..."""
    budget, seeds, strategies = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
    print(json.dumps({"kernel_tuner": kernel_tuner.__version__}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for file in sys.argv[4:]:
            cache = cache_of(json.loads(Path(file).read_text()))
            path = Path(folder) / "cache.json"
            path.write_text(json.dumps(cache))
            for strategy in strategies:
                for seed in range(seeds):
                    line = {"file": file, "strategy": strategy, "seed": seed}
                    try:
                        line["configs"] = replay(str(path), cache["tune_params_keys"], strategy, budget, seed)
                    except Exception as e:
                        line["error"] = f"{type(e).__name__}: {e}"[:200]
                    print(json.dumps(line), flush=True)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


if __name__ == "__main__":
    main()
