"""An installation to be damaged: its own database and broker, and processes that are started again when they die.

Embedded is ``flashtune up`` on SQLite. A fleet is an API, two dispatchers, two measuring workers and
two compiling ones on PostgreSQL and RabbitMQ. As with systemd, when the main process of a unit dies, so
does what it had started.

    with installation("sqlite", Path("/tmp/x"), script) as site:
        os.kill(site.processes("up")[0][1], signal.SIGKILL)
        site.tend()  # every moment: starts it again
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

POSTGRES = os.environ.get("FLASHTUNE_TEST_POSTGRES", "postgresql+psycopg://127.0.0.1:5432/test")
RABBITMQ = os.environ.get("FLASHTUNE_TEST_RABBITMQ", "127.0.0.1:5672")
FLASHTUNE = str(Path(sys.executable).with_name("flashtune"))
_WORKER = [sys.executable, "-P", "-m", "api.cli", "worker"]
LEASE_S, TICK_S = 3.0, 0.5
_RESTART_S = 0.2  # between a death and the next start
_MARK = "FLASHTUNE_CHAOS_UNIT"


@dataclass
class Unit:
    """One thing that a supervisor keeps running. ``starts`` counts how often it was started; ``off``: not now."""

    name: str
    kind: str
    command: list[str]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    died_at: float = 0.0
    off: bool = False


class Site:
    """The units of one installation. Use it in a with-block; ``tend`` it every moment."""

    def __init__(self, folder: Path, units: list[Unit], env: Mapping[str, str], port: int) -> None:
        self.folder, self.units, self.url = folder, units, f"http://127.0.0.1:{port}"
        self.database_url, self.broker_url = env["FLASHTUNE_DATABASE_URL"], env.get("FLASHTUNE_BROKER_URL")
        self._env = dict(env)
        self._logs: list[IO[bytes]] = []

    def __enter__(self) -> Site:
        for unit in self.units:
            self._start(unit)
        return self

    def __exit__(self, *_: object) -> None:
        for unit in self.units:
            self.end(unit)
        for log in self._logs:
            log.close()

    def tend(self) -> None:
        """Start what has died."""
        for unit in self.units:
            if unit.process is not None and unit.process.poll() is not None:
                unit.process, unit.died_at = None, time.monotonic()
                _kill_all(_marked(unit.mark))
            elif unit.process is None and not unit.off and time.monotonic() - unit.died_at > _RESTART_S:
                self._start(unit)

    def processes(self, kind: str) -> list[tuple[Unit, int]]:
        """Return what runs of a kind: a unit's kind, or ``measuring child``, ``compiling child``, ``pool child``."""
        found = []
        for unit in self.units:
            main = unit.process.pid if unit.process else -1
            for pid in _marked(unit.mark):
                what = unit.kind if pid == main else _kind_of_child(pid)
                if what == kind:
                    found.append((unit, pid))
        return found

    def pids(self, unit: Unit) -> list[int]:
        """Return every process of a unit."""
        return _marked(unit.mark)

    def signal_unit(self, unit: Unit, number: int) -> None:
        """Send a signal to all Python processes of a unit but the children that compile and measure."""
        for pid in _marked(unit.mark):
            if _kind_of_child(pid) == "pool child" or (unit.process and pid == unit.process.pid):
                os.kill(pid, number)

    def log_text(self) -> str:
        """Return all that the units have said."""
        return "".join(p.read_text(errors="replace") for p in sorted(self.folder.glob("*.log")))

    def _start(self, unit: Unit) -> None:
        log = (self.folder / f"{unit.name}.log").open("ab")
        self._logs.append(log)
        cache = str(self.folder / f"cache-{unit.name}")  # as on machines of their own
        env = {**self._env, "FLASHTUNE_CACHE_DIR": cache, _MARK: unit.mark}
        unit.process = subprocess.Popen(
            unit.command, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        unit.starts += 1

    def end(self, unit: Unit) -> None:
        """Kill all of a unit; ``tend`` starts it again unless it is off."""
        _kill_all(_marked(unit.mark))
        if unit.process is not None:
            unit.process.wait()
            unit.process = None


@contextlib.contextmanager
def installation(
    database: str, folder: Path, script: Mapping[str, Any], *, lease_s: float = LEASE_S, second: bool = False
) -> Iterator[Site]:
    """Give an installation of its own on ``sqlite`` or ``postgresql``; ``second``: two processes on one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "script.json").write_text(json.dumps(script))
    port = free_port()
    env = {k: v for k, v in os.environ.items() if not k.startswith("FLASHTUNE_")} | {
        "FLASHTUNE_HOME": str(folder / "home"),
        "FLASHTUNE_FAKE_SCRIPT": str(folder / "script.json"),
        "FLASHTUNE_LEASE_S": f"{lease_s:g}",
        "FLASHTUNE_TICK_S": f"{TICK_S:g}",
        "FLASHTUNE_COMPILE_WORKERS": "2",
    }
    with contextlib.ExitStack() as stack:
        if database == "sqlite":
            units = [Unit("up", "up", [FLASHTUNE, "up", "--port", str(port), "--quiet"])]
            if second:
                units.append(Unit("up2", "up", [FLASHTUNE, "up", "--port", str(free_port()), "--quiet"]))
            env["FLASHTUNE_DATABASE_URL"] = f"sqlite:///{folder}/chaos.db"
        else:
            units = _fleet(port)
            env["FLASHTUNE_DATABASE_URL"] = stack.enter_context(own_database())
            env["FLASHTUNE_BROKER_URL"] = stack.enter_context(_own_vhost())
        yield stack.enter_context(Site(folder, units, env, port))


def _fleet(port: int) -> list[Unit]:
    units = [Unit("api", "api", [FLASHTUNE, "serve", "--port", str(port), "--quiet"])]
    for role, kind in (("control", "dispatcher"), ("measure", "worker"), ("compile", "worker")):
        arch = ["--arch", "fake"] if role == "compile" else []
        units += [Unit(f"{role}{n}", kind, [*_WORKER, "--role", role, *arch]) for n in (1, 2)]
    return units


@contextlib.contextmanager
def own_database() -> Iterator[str]:
    name = f"flashtune_chaos_{uuid.uuid4().hex[:12]}"
    # no pool: the server may have been restarted when the database is dropped
    server = create_engine(POSTGRES, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    try:
        yield make_url(POSTGRES).set(database=name).render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


@contextlib.contextmanager
def _own_vhost() -> Iterator[str]:
    """Give a broker URL that nobody else uses: a virtual host and a user, made with rabbitmqctl."""
    name = f"chaos-{uuid.uuid4().hex[:12]}"
    rabbitmqctl("add_vhost", name)
    try:
        rabbitmqctl("add_user", name, name)
        rabbitmqctl("set_permissions", "-p", name, name, ".*", ".*", ".*")
        yield f"amqp://{name}:{name}@{RABBITMQ}/{name}"
    finally:
        rabbitmqctl("delete_user", name)
        rabbitmqctl("delete_vhost", name)


def rabbitmqctl(*args: str) -> str:
    return subprocess.run(["rabbitmqctl", "-q", *args], check=True, capture_output=True, text=True).stdout


def services_missing() -> str:
    """Say what a fleet needs and is not here; empty if all is."""
    try:
        create_engine(POSTGRES, connect_args={"connect_timeout": 3}).connect().close()
    except OperationalError as e:
        return f"no PostgreSQL at {make_url(POSTGRES).render_as_string()}: {e}"
    try:
        rabbitmqctl("list_vhosts")
    except (OSError, subprocess.CalledProcessError) as e:
        return f"no RabbitMQ that rabbitmqctl reaches: {e}"
    return ""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _marked(mark: str) -> list[int]:
    """Return the processes that inherited a unit's mark, whoever is their parent now."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _kind_of_child(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"_sandbox_child.py" in command:
            return "measuring child"
        if b"_compile_child.py" in command:
            return "compiling child"
        if command and b"_tracker import" not in command:
            return "pool child"
    return ""


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
