"""One member of a fleet: what ``flashtune worker`` was told, and the process that it becomes.

One role a process: a measuring member has one GPU for itself, a compiling one has its own pool of
compilers, a controlling one looks at everything every few seconds. Celery runs in an interpreter of
its own, in the cache folder: nothing that lies in a person's working folder can be imported there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, replace

from tuner.errors import InputError
from tuner.target import named, probe, toolchain
from workers.identity import ROLES, class_key, compile_key
from workers.settings import Settings, without_secrets

_MAIN = "from workers.member import main; main()"


@dataclass(frozen=True)
class Member:
    """One worker of a fleet. ``key`` is the class that it measures for, or what it compiles for."""

    role: str  # compile, measure or control
    queue: str
    name: str
    device: str = ""  # of a measuring one: a GPU's UUID, cpu or fake
    arch: str = ""  # of a compiling one
    key: str = ""
    compile_workers: int = 0  # 0: as the environment says

    @classmethod
    def find(
        cls,
        settings: Settings,
        role: str,
        *,
        device: str = "",
        arch: str = "",
        name: str = "",
        compile_workers: int | None = None,
    ) -> Member:
        """Return the member that the options mean, with its GPU pinned by UUID.

        Raises:
            InputError: if an option or a setting is wrong, naming it, or if the device is not here.
        """
        if role not in ROLES:
            raise InputError(f"role {role!r} does not exist; give one of {', '.join(ROLES)}")
        for option, value, of in (("--device", device, "measure"), ("--arch", arch, "compile")):
            if value and role != of:
                raise InputError(f"{option} {value} is for --role {of}, not for {role}")
        if compile_workers is not None and role != "compile":
            raise InputError(f"--compile-workers {compile_workers} is for --role compile, not for {role}")
        if not re.fullmatch(r"[\w.-]{0,64}", name):
            raise InputError(f"--name is {name!r}; write up to 64 letters, digits, dots, hyphens or underscores")
        _check(settings)
        queue = key = role
        if role == "measure":
            target = probe(_device(settings, device), settings.visible_devices)
            device = target.uuid or target.device
            queue, key = f"measure.{target.arch}", class_key(target, toolchain())
        elif role == "compile":
            if not arch:
                raise InputError("--role compile needs --arch: what to compile for, as sm_90a, sm_100a or cpu")
            arch = named(arch).arch
            queue, key = f"compile.{arch}", compile_key(arch, toolchain())
        name = name or f"{queue}-{os.getpid()}"
        return cls(role, queue, name, device, arch, key, compile_workers or 0)

    def settings(self) -> Settings:
        """Return this process's settings, with what the options say instead."""
        settings = Settings.from_env()
        return replace(settings, compile_workers=self.compile_workers) if self.compile_workers else settings

    def become(self) -> None:
        """Make this process the member: the same process id, so that whoever started it can stop it."""
        sys.stdout.flush()
        sys.stderr.flush()
        # -P: the working folder off sys.path, here and in Celery's children
        os.execv(sys.executable, [sys.executable, "-P", "-c", _MAIN, json.dumps(asdict(self))])


def main() -> None:
    """Run the member that the first argument describes, until a signal ends it."""
    member = Member(**json.loads(sys.argv[1]))
    settings = member.settings()
    settings.cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chdir(settings.cache_dir)  # Celery puts the working folder in front of sys.path whenever it imports
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Celery prints; standard output was for the first line

    from workers.celery_app import make_app, serve

    sys.exit(serve(make_app(settings, member)))


def _check(settings: Settings) -> None:
    if not settings.broker_url:
        raise InputError(
            "a fleet needs a broker, and FLASHTUNE_BROKER_URL is not set; write amqp://user:password@host/vhost, "
            "or use `flashtune up`, which needs none"
        )
    if settings.broker_url.startswith("memory:"):
        raise InputError(f"FLASHTUNE_BROKER_URL is {settings.broker_url!r}, which reaches no other process; use amqp")
    if not settings.database_url.startswith("postgresql"):
        raise InputError(
            f"FLASHTUNE_DATABASE_URL is {without_secrets(settings.database_url)!r}: a fleet shares one PostgreSQL "
            "database; write postgresql://user:password@host/database, or use `flashtune up` on one machine"
        )
    settings.check_cache_dir()


def _device(settings: Settings, device: str) -> str:
    if not device:
        return "fake" if settings.fake_script else "auto"
    return device
