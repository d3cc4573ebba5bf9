"""One sitting at a GPU that is lent by the minute: tests, suite, exhaustive tables, each within its seconds.

    python benchmarks/gpu_session.py OUT --seconds 560 --step tests:90 --step suite
    python benchmarks/gpu_session.py OUT --seconds 560 --step suite --step verify:120 --resume session.tar.gz
    python benchmarks/gpu_session.py OUT --seconds 560 --step exhaustive --resume session.tar.gz

Steps run in the order given; one without seconds gets what is left. A step whose time is up is
interrupted as by Ctrl-C, then killed. After each step everything that a later sitting goes on from is
packed into ``OUT/session.tar.gz``: the database, results, tables and logs, but no compiled kernels.
``OUT/session.json`` says how each step ended. Exit code 1 if one failed; to run out of time is no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("tests", "suite", "verify", "exhaustive")
_GRACE_S = 20.0  # from the interrupt to the kill; also what a program is told to leave for writing
_PACK_S = 10.0  # kept back at the end
_LEAST_S = 5.0  # a step with less is not begun
_OUT_OF_TIME = 3  # exit code of suite.py and exhaustive.py


@dataclass(frozen=True)
class Ended:
    """How one step ended: ``state`` is done, failed, out of time, or not begun."""

    step: str
    state: str
    code: int | None
    seconds: float
    limit_s: float


def command(args: argparse.Namespace, step: str, seconds: float) -> list[str]:
    """Return a step's command line; ``seconds`` is what it may take."""
    out: Path = args.work
    own = shlex.split(getattr(args, f"{step}_args"))
    inner = f"{max(1.0, seconds - _GRACE_S):.0f}"
    if step == "tests":
        return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--durations=10", *(own or ["tests/gpu"])]
    if step == "verify":
        return [sys.executable, "-m", "api.cli", "verify", "--all", "--db", str(out / "suite.db"), *own]
    if step == "suite":
        program = [sys.executable, "benchmarks/suite.py", str(args.suite_file), "--db", str(out / "suite.db")]
        return [*program, "--out", str(out / "suite"), "--no-verify", "--seconds", inner, *own]
    program = [sys.executable, "benchmarks/exhaustive.py", str(args.exhaustive_file)]
    return [*program, "--out", str(out / "exhaustive"), "--seconds", inner, *own]


def run(args: argparse.Namespace, step: str, seconds: float) -> Ended:
    """Run a step for so many seconds at most; its output goes to a log of its own and to ours."""
    began = time.monotonic()
    log = args.work / f"{step}.log"
    with log.open("ab") as file:
        file.write(f"\n== {datetime.now(UTC).isoformat(timespec='seconds')}, {seconds:.0f} s\n".encode())
        file.flush()
        process = subprocess.Popen(
            command(args, step, seconds),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what it leaves behind can be killed with it
        )
        late = False
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
    print(f"== {step}\n{_tail(log)}", flush=True)
    late = late or (step in ("suite", "exhaustive") and process.returncode == _OUT_OF_TIME)
    state = "out of time" if late else "failed" if process.returncode else "done"
    return Ended(step, state, process.returncode, round(time.monotonic() - began, 1), round(seconds, 1))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt what runs still, wait, then kill it with all that it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def pack(work: Path, path: Path) -> None:
    """Pack a folder, databases as SQLite copies them while they are in use."""
    half = path.with_name(path.name + ".tmp")
    with tarfile.open(half, "w:gz", compresslevel=6) as tar:
        for file in sorted(p for p in work.rglob("*") if p.is_file()):
            name = str(file.relative_to(work))
            if file.suffix == ".db":
                copy = work.parent / f".{file.name}.copy"
                with contextlib.closing(sqlite3.connect(file)) as db, contextlib.closing(sqlite3.connect(copy)) as to:
                    db.backup(to)
                tar.add(copy, name)
                copy.unlink()
            elif not name.endswith(("-wal", "-shm", ".tmp")):
                tar.add(file, name)
    half.replace(path)


def main() -> int:
    """Run the steps, packing after each."""
    args = _arguments()
    deadline = time.monotonic() + args.seconds - _PACK_S
    for name in ("out", "suite_file", "exhaustive_file"):  # steps run in the folder of the programs
        setattr(args, name, getattr(args, name).absolute())
    args.out.mkdir(parents=True, exist_ok=True)
    args.work = args.out / "work"
    args.work.mkdir(exist_ok=True)
    if args.resume:
        with tarfile.open(args.resume) as tar:
            tar.extractall(args.work, filter="data")
    steps: list[Ended] = []
    for step, wanted in args.step:
        left = deadline - time.monotonic() - _GRACE_S
        limit = min(left, wanted) if wanted else left
        steps.append(run(args, step, limit) if limit >= _LEAST_S else Ended(step, "not begun", None, 0.0, 0.0))
        print(f"== {steps[-1]}", flush=True)
        document: dict[str, Any] = {"ended": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": args.seconds}
        (args.out / "session.json").write_text(json.dumps({**document, "steps": [asdict(s) for s in steps]}, indent=1))
        pack(args.work, args.out / "session.tar.gz")
    return 1 if any(s.state == "failed" for s in steps) else 0


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _step(text: str) -> tuple[str, float | None]:
    name, _, seconds = text.partition(":")
    if name not in STEPS:
        raise argparse.ArgumentTypeError(f"step is {name!r}; it must be one of {', '.join(STEPS)}")
    try:
        return name, float(seconds) if seconds else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"seconds of {name} are {seconds!r}; write a number, as {name}:90") from None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder of session.tar.gz and session.json")
    parser.add_argument("--seconds", type=float, required=True, help="of the whole sitting, packing included")
    parser.add_argument("--step", type=_step, action="append", required=True, help=f"NAME[:SECONDS], of {STEPS}")
    parser.add_argument("--resume", type=Path, help="the session.tar.gz of an earlier sitting")
    parser.add_argument("--suite-file", type=Path, default=ROOT / "examples" / "suite.toml")
    parser.add_argument("--exhaustive-file", type=Path, default=ROOT / "benchmarks" / "exhaustive.toml")
    for step in STEPS:
        parser.add_argument(f"--{step}-args", default="", help=f"more arguments of the step {step}, in one text")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
