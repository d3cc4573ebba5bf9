"""Child processes that may hang, crash or eat memory, and a parent that survives it.

A ``Child`` runs one of this package's ``_*_child.py`` scripts in its own process group and talks to
it in JSON lines over two pipes of its own, since libraries print to standard output as they please.
Used by ``compile`` and ``sandbox``; knows nothing of what the requests mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tuner.errors import MachineError

_POLL_S = 0.1  # how often deadline and memory are looked at
_LOG_TAIL_BYTES = 4000
_OTHERS_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # no fault of code sends these
KILLS = 3  # children that may be killed over one request before the request is blamed


class ChildFailure(Exception):
    """A request was not answered. ``kind`` is crash, killed, timeout or memory; the text says what was seen.

    ``killed`` means that somebody else sent a signal, an operator, a service manager or the kernel when
    memory ran out: that says nothing about the request.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Child:
    """One supervised process, started on the first request and again after a failure.

    Not for use by several threads at once.
    """

    def __init__(self, script: str, env: Mapping[str, str], log: Path, preload: str = "") -> None:
        """Name the script; ``preload`` is a module that it imports before its first request."""
        self._preload = preload
        self._script = Path(__file__).with_name(script)
        self._env = {**env}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._to: int = -1
        self._from: int = -1
        self._buffer = b""
        self.starts = 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def request(
        self,
        message: Mapping[str, Any],
        *,
        timeout_s: float,
        memory_bytes: int | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        start: bool = True,
    ) -> dict[str, Any]:
        """Send one message and return its answer.

        Messages from the child with an ``event`` field go to ``on_event`` and renew the deadline. Without
        ``start`` the message is for the child that runs, and for no other.

        Raises:
            ChildFailure: if the child died, missed the deadline or exceeded its memory; the child
                is gone then, and the next request starts another.
        """
        if not self.running:
            if not start:
                raise self._failure("killed", "was gone before it was asked")
            self.start()
        try:
            os.write(self._to, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise self._failure(*self._how_it_ended()) from None
        deadline = time.monotonic() + timeout_s
        while True:
            line = self._read_line()
            if line is not None:
                answer: dict[str, Any] = json.loads(line)
                if "event" not in answer:
                    return answer
                if on_event:
                    on_event(answer)
                deadline = time.monotonic() + timeout_s
                continue
            if memory_bytes is not None and (used := self._memory_bytes()) > memory_bytes:
                raise self._failure("memory", f"used {used >> 20} MiB of memory, {memory_bytes >> 20} MiB are allowed")
            if time.monotonic() > deadline:
                raise self._failure("timeout", f"no answer after {timeout_s:g} s; killed")

    def kill(self) -> None:
        """End the child and everything it started, now."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for fd in (self._to, self._from):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._buffer = b""

    def start(self) -> None:
        """Start the child now, so that its imports are done when the first request comes."""
        self.kill()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        child_reads, self._to = os.pipe()
        self._from, child_writes = os.pipe()
        try:
            with self._log.open("wb") as log:
                arguments = [child_reads, child_writes, os.getpid(), self._preload]
                self._process = subprocess.Popen(
                    # -P keeps the working directory off sys.path: a user's own db/ or api/ must not shadow ours
                    [sys.executable, "-P", str(self._script), *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._env},
                    cwd=self._log.parent,
                    pass_fds=(child_reads, child_writes),
                    start_new_session=True,
                )
        except OSError as e:
            raise MachineError(f"cannot start {self._script.name}: {e}; see `flashtune doctor`") from e
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self.starts += 1

    def _read_line(self) -> bytes | None:
        """Return a whole line if one comes within the polling time, else None."""
        if b"\n" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], _POLL_S)
            if not ready:
                return None
            data = os.read(self._from, 1 << 20)
            if not data:
                raise self._failure(*self._how_it_ended())
            self._buffer += data
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        return line

    def _how_it_ended(self) -> tuple[str, str]:
        process = self._process
        assert process is not None
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "crash", "closed its pipe and did not exit"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return "killed" if -code in _OTHERS_SIGNALS else "crash", f"died of {name}"
        return "crash", f"exited with status {code}"

    def _failure(self, kind: str, text: str) -> ChildFailure:
        self.kill()
        tail = self.log_tail()
        return ChildFailure(kind, f"{text}\n{tail}" if tail else text)

    def log_tail(self) -> str:
        """Return the end of what the child printed."""
        try:
            return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""

    def _memory_bytes(self) -> int:
        """Resident memory of the child and its descendants."""
        total, todo, page = 0, [self.pid], os.sysconf("SC_PAGE_SIZE")
        while todo:
            pid = todo.pop()
            with contextlib.suppress(OSError, ValueError, IndexError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
                for task in os.listdir(f"/proc/{pid}/task"):
                    todo += [int(p) for p in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
        return total
