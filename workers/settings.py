"""The one place that reads the environment (besides the two child scripts).

=========================  ======================================  ==================================
variable                   meaning                                 when unset or empty
=========================  ======================================  ==================================
FLASHTUNE_HOME             folder of everything flashtune keeps    $XDG_DATA_HOME/flashtune, or
                                                                   ~/.local/share/flashtune
FLASHTUNE_DATABASE_URL     SQLAlchemy URL, sqlite or postgresql    sqlite:///<home>/flashtune.db
FLASHTUNE_CACHE_DIR        folder of compiled kernels              <home>/artifacts
FLASHTUNE_COMPILE_WORKERS  compiling processes at a time           cores of this process - 1
FLASHTUNE_BROKER_URL       broker of a fleet: amqp(s), redis(s),   None: no broker
                           or memory for tests
FLASHTUNE_ARTIFACT_DIR     folder that all nodes of a fleet share  None: compiled kernels travel
                           for compiled kernels                    through the database
FLASHTUNE_LEASE_S          seconds until the work of a silent      45
                           worker goes to another, 1 to 3600
FLASHTUNE_TICK_S           seconds between two looks of the        2
                           dispatcher, 0.05 to 60
FLASHTUNE_KEEP_DAYS        days that events, work and compiled     30
                           kernels of ended jobs are kept, 1 to
                           9999
FLASHTUNE_KEEP_WORKERS_DAYS                                        7
                           days that a silent worker is listed
FLASHTUNE_URL              http(s) URL of the service, for the     None: the database itself
                           client commands
FLASHTUNE_API_KEY          key that the client commands send       None: no key is sent
FLASHTUNE_FAKE_SCRIPT      script of the fake family, for tests    None: no fake family
CUDA_VISIBLE_DEVICES       GPUs that CUDA shows                    None; empty means no GPU, as in CUDA
=========================  ======================================  ==================================

Makes no folder and opens nothing.

    >>> Settings.from_env({"FLASHTUNE_HOME": "/srv/flashtune"}).database_url
    'sqlite:////srv/flashtune/flashtune.db'
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path

from db.values import Keep
from tuner.errors import InputError


@dataclass(frozen=True, repr=False)
class Settings:
    """What this process was told; its repr hides the passwords in URLs and the API key."""

    home: Path
    database_url: str
    cache_dir: Path
    compile_workers: int
    visible_devices: str | None
    broker_url: str | None = None
    artifact_dir: Path | None = None
    lease_s: float = 45.0
    tick_s: float = 2.0
    keep: Keep = field(default_factory=Keep)
    url: str | None = None  # without a slash at its end
    api_key: str | None = None
    fake_script: Path | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from ``environ``, by default this process's own environment.

        Raises:
            InputError: naming the variable, its value and what to write instead.
        """
        env = os.environ if environ is None else environ
        home = _folder(env, "FLASHTUNE_HOME") or _data_home(env) / "flashtune"
        return cls(
            home=home,
            database_url=_database_url(env) or f"sqlite:///{home / 'flashtune.db'}",
            cache_dir=_folder(env, "FLASHTUNE_CACHE_DIR") or home / "artifacts",
            compile_workers=_compile_workers(env),
            visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
            broker_url=_broker_url(env),
            artifact_dir=_folder(env, "FLASHTUNE_ARTIFACT_DIR"),
            lease_s=_number(env, "FLASHTUNE_LEASE_S", cls.lease_s, 1, 3600),
            tick_s=_number(env, "FLASHTUNE_TICK_S", cls.tick_s, 0.05, 60),
            keep=Keep(
                _days(env, "FLASHTUNE_KEEP_DAYS", Keep.records),
                _days(env, "FLASHTUNE_KEEP_WORKERS_DAYS", Keep.workers),
            ),
            url=service_url("FLASHTUNE_URL", env.get("FLASHTUNE_URL") or None),
            api_key=_api_key(env),
            fake_script=Path(script).absolute() if (script := env.get("FLASHTUNE_FAKE_SCRIPT")) else None,
        )

    def check_cache_dir(self) -> None:
        """Look whether the cache folder can be used, or made.

        Raises:
            InputError: naming the folder and what is in its way.
        """
        nearest = next(p for p in (self.cache_dir, *self.cache_dir.parents) if p.exists())
        fault = "is not a folder" if not nearest.is_dir() else "cannot be written"
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise InputError(
                f"cannot use the folder {self.cache_dir}: {nearest} {fault}; set FLASHTUNE_CACHE_DIR to another"
            )

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        shown |= {name: without_secrets(v) for name in ("database_url", "broker_url", "url") if (v := shown[name])}
        shown |= {"api_key": "***"} if self.api_key else {}
        shown |= {name: str(v) for name, v in shown.items() if isinstance(v, Path)}
        return f"Settings({', '.join(f'{name}={v!r}' for name, v in shown.items())})"


