"""How many trials a second the database keeps the books of: claimed, begun, committed with 40 samples.

    python benchmarks/bookkeeping.py --out result.json
    python benchmarks/bookkeeping.py --seconds 5 --only flashtune --workers 8

Each worker is a process. Beside it, in the same run and on the same databases, what Optuna's own
storages need for a trial of eight parameters: ask and tell. PostgreSQL is that of
FLASHTUNE_TEST_POSTGRES, in a schema of its own that is dropped at the end; SQLite and Optuna's journal are
files in ``--dir``, which should be on the disk in question and not in memory. Writes the count of
every second.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing as mp
import os
import platform
import sqlite3
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from db.planning import NewWork
from db.store import Store
from tuner.config import Config
from tuner.job import JobRequest
from tuner.spec import StudySpec
from tuner.target import Toolchain, named
from tuner.trial import Measurement, Resources, Trial, TrialStatus, Verification

POSTGRES = os.environ.get("FLASHTUNE_TEST_POSTGRES", "postgresql+psycopg://127.0.0.1:5432/test")
CLASS = "bench.measure"
CONFIGS = 2000  # a study
TARGETS = {"flashtune on postgresql, 8 workers": 500, "flashtune on sqlite, 8 workers": 300}
SAMPLES = tuple(812.0 + 0.37 * i for i in range(40))  # microseconds
PARAMETERS = 8

Step = Callable[[], object]
Start = Callable[[str, str], Step]


def config(number: int) -> Config:
    return Config.make("fake", 1, tile_m=128, tile_n=64, num_stages=2, pack_gqa=True, num_splits=1, variant=number)


def flashtune_prepare(url: str, studies: int) -> None:
    """Submit a job and plan more work than the run can do."""
    workloads = [
        {"name": str(n), "batch": n, "heads_q": 8, "heads_kv": 8, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64}
        for n in range(1, studies + 1)
    ]
    with Store.open(url) as store:
        store.jobs.submit(JobRequest.from_dict({"arch": "fake", "workloads": workloads}))
        for item in store.planning.waiting(studies):
            spec = StudySpec(item.workload, named("fake"), Toolchain(), "graph", ("fake/1",))
            study = store.planning.bind(item.id, spec, CLASS, "")
            assert study is not None
            work = [NewWork(config(n), "measure", 0) for n in range(CONFIGS)]
            assert store.planning.plan(study, store.planning.planned(study).guard, work)


def flashtune_step(url: str, worker: str) -> Step:
    """Return what a measuring worker asks of the database for one trial."""
    store, opened = Store.open(url), [""]
    measured = Measurement("graph", SAMPLES, SAMPLES[::-1], 1.02, 819.2)
    checked = Verification(1.2e-3, 4e-3, 1.1e-3, 4e-3, 3, 1 << 60, True)

    def step() -> None:
        (claim,) = store.work.claim(worker, stage="measure", keys=[CLASS], open_studies=opened, begin=True)
        opened[0] = claim.study_id
        assert claim.config is not None
        resources = Resources(168, 0, 227 << 10, 9000)
        trial = Trial(claim.config, TrialStatus.OK, "", 4.2, 0.8, resources, checked, measured)
        store.work.commit_trial(claim, trial, 0.8)

    return step


def optuna_storage(place: str) -> Any:
    import optuna

    if place.startswith("journal:"):
        from optuna.storages.journal import JournalFileBackend

        return optuna.storages.JournalStorage(JournalFileBackend(place.removeprefix("journal:")))
    return optuna.storages.RDBStorage(place)


def optuna_prepare(place: str, _: int) -> None:
    import optuna

    optuna.create_study(storage=optuna_storage(place), study_name="bench")


def optuna_step(place: str, worker: str) -> Step:
    """Return one trial of Optuna's: ask, eight parameters drawn at random, tell."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.RandomSampler(seed=hash(worker) % 1000)
    study = optuna.load_study(study_name="bench", storage=optuna_storage(place), sampler=sampler)

    def step() -> None:
        trial = study.ask()
        value = sum(trial.suggest_int(f"p{n}", 0, 15) for n in range(PARAMETERS))
        study.tell(trial, value)

    return step


def worker_main(start: Start, place: str, number: int, seconds: float, ready: Any, go: Any, results: Any) -> None:
    """Take steps until the time is up; hand back how many in each second, and the CPU time."""
    step = start(place, f"w{number}")
    step()  # connections and statements are made here
    counts: Counter[int] = Counter()
    ready.release()
    go.wait()
    begun, cpu = time.monotonic(), time.process_time()
    while (now := time.monotonic() - begun) < seconds:
        step()
        counts[int(now)] += 1
    results.put((dict(counts), time.process_time() - cpu))


