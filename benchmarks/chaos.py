"""Is anything lost when processes are killed? A job of fake trials, under SIGKILL of whatever runs.

    python benchmarks/chaos.py --database sqlite --kills 100
    python benchmarks/chaos.py --database postgresql --kills 100 --purge 2 --stop-past-lease
    python benchmarks/chaos.py --database postgresql --kills 0 --power-off --lease-s 45
    python benchmarks/chaos.py --database postgresql --kills 0 --outage rabbitmq   # stops the server for 30 s

Runs the job once in peace and once under fire, on a database of its own, following it over HTTP
all the while. Every kind of process is killed as often as the others, at random moments. A piece of
work that two workers or two children died with is spared a third: that many deaths are a verdict, and
the killer is us.
Exits 1 if a trial is lost, doubled, or blamed for what it did not do, or if the winner changed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kombu import Connection as Broker

from api.service_http import HttpService
from benchmarks.chaos_checks import Result, Script, look, reading, rows
from benchmarks.chaos_site import LEASE_S, TICK_S, Site, Unit, installation, rabbitmqctl
from tuner.errors import FlashtuneError
from tuner.job import JobRequest

KINDS = {
    "sqlite": ("up", "measuring child", "compiling child"),
    "postgresql": ("worker", "pool child", "measuring child", "compiling child", "dispatcher", "api"),
}
OUTCOMES: dict[str, dict[str, Any]] = {
    "1": {"does": "nan"},
    "2": {"does": "compile_error"},
    "4": {"does": "compile_abort"},
    "5": {"does": "fault"},
    "6": {"does": "run_error"},
}
SPARED_DEATHS = 2
OUTAGE_S = 30.0
RESUMED_WITHIN_S = 70.0  # with the default lease, of 45 s
_STAGES = {"measuring child": "measure", "compiling child": "compile"}
_HELD = (
    "SELECT w.id, w.epoch, w.stage, w.begun, w.deaths, k.pid FROM work w "
    "JOIN workers k ON k.id = w.worker_id WHERE w.state = 'leased'"
)
_POLL_S = 0.05
_REFUSED = "was taken back from this worker"  # what the log says of a StaleClaim
PACKAGES = ("celery", "kombu", "optuna", "sqlalchemy", "psycopg")


def script_of(trials: int, *, workloads: int = 4, sample_s: float = 0.01, compile_s: float = 0.05) -> Script:
    """Return a job of so many trials: workloads of different sizes, the last variant of each its winner."""
    sizes = [(trials - workloads) // workloads + 2 * n - workloads + 1 for n in range(workloads)]
    sizes[-1] += trials - workloads - sum(sizes)
    winners = {str(n - 1): {"speedup": 1.2 * 1.1**i} for i, n in enumerate(sizes)}
    return Script(tuple(sizes), OUTCOMES | winners, compile_s, sample_s)


@dataclass
class Tally:
    """What was done to an installation, and how fast its work went on."""

    kills: Counter[str] = field(default_factory=Counter)
    purges: int = 0
    returned_s: list[float] = field(default_factory=list)  # from a kill until its work was taken from the dead
    resumed_s: list[float] = field(default_factory=list)  # ... until another lease was given, or it was done
    stale: int = 0  # commits that were refused


class Follower(threading.Thread):
    """A client that follows a job over HTTP, whatever happens to the server."""

    def __init__(self, url: str, job_id: str) -> None:
        super().__init__(daemon=True)
        self._url, self._job_id = url, job_id
        self.events: list[dict[str, Any]] = []
        self.error = ""

    def run(self) -> None:
        try:
            self.events.extend(HttpService(self._url).events(self._job_id))
        except FlashtuneError as e:
            self.error = str(e)


class Run:
    """One job on one installation, from its submission to its end."""

    def __init__(self, site: Site, script: Script, timeout_s: float) -> None:
        self.site, self.script, self.tally = site, script, Tally()
        self._deadline = time.monotonic() + timeout_s
        self._child_kills: Counter[int] = Counter()  # by work id
        self.watched: dict[int, tuple[int, float, bool]] = {}  # work id: its epoch when killed, when, returned
        self._until(self._reachable, "the API answers")
        job, _ = HttpService(site.url).submit(JobRequest.from_dict(script.request()))
        self.job_id = job["id"]
        self.follower = Follower(site.url, self.job_id)
        self.follower.start()
        self._database = reading(site.database_url)
        self._connection = self._database.__enter__()

    def query(self, sql: str, **values: Any) -> list[dict[str, Any]]:
        """Ask the database, again if it is away."""
        while True:
            try:
                found = rows(self._connection, sql, **values)
                self._connection.rollback()
                return found
            except Exception:
                if time.monotonic() > self._deadline:
                    raise
                self.pause(0.5)
                self._connection = self._connection.engine.connect()

    def pause(self, seconds: float) -> None:
        """Let time go by; what dies meanwhile is started again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.site.tend()
            time.sleep(_POLL_S)

    @property
    def ended(self) -> bool:
        """Look at the job once; raises TimeoutError when it takes too long."""
        if time.monotonic() > self._deadline:
            left = self.query("SELECT kind, stage, state, attempts, deaths FROM work WHERE state <> 'done'")
            raise TimeoutError(f"the job has not ended; left: {left}; see {self.site.folder}")
        self.site.tend()
        self._watch()
        found = self.query("SELECT state FROM jobs WHERE id = :job", job=self.job_id)
        return bool(found) and found[0]["state"] in ("done", "failed", "cancelled")

    def wait(self) -> None:
        while not self.ended:
            time.sleep(_POLL_S)

    def kill(self, kind: str, rng: random.Random) -> bool:
        """Kill one process of a kind, unless none runs or its work was killed twice already."""
        found = self.site.processes(kind)
        if not found:
            return False
        unit, pid = rng.choice(found)
        pids = self.site.pids(unit)
        held = [work for work in self.query(_HELD) if work["pid"] in pids]
        if kind in _STAGES:
            held = [work for work in held if work["stage"] == _STAGES[kind]]
            spared = any(self._child_kills[work["id"]] >= SPARED_DEATHS for work in held)
            self._child_kills.update(work["id"] for work in held if not spared)
        else:
            spared = any(work["deaths"] >= SPARED_DEATHS for work in held)
        if spared:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended by itself meanwhile
            return False
        self.tally.kills[kind] += 1
        for work in held if kind not in _STAGES else ():
            self.watch(work)
        return True

    def result(self) -> Result:
        """Check what is there now that the job has ended."""
        self.follower.join(timeout=30)
        result = look(self.site.database_url, self.job_id, self.script, self.follower.events)
        if self.follower.error or self.follower.is_alive():
            result.faults.append(f"the follower did not come to the end: {self.follower.error or 'it still waits'}")
        self.tally.stale = self.site.log_text().count(_REFUSED)
        return result

    def close(self) -> None:
        self._database.__exit__(None, None, None)

    def watch(self, work: dict[str, Any]) -> None:
        """Measure from now on when a piece of work goes on, whose worker was just killed."""
        self.watched[work["id"]] = (work["epoch"], time.monotonic(), False)

    def _watch(self) -> None:
        """Note when the work of the killed goes on."""
        if not self.watched:
            return
        now = time.monotonic()
        for row in self.query("SELECT id, epoch, state FROM work"):
            if row["id"] not in self.watched:
                continue
            epoch, since, returned = self.watched[row["id"]]
            if row["epoch"] == epoch and row["state"] == "done":  # it was committed just before the kill
                del self.watched[row["id"]]
                continue
            again = row["epoch"] > epoch
            if not returned and (again or row["state"] != "leased"):
                self.tally.returned_s.append(now - since)
                self.watched[row["id"]] = (epoch, since, True)
            if again:
                self.tally.resumed_s.append(now - since)
                del self.watched[row["id"]]

    def _reachable(self) -> bool:
        try:
            HttpService(self.site.url).jobs(limit=1)
            return True
        except FlashtuneError:
            return False

    def _until(self, true: Callable[[], bool], what: str) -> None:
        while not true():
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"waited in vain until {what}; see {self.site.folder}")
            self.pause(0.1)