def service_url(where: str, url: str | None) -> str | None:
    """Return the URL of a service as given in ``where``, without a slash at its end.

    Raises:
        InputError: naming ``where`` if it is no http(s) URL of a host, or holds a user, query or fragment.
    """
    if url is None:
        return None
    host = r"([^\s/?#@\\:\[\]]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?"
    found = re.fullmatch(rf"https?://{host}(/[^\s?#@\\]*)?", url)
    if found is None or int((found[2] or ":0")[1:]) > 65535:
        raise InputError(
            f"{where} is {without_secrets(url)!r}; write http://host:port or https://host, the key in FLASHTUNE_API_KEY"
        )
    return url.rstrip("/")


def without_secrets(url: str) -> str:
    """Return ``url`` fit for a log: the password and the query's values become ``***``.

    Works on malformed URLs too, since those end up in error messages; in doubt it hides more.
    """
    parts = re.fullmatch(r"(\w[\w+.-]*://)?(.*@)?(.*)", url, flags=re.DOTALL)
    assert parts is not None  # every text matches
    scheme, credentials, rest = (part or "" for part in parts.groups())
    if credentials:
        user = re.match(r"[^:@/?=]+(?=[:@])", credentials) if scheme else None
        credentials = credentials if user and user[0] + "@" == credentials else f"{user[0] + ':' if user else ''}***@"
    return scheme + credentials + re.sub(r"=[^&\s]*", "=***", rest)


def _folder(env: Mapping[str, str], name: str) -> Path | None:
    raw = env.get(name)
    if not raw:
        return None
    path = Path(_user_home(env), raw[2:]) if raw.startswith("~/") else Path(raw).absolute()
    if path.exists() and not path.is_dir():
        raise InputError(f"{name} is {raw!r}, which is not a folder; name a folder, existing or not")
    return path


def _data_home(env: Mapping[str, str]) -> Path:
    """Follow the XDG base directory specification, which says to ignore a relative path."""
    xdg = Path(env.get("XDG_DATA_HOME") or "")
    return xdg if xdg.is_absolute() else _user_home(env) / ".local" / "share"


def _user_home(env: Mapping[str, str]) -> Path:
    return Path(env.get("HOME") or Path.home())


def _database_url(env: Mapping[str, str]) -> str | None:
    url = env.get("FLASHTUNE_DATABASE_URL")
    if url and not re.match(r"(sqlite|postgresql)(\+\w+)?://", url):
        raise InputError(
            f"FLASHTUNE_DATABASE_URL is {without_secrets(url)!r}; write sqlite:////folder/file.db "
            "or postgresql://user:password@host/database"
        )
    return url or None


def _compile_workers(env: Mapping[str, str]) -> int:
    raw = env.get("FLASHTUNE_COMPILE_WORKERS")
    if not raw:
        return max(1, len(os.sched_getaffinity(0)) - 1)
    if not re.fullmatch(r"[1-9][0-9]{0,3}", raw.strip()):
        raise InputError(f"FLASHTUNE_COMPILE_WORKERS is {raw!r}; write a whole number from 1 to 9999")
    return int(raw)


def _broker_url(env: Mapping[str, str]) -> str | None:
    url = env.get("FLASHTUNE_BROKER_URL")
    if url and not re.match(r"(amqps?|rediss?|memory)://", url):
        raise InputError(
            f"FLASHTUNE_BROKER_URL is {without_secrets(url)!r}; write amqp://user:password@host/vhost "
            "or redis://:password@host/0"
        )
    return url or None


def _number(env: Mapping[str, str], name: str, default: float, low: float, high: float, unit: str = "seconds") -> float:
    raw = env.get(name)
    if not raw:
        return default
    # not float() alone, which takes nan, 1_0 and other scripts' digits
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,9})?", raw.strip()) or not low <= float(raw) <= high:
        raise InputError(f"{name} is {raw!r}; write {unit} from {low:g} to {high:g}")
    return float(raw)


def _days(env: Mapping[str, str], name: str, default: timedelta) -> timedelta:
    return timedelta(days=_number(env, name, default.days, 1, 9999, "days"))


def _api_key(env: Mapping[str, str]) -> str | None:
    key = env.get("FLASHTUNE_API_KEY")
    # a line break would end the HTTP header that carries it
    if key and not re.fullmatch(r"[!-~]{1,200}", key):
        raise InputError("FLASHTUNE_API_KEY is no API key (printable ASCII, no blanks); see `flashtune keys create`")
    return key or None
