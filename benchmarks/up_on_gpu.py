"""One machine, one GPU: `flashtune up` serves a job while its processes are killed.

Starts `flashtune up`, submits a workload file over HTTP from a second process and follows its events
with a third. On the way it kills the measuring child once and the whole worker process once, with SIGKILL, and
starts the worker again as a supervisor would. Then it checks from the database that nothing was lost
or doubled. Writes the follower's log, what was killed when, and the job.

    python benchmarks/up_on_gpu.py examples/h200.toml --out results/ [--device fake --fake-script s.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

FLASHTUNE = [sys.executable, "-m", "api.cli"]


class Up:
    """`flashtune up`, started again when it ends; its log is kept."""

    def __init__(self, env: dict[str, str], port: int, device: str, log: Path) -> None:
        self._env, self._log = env, log.open("a")
        self._command = [*FLASHTUNE, "up", "--port", str(port), "--device", device]
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, env=self._env, stdout=self._log, stderr=self._log)
        self.starts += 1

    def children(self) -> dict[str, int]:
        """Return the pids of its children by the script that they run."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                command = (stat.parent / "cmdline").read_text()
            except OSError:
                continue
            match = re.search(r"_(sandbox|compile)_child\.py", command)
            if match and parent == self.process.pid:
                found[match[1]] = int(stat.parent.name)
        return found


def main() -> None:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "FLASHTUNE_URL": f"http://127.0.0.1:{args.port}"}
    env |= {"FLASHTUNE_FAKE_SCRIPT": str(args.fake_script)} if args.fake_script else {}
    up = Up(env, args.port, args.device, args.out / "up.log")
    kills: list[dict[str, Any]] = []
    try:
        _wait_until_it_answers(env, up)
        submitted = _run(env, "submit", str(args.file), "--trials", str(args.trials), "--name", "up-on-gpu", "--json")
        job = json.loads(submitted)["id"]
        print(f"job {job} submitted", flush=True)
        start = time.monotonic()
        follower = subprocess.Popen(
            [*FLASHTUNE, "watch", job, "--json"], env=env, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert follower.stdout is not None
        events: list[dict[str, Any]] = []
        reader = threading.Thread(target=_follow, args=(follower.stdout, args.out / "events.ndjson", events, start))
        reader.start()
        _kill_on_the_way(up, events, kills, start, args)
        status = follower.wait(timeout=args.limit)
        reader.join()
        answer = json.loads(_run(env, "jobs", job, "--json"))
    finally:
        up.process.send_signal(signal.SIGTERM)
        up.process.wait(timeout=90)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "seconds": time.monotonic() - start,
        "kills": kills,
        "starts": up.starts,
        "follower_exit": status,
        "checks": _checks(events, answer),
        "job": answer,
    }
    (args.out / "up.json").write_text(json.dumps(report, indent=1))
    print(json.dumps({k: report[k] for k in ("seconds", "kills", "starts", "follower_exit", "checks")}, indent=1))
    sys.exit(0 if all(report["checks"].values()) else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--fake-script", type=Path)
    parser.add_argument("--limit", type=float, default=500, help="seconds for the job")
    parser.add_argument("--child-after", type=int, default=20, help="trials before the measuring child is killed")
    parser.add_argument("--worker-after", type=int, default=60, help="trials before the worker is killed")
    return parser.parse_args()


def _run(env: dict[str, str], *command: str) -> str:
    return subprocess.run([*FLASHTUNE, *command], env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def _wait_until_it_answers(env: dict[str, str], up: Up) -> None:
    for _ in range(60):
        if up.process.poll() is not None:
            sys.exit(f"`flashtune up` ended with status {up.process.returncode}; see its log")
        if subprocess.run([*FLASHTUNE, "jobs", "--json"], env=env, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(1)
    sys.exit("`flashtune up` did not answer within a minute")


def _follow(lines: IO[str], path: Path, events: list[dict[str, Any]], start: float) -> None:
    """Keep every event with the time at which it arrived; say what goes on."""
    with path.open("w") as file:
        for line in lines:
            event = json.loads(line)
            event["arrived_s"] = round(time.monotonic() - start, 3)
            file.write(json.dumps(event) + "\n")
            events.append(event)
            if event["kind"] != "trial":
                print(f"{event['arrived_s']:8.1f} s  {event['kind']}  {event['data'].get('name', '')}", flush=True)


def _kill_on_the_way(
    up: Up, events: list[dict[str, Any]], kills: list[dict[str, Any]], start: float, args: argparse.Namespace
) -> None:
    """Kill the measuring child, later the worker, each after a number of trials; note when work went on."""
    for what, after in (("measuring child", args.child_after), ("worker", args.worker_after)):
        while _trials(events) < after:
            if any(e["kind"] in ("done", "failed") for e in events):
                return
            time.sleep(0.05)
        pid = up.children().get("sandbox") if what == "measuring child" else up.process.pid
        if pid is None:
            continue
        before, at = _trials(events), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if what == "worker":
            up.process.wait()
            up.start()
        kills.append({"what": what, "pid": pid, "at_s": round(at - start, 2), "trials_before": before})
        while _trials(events) <= before + 1 and not any(e["kind"] in ("done", "failed") for e in events):
            time.sleep(0.05)
        kills[-1]["next_trial_after_s"] = round(time.monotonic() - at, 2)
        print(f"killed the {what}; the next trials came {kills[-1]['next_trial_after_s']} s later", flush=True)


def _trials(events: list[dict[str, Any]]) -> int:
    return sum(e["kind"] == "trial" for e in events)


def _checks(events: list[dict[str, Any]], job: dict[str, Any]) -> dict[str, bool]:
    """Look at the database itself: each config of each study ended exactly once, and was told once."""
    from workers.settings import Settings

    path = Settings.from_env().database_url.removeprefix("sqlite:///")
    studies = [i["study_id"] for i in job["items"]]
    marks = ",".join("?" * len(studies))
    with sqlite3.connect(path) as db:
        rows = db.execute(
            f"select study_id, config_key, state from work where study_id in ({marks})", studies
        ).fetchall()
        trials = db.execute(f"select study_id, config_key from trials where study_id in ({marks})", studies).fetchall()
    told = [(e["data"]["study"], e["data"]["family"], e["data"]["config"]) for e in events if e["kind"] == "trial"]
    planned = {(s, c) for s, c, _ in rows if c != "finals"}
    return {
        "job done": job["state"] == "done",
        "every workload has an answer": all(i["answer"] for i in job["items"]),
        "all work is done": all(state == "done" for _, _, state in rows),
        "every planned config is a trial, once": sorted(planned) == sorted(trials),
        "every trial was told, once": len(told) == len(set(told)) == len(trials),
        "no event came twice": len({e["cursor"] for e in events}) == len(events),
    }


if __name__ == "__main__":
    main()