def harass(run: Run, kinds: tuple[str, ...], kills: int, rng: random.Random, every_s: float, purges: int = 0) -> None:
    """Kill so many processes at random moments, of each kind as many; purge the queues on the way."""
    bag = [kinds[i % len(kinds)] for i in range(kills)]
    rng.shuffle(bag)
    purge_at = {(i + 1) * kills // (purges + 1) for i in range(purges)}
    due = time.monotonic() + rng.uniform(0, 2 * every_s)
    while bag and not run.ended:
        if time.monotonic() > due and run.kill(bag[-1], rng):
            bag.pop()
            due = time.monotonic() + rng.uniform(0.2 * every_s, 1.8 * every_s)
            if len(bag) in purge_at:
                purge(run)
            if len(bag) % 10 == 0:
                done = run.query("SELECT count(*) AS n FROM trials")[0]["n"]
                print(f"  {sum(run.tally.kills.values())} kills, {done} of {run.script.trials} trials", flush=True)
        time.sleep(_POLL_S)


def purge(run: Run) -> None:
    """Throw every message away that waits in the broker."""
    assert run.site.broker_url is not None
    vhost = run.site.broker_url.rsplit("/", 1)[1]
    with Broker(run.site.broker_url) as broker, broker.channel() as channel:
        for queue in rabbitmqctl("list_queues", "-p", vhost, "--no-table-headers", "name").split():
            channel.queue_purge(queue)
    run.tally.purges += 1


def stop_past_lease(run: Run) -> int:
    """Stop a worker that measures until its work was taken back, then let it go on; return the refused commits."""
    before = run.site.log_text().count(_REFUSED)
    for unit, held in _measuring(run):
        run.site.signal_unit(unit, signal.SIGSTOP)
        try:
            taken = _taken(run, held, for_s=LEASE_S + 10 * TICK_S)
        finally:
            run.site.signal_unit(unit, signal.SIGCONT)
        if taken:
            run.pause(2.0)
            return run.site.log_text().count(_REFUSED) - before
    return 0


def power_off(run: Run, for_s: float) -> dict[str, float]:
    """End a worker that measures, for good; return after how many seconds its work was had back, and begun elsewhere.

    What a worker died with goes behind everything else of its study, so the second takes as long as that.
    """
    for unit, held in _measuring(run):
        unit.off = True
        run.site.end(unit)
        run.watch(held)
        start = time.monotonic()
        while run.watched and time.monotonic() - start < for_s and not run.ended:
            time.sleep(_POLL_S)
        unit.off = False
        if run.tally.returned_s:  # else it had been committed before the end
            return {"taken_back": run.tally.returned_s.pop(), "begun_elsewhere": run.tally.resumed_s.pop()}
    return {}


def _measuring(run: Run) -> Iterator[tuple[Unit, dict[str, Any]]]:
    """Give a unit that measures something now, and what, until the job has ended."""
    query = f"{_HELD} AND w.stage = 'measure' AND w.begun AND w.deaths = 0"
    while not run.ended:
        for held in run.query(query):
            unit = _unit_of(run.site, held["pid"])
            if unit is not None:
                yield unit, held


def _unit_of(site: Site, pid: int) -> Unit | None:
    for kind in ("up", "worker", "pool child"):
        for unit, found in site.processes(kind):
            if found == pid:
                return unit
    return None


def _taken(run: Run, held: dict[str, Any], for_s: float) -> bool:
    """Wait until work has another lease, or was done under one."""
    until = time.monotonic() + for_s
    while time.monotonic() < until and not run.ended:
        now = run.query("SELECT epoch, state, worker_id FROM work WHERE id = :id", id=held["id"])[0]
        if now["epoch"] > held["epoch"]:
            return True
        if now["state"] == "done":  # it had committed before it was stopped
            return False
        time.sleep(_POLL_S)
    return False


def outage(run: Run, service: str) -> None:
    """Stop a server for a while; it is started again whatever happens."""
    commands = {
        "postgresql": (
            ["pg_ctlcluster", "--skip-systemctl-redirect", "15", "main", "stop", "-m", "fast"],
            ["pg_ctlcluster", "--skip-systemctl-redirect", "15", "main", "start"],
        ),
        "rabbitmq": (["rabbitmqctl", "-q", "stop_app"], ["rabbitmqctl", "-q", "start_app"]),
    }
    stop, start = commands[service]
    print(f"  {service} is stopped for {OUTAGE_S:.0f} s", flush=True)
    try:
        subprocess.run(stop, check=True)
        run.pause(OUTAGE_S)
    finally:
        subprocess.run(start, check=True)
    print(f"  {service} is back", flush=True)


def peace(database: str, script: Script, folder: Path, timeout_s: float = 600) -> tuple[Result, float]:
    """Run the job without any kill; return what it left and how many seconds it took."""
    with installation(database, folder, script.document()) as site:
        run = Run(site, script, timeout_s)
        start = time.monotonic()
        run.wait()
        took = time.monotonic() - start
        result = run.result()
        run.close()
    return result, took


def main() -> int:
    args = _arguments()
    folder = Path(args.keep or tempfile.mkdtemp(prefix="flashtune-chaos-"))
    rng = random.Random(args.seed)
    script = script_of(args.trials, sample_s=args.sample_s)
    calm, calm_s = peace(args.database, script, folder / "peace", args.timeout_s)
    print(f"in peace: {calm.trials} trials, winners {calm.winners}, {calm_s:.1f} s; faults: {calm.faults}", flush=True)
    refused, gone = None, {}
    second = args.stop_past_lease or args.power_off
    with installation(args.database, folder / "chaos", script.document(), lease_s=args.lease_s, second=second) as site:
        run = Run(site, script, args.timeout_s)
        start = time.monotonic()
        if args.outage:
            run.pause(3)
            outage(run, args.outage)
        if args.stop_past_lease:
            refused = stop_past_lease(run)
        if args.power_off:
            gone = power_off(run, for_s=4 * RESUMED_WITHIN_S)
        harass(run, KINDS[args.database], args.kills, rng, args.every_s, args.purge)
        run.wait()
        took = time.monotonic() - start
        result, tally = run.result(), run.tally
        restarts = {unit.name: unit.starts - 1 for unit in site.units}
        run.close()
    faults = [*calm.faults, *result.faults]
    if calm.winners != result.winners:
        faults.append(f"in peace the winners were {calm.winners}, under fire {result.winners}")
    if (made := sum(tally.kills.values())) < args.kills:
        faults.append(f"the job ended after {made} kills; raise --sample-s")
    if args.power_off and gone.get("taken_back", RESUMED_WITHIN_S) >= RESUMED_WITHIN_S:
        faults.append(f"the work of the worker that was gone was not had back within {RESUMED_WITHIN_S:.0f} s: {gone}")
    if refused == 0:
        faults.append("the stopped worker's commit was not refused")
    document = {
        "program": "benchmarks/chaos.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": {k: v for k, v in vars(args).items() if k not in ("out", "keep")},
        "machine": _machine(),
        "seconds": {"in_peace": round(calm_s, 1), "under_fire": round(took, 1)},
        "trials": result.trials,
        "winners": result.winners,
        "kills": dict(tally.kills),
        "kills_in_all": made,
        "restarts": restarts,
        "purges": tally.purges,
        "deaths_with_work_begun": result.deaths,
        "commits_refused_as_stale": tally.stale,
        "taken_back_s": _summary(tally.returned_s),
        "resumed_s": _summary(tally.resumed_s),
        "powered_off_s": {name: round(s, 1) for name, s in gone.items()},
        "faults": faults,
    }
    _print(document)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=2) + "\n")
    print("NOTHING LOST" if not faults else f"{len(faults)} FAULTS; see {folder}")
    return 1 if faults else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=tuple(KINDS), required=True)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--purge", type=int, default=0, help="how often to purge the broker's queues")
    parser.add_argument("--stop-past-lease", action="store_true", help="stop a worker until its work is taken back")
    parser.add_argument("--power-off", action="store_true", help="end a worker for good; use with --lease-s 45")
    parser.add_argument("--outage", choices=("postgresql", "rabbitmq"), help=f"stop it for {OUTAGE_S:.0f} s; as root")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-s", type=float, default=0.8, help="mean time between two kills")
    parser.add_argument("--sample-s", type=float, default=0.01, help="time of one sample; a trial takes 30")
    parser.add_argument("--lease-s", type=float, default=LEASE_S)
    parser.add_argument("--timeout-s", type=float, default=1200.0)
    parser.add_argument("--keep", type=Path, help="folder for the databases and logs")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    if args.database == "sqlite" and (args.purge or args.outage):
        parser.error("--purge and --outage are for --database postgresql: embedded, there is no server")
    if args.keep and args.keep.exists():
        parser.error(f"--keep {args.keep} is there already; name a new folder")
    return args


def _summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {"count": 0}
    return {
        "count": len(values),
        "median": round(statistics.median(values), 2),
        "max": round(max(values), 2),
    }


def _machine() -> dict[str, Any]:
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    return {
        "cpu": model.partition(": ")[2] or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def _print(document: dict[str, Any]) -> None:
    for key in (
        "seconds", "trials", "winners", "kills", "restarts", "purges", "deaths_with_work_begun",
        "commits_refused_as_stale", "taken_back_s", "resumed_s", "powered_off_s",
    ):  # fmt: skip
        print(f"{key:26} {document[key]}")
    for fault in document["faults"]:
        print(f"FAULT {fault[:400]}")


if __name__ == "__main__":
    sys.exit(main())
