"""Is a SQLite database ever "locked" for somebody, with an API, four workers and 32 readers on it at once?

    python benchmarks/contention.py                  # 300 s
    python benchmarks/contention.py --seconds 5 --out result.json

The API's process submits jobs, lists and follows them, and dispatches as `flashtune up` does; each worker
is a process that claims, commits and beats; the readers are threads of four processes, each with a
connection of its own. Counts every call, its slowest, and what failed; exits 1 if any did.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from db.planning import NewWork
from db.store import Store
from db.values import Claim, WorkerInfo
from tuner.config import Config
from tuner.errors import FlashtuneError
from tuner.job import JobRequest
from tuner.spec import StudySpec
from tuner.target import Toolchain, named
from tuner.trial import Measurement, Trial, TrialStatus, TunedConfig, Verdict

WORKERS, READER_PROCESSES, READERS_EACH = 4, 4, 8
CLASS = "bench.measure"
CONFIGS = 24  # a study
SAMPLES = tuple(812.0 + 0.37 * i for i in range(40))
T = TypeVar("T")

_START_S = 120.0  # for all processes to import what they need


@dataclass
class Book:
    """What one process or thread did: calls by name, the slowest of each in seconds, errors by text."""

    calls: Counter[str] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)

    def timed(self, name: str, call: Callable[[], T]) -> T | None:
        """Make a call and book it; None if it failed."""
        begun = time.monotonic()
        try:
            return call()
        except FlashtuneError as e:
            self.errors[f"{name}: {type(e).__name__}: {e}"] += 1
            return None
        finally:
            self.calls[name] += 1
            self.slowest_s[name] = max(self.slowest_s.get(name, 0.0), time.monotonic() - begun)

    def add(self, other: Book) -> None:
        self.calls += other.calls
        self.errors += other.errors
        for name, seconds in other.slowest_s.items():
            self.slowest_s[name] = max(self.slowest_s.get(name, 0.0), seconds)


def request(number: int) -> JobRequest:
    base = {"heads_q": 8, "heads_kv": 8, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64}
    workloads = [{"name": f"w{n}", "batch": 2 * number + n + 1, **base} for n in range(2)]
    return JobRequest.from_dict({"arch": "fake", "workloads": workloads})


def api(url: str, until: float, book: Book) -> None:
    """Submit a job every now and then, answer what clients ask, and dispatch."""
    with Store.open(url) as store:
        cursor, number = "", 0
        while time.time() < until:
            if store.work.ready().get(("measure", CLASS), 0) < 4 * CONFIGS:
                asked = request(number)
                submitted = book.timed("submit", lambda: store.jobs.submit(asked, idempotency_key=f"k{number}"))  # noqa: B023
                number += submitted is not None
            dispatch(store, book)
            page = book.timed("jobs.list", lambda: store.jobs.list(limit=20))
            for job in page.items[:3] if page else ():
                book.timed("jobs.get", lambda: store.jobs.get(job.id))  # noqa: B023
            told = book.timed("events", lambda: store.jobs.events(after=cursor))  # noqa: B023
            cursor = told[-1].cursor if told else cursor
            time.sleep(0.02)


def dispatch(store: Store, book: Book) -> None:
    """Find studies for what waits and work for the studies, as a dispatcher does."""
    for item in book.timed("waiting", store.planning.waiting) or ():
        spec = StudySpec(item.workload, named("fake"), Toolchain(), "graph", ("fake/1",))
        book.timed("bind", lambda: store.planning.bind(item.id, spec, CLASS, ""))  # noqa: B023
    for study in book.timed("progress", store.planning.progress) or ():
        if store.planning.planned(study.id).open == 0:
            planned = store.planning.planned(study.id)
            first = planned.guard == 0
            work = [NewWork(Config.make("fake", 1, variant=n), "measure", 0) for n in range(CONFIGS if first else 0)]
            book.timed("plan", lambda: store.planning.plan(study.id, planned.guard, work, finals=not first))  # noqa: B023
    book.timed("account", store.planning.account)
    book.timed("reap", store.work.reap)


def work(url: str, name: str, until: float, book: Book) -> None:
    """Claim and commit; beat every second."""
    with Store.open(url) as store:
        now = datetime.now(UTC)
        info = WorkerInfo(name, "host", os.getpid(), ("measure",), CLASS, "", named("fake"), Toolchain(), now, now)
        book.timed("register", lambda: store.fleet.register(info))
        opened, beaten = [""], 0.0
        while time.time() < until:
            claims = book.timed(
                "claim",
                lambda: store.work.claim(name, stage="measure", keys=[CLASS], open_studies=opened, limit=2, begin=True),
            )
            for claim in claims or ():
                opened[0] = claim.study_id
                commit(store, book, claim)
            if time.time() - beaten > 1.0:
                beaten = time.time()
                book.timed("beat", lambda: store.fleet.beat(name, "measuring"))
            if not claims:
                time.sleep(0.01)


def commit(store: Store, book: Book, claim: Claim) -> None:
    if claim.config is None:
        book.timed("commit_finals", lambda: store.work.commit_finals(claim, answer(), {}))
        return
    measured = Measurement("graph", SAMPLES, SAMPLES[::-1], 1.02, 819.2)
    trial = Trial(claim.config, TrialStatus.OK, "", 4.2, 0.8, measurement=measured)
    book.timed("commit_trial", lambda: store.work.commit_trial(claim, trial, 0.8))


def answer() -> TunedConfig:
    winner, default = Config.make("fake", 1, variant=1), Config.make("fake", 1)
    return TunedConfig(winner, default, Verdict.PUBLISHED, 1.1, 1.05, 1.15, 0.95, 0.02, (), (), None, "faster", 20, 0)


def read(url: str, until: float, book: Book) -> None:
    """Look at everything, as people and dashboards do."""
    with Store.open(url, read_only=True) as store:
        while time.time() < until:
            jobs = book.timed("read jobs.list", lambda: store.jobs.list(limit=10))
            for job in jobs.items[:2] if jobs else ():
                book.timed("read jobs.get", lambda: store.jobs.get(job.id))  # noqa: B023
                book.timed("read events", lambda: store.jobs.events(job.id, limit=100))  # noqa: B023
            for call in (store.published, store.studies, store.work.ready, store.fleet.workers):
                book.timed(f"read {call.__name__}", call)
            time.sleep(0.05)


def read_in_threads(url: str, _: str, until: float, book: Book) -> None:
    books = [Book() for _ in range(READERS_EACH)]
    threads = [threading.Thread(target=read, args=(url, until, own)) for own in books]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in books:
        book.add(own)


def act(role: str, url: str, name: str, seconds: float, ready: Any, results: Any) -> None:
    """Play one part as a process, and hand back its book."""
    ready.wait(_START_S)
    until = time.time() + seconds
    book = Book()
    try:
        if role == "api":
            api(url, until, book)
        else:
            (work if role == "worker" else read_in_threads)(url, name, until, book)
    except Exception as e:  # whatever it is, it is a failure of this run
        book.errors[f"{role}: {type(e).__name__}: {e}"] += 1
    results.put(book)


def measure(folder: Path, seconds: float) -> Book:
    """Play all parts at once for some seconds; return what they booked."""
    url = f"sqlite:///{folder}/flashtune.db"
    Store.open(url).close()
    spawn = mp.get_context("spawn")
    results = spawn.Queue()
    roles = [("api", "api")]
    roles += [("worker", f"w{n}") for n in range(WORKERS)] + [("reader", f"r{n}") for n in range(READER_PROCESSES)]
    ready = spawn.Barrier(len(roles) + 1)
    processes = [spawn.Process(target=act, args=(role, url, name, seconds, ready, results)) for role, name in roles]
    for process in processes:
        process.start()
    ready.wait(_START_S)
    until = time.time() + seconds
    while (left := until - time.time()) > 0:
        print(f"\r{left:4.0f} s to go ", end="", file=sys.stderr, flush=True)
        time.sleep(min(1.0, left))
    print("\r             \r", end="", file=sys.stderr)
    whole = Book()
    for _ in processes:
        whole.add(results.get(timeout=120))
    for process in processes:
        process.join()
    return whole


def main() -> int:
    """Run it, print a line for each kind of call, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--dir", type=Path, help="where the database lies; by default a temporary folder")
    parser.add_argument("--out", type=Path, help="where to write the results, JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        book = measure(Path(folder), args.seconds)
    for name, count in sorted(book.calls.items()):
        print(f"{name:20} {count:8} calls, the slowest {book.slowest_s[name] * 1000:8.1f} ms")
    for text, count in book.errors.items():
        print(f"FAILED {count} times: {text}")
    slowest = max(book.slowest_s, key=lambda name: book.slowest_s[name], default="nothing")
    calls, errors = sum(book.calls.values()), sum(book.errors.values())
    print(f"{calls} calls, {errors} failed; the slowest, {slowest}, took {book.slowest_s.get(slowest, 0.0):.3f} s")
    if args.out:
        document = {
            "program": "benchmarks/contention.py",
            "date": time.strftime("%Y-%m-%d"),
            "seconds": args.seconds,
            "cores": os.cpu_count(),
            "sqlite": sqlite3.sqlite_version,
            "calls": dict(book.calls),
            "slowest_s": book.slowest_s,
            "errors": dict(book.errors),
        }
        args.out.write_text(json.dumps(document, indent=1))
    return 1 if errors or not calls else 0


if __name__ == "__main__":
    sys.exit(main())
