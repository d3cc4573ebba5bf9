"""Does a worker grow? Its resident memory, and its children's, over thousands of fake trials.

    python benchmarks/memory.py --trials 2000 --out benchmarks/results/<date>-cpu/memory.json

One worker with all roles and its dispatcher, as in ``flashtune up``, tunes one job after another in a
process of its own. The first trials are warm-up: imports, pools, caches that fill up to their bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from db.store import Store
from tuner.job import JobRequest

WARM_UP, LIMIT_MB = 200, 20.0
HEADS = 39  # variants of a workload; its stock config makes it 40 trials
WORKER = """
import threading
from db.store import Store
from workers import embedded
from workers.settings import Settings
settings = Settings.from_env()
embedded.run(settings, Store.open(settings.database_url, lease_s=settings.lease_s), threading.Event())
"""
_EVERY = 10  # trials between two looks


@dataclass(frozen=True)
class Look:
    """Resident memory after so many trials, in MB."""

    trials: int
    worker_mb: float
    children_mb: float


def watch(folder: Path, trials: int) -> list[Look]:
    """Let a worker do so many trials, and look at it on the way."""
    (folder / "script.json").write_text(json.dumps({"objects": True, "noise": {"sigma": 0.002}}))
    url = f"sqlite:///{folder}/memory.db"
    env = {k: v for k, v in os.environ.items() if not k.startswith("FLASHTUNE_")} | {
        "FLASHTUNE_HOME": str(folder),
        "FLASHTUNE_DATABASE_URL": url,
        "FLASHTUNE_FAKE_SCRIPT": str(folder / "script.json"),
        "FLASHTUNE_COMPILE_WORKERS": "2",
        "FLASHTUNE_TICK_S": "0.2",
    }
    looks: list[Look] = []
    with Store.open(url) as store, (folder / "worker.log").open("wb") as log:
        job, _ = store.jobs.submit(_job(-(-trials // (HEADS + 1))))
        process = subprocess.Popen([sys.executable, "-c", WORKER], env=env, stdout=log, stderr=log)
        try:
            while not looks or looks[-1].trials < trials:
                if process.poll() is not None:
                    raise RuntimeError(f"the worker ended: {(folder / 'worker.log').read_text()[-2000:]}")
                done = sum(item.trials for item in store.jobs.get(job.id).items)
                if not looks or done >= min(looks[-1].trials + _EVERY, trials):
                    looks.append(Look(done, *_resident_mb(process.pid)))
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
    return looks


def growth_mb(looks: list[Look], warm_up: int) -> dict[str, float]:
    """Return the growth after the warm-up in MB, by a line through all looks, which one look cannot move."""
    after = [k for k in looks if k.trials >= warm_up]
    span = after[-1].trials - after[0].trials
    return {
        "trials": span,
        "worker_mb": round(span * _slope([(k.trials, k.worker_mb) for k in after]), 2),
        "children_mb": round(span * _slope([(k.trials, k.children_mb) for k in after]), 2),
    }


def _slope(points: list[tuple[int, float]]) -> float:
    mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def _job(workloads: int) -> JobRequest:
    shape = {"heads_q": HEADS, "heads_kv": 1, "seqlen_k": 16, "head_dim": 8, "batch": 1}
    return JobRequest.from_dict(
        {
            "arch": "fake",
            "settings": {"max_trials": HEADS},
            "workloads": [{**shape, "seqlen_q": 1 + n} for n in range(workloads)],
        }
    )


def _resident_mb(pid: int) -> tuple[float, float]:
    """Return what a process and what its children, and theirs, have in memory."""
    mine, children, todo = _statm_mb(pid), 0.0, _children(pid)
    while todo:
        child = todo.pop()
        children += _statm_mb(child)
        todo += _children(child)
    return mine, children


def _statm_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, IndexError):
        return 0.0


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(p) for task in tasks for p in (task / "children").read_text().split()]
    except OSError:
        return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000, help="after the warm-up")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        looks = watch(Path(folder), WARM_UP + args.trials)
    growth = growth_mb(looks, WARM_UP)
    good = growth["worker_mb"] < LIMIT_MB and growth["children_mb"] < LIMIT_MB
    document: dict[str, Any] = {
        "program": "benchmarks/memory.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("optuna", "sqlalchemy", "numpy")},
        },
        "seconds": round(time.monotonic() - start, 1),
        "warm_up": WARM_UP,
        "limit_mb": LIMIT_MB,
        "growth": growth,
        "met": good,
        "looks": [vars(k) for k in looks],
    }
    for look in looks[:: max(1, len(looks) // 20)]:
        print(f"{look.trials:6} trials  worker {look.worker_mb:7.1f} MB  children {look.children_mb:7.1f} MB")
    print(f"growth over {growth['trials']} trials: {growth}; {'met' if good else 'NOT MET'}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