def run(start: Start, place: str, workers: int, seconds: float) -> dict[str, Any]:
    """Run one contender; return its trials a second."""
    spawn = mp.get_context("spawn")
    ready, go, results = spawn.Semaphore(0), spawn.Event(), spawn.Queue()
    processes = [
        spawn.Process(target=worker_main, args=(start, place, n, seconds, ready, go, results)) for n in range(workers)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        if not ready.acquire(timeout=120):
            raise SystemExit("a worker did not come up within 120 s")
    go.set()
    found = [results.get(timeout=seconds + 120) for _ in processes]
    for process in processes:
        process.join()
    total: Counter[int] = sum((Counter(counts) for counts, _ in found), Counter())
    trials = sum(total.values())
    return {
        "trials": trials,
        "per_second": trials / seconds,
        "client_cpu_ms_per_trial": 1000 * sum(cpu for _, cpu in found) / max(trials, 1),
        "each_second": [total[n] for n in range(int(seconds))],
    }


class Places:
    """Databases that are made for one contender each and dropped at the end."""

    def __init__(self, folder: Path, postgres: str) -> None:
        self._folder, self._postgres, self._schemas = folder, postgres, list[str]()

    def make(self, kind: str) -> str:
        name = f"bench_{uuid.uuid4().hex}"
        if kind == "postgresql":
            self._ask(f"CREATE SCHEMA {name}")
            self._schemas.append(name)
            return f"{self._postgres}?options=-csearch_path%3D{name}"
        path = self._folder / name
        return f"journal:{path}" if kind == "journal" else f"sqlite:///{path}.db"

    def drop(self) -> None:
        for name in self._schemas:
            self._ask(f"DROP SCHEMA {name} CASCADE")

    def version(self) -> str:
        return str(self._ask("SHOW server_version"))

    def _ask(self, statement: str) -> object:
        import psycopg

        with psycopg.connect(self._postgres.replace("+psycopg", ""), autocommit=True) as connection:
            asked = connection.execute(statement)  # type: ignore[call-overload]
            return asked.fetchone()[0] if asked.description else None


CONTENDERS: dict[str, tuple[str, Callable[[str, int], None], Start]] = {
    "flashtune on postgresql": ("postgresql", flashtune_prepare, flashtune_step),
    "flashtune on sqlite": ("sqlite", flashtune_prepare, flashtune_step),
    "optuna RDBStorage on postgresql": ("postgresql", optuna_prepare, optuna_step),
    "optuna RDBStorage on sqlite": ("sqlite", optuna_prepare, optuna_step),
    "optuna JournalStorage": ("journal", optuna_prepare, optuna_step),
}


def machine(places: Places) -> dict[str, Any]:
    """Say what it ran on."""
    packages = ("sqlalchemy", "psycopg", "optuna")
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "load_average_before": os.getloadavg(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "postgresql": places.version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def main() -> int:
    """Run every contender with every number of workers; print a line each, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--studies", type=int, default=16, help="that flashtune's workers share")
    parser.add_argument("--only", default="", help="contenders whose name has this")
    parser.add_argument("--dir", type=Path, help="where the files lie; by default a temporary folder")
    parser.add_argument("--postgres", default=POSTGRES)
    parser.add_argument("--out", type=Path, help="where to write the results, JSON")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    missed = []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        places = Places(Path(folder), args.postgres)
        document = {"program": "benchmarks/bookkeeping.py", "date": time.strftime("%Y-%m-%d"), **machine(places)}
        try:
            for name, (kind, prepare, start) in CONTENDERS.items():
                for workers in args.workers if args.only in name else ():
                    print(f"{name}, {workers} workers ...", end=" ", flush=True)
                    place = places.make(kind)
                    prepare(place, args.studies)
                    result = run(start, place, workers, args.seconds)
                    results.append({"name": name, "workers": workers, "seconds": args.seconds, **result})
                    cpu = result["client_cpu_ms_per_trial"]
                    print(f"{result['per_second']:.1f} trials/s, {cpu:.2f} ms of CPU each", flush=True)
                    if result["per_second"] < TARGETS.get(f"{name}, {workers} workers", 0):
                        missed.append(f"{name}, {workers} workers")
        finally:
            places.drop()
    if args.out:
        args.out.write_text(json.dumps({**document, "results": results}, indent=1))
    for name in missed:
        print(f"missed: {name}: below {TARGETS[name]} trials/s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
