"""The one place that reads the environment (besides the two child scripts).

=========================  ======================================  ==================================
variable                   meaning                                 when unset or empty
=========================  ======================================  ==================================
FLASHTUNE_HOME             folder of everything flashtune keeps    $XDG_DATA_HOME/flashtune, or
                                                                   ~/.local/share/flashtune
FLASHTUNE_DATABASE_URL     SQLAlchemy URL, sqlite or postgresql    sqlite:///<home>/flashtune.db
FLASHTUNE_CACHE_DIR        folder of compiled kernels              <home>/artifacts
FLASHTUNE_COMPILE_WORKERS  compiling processes at a time           cores of this process - 1
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
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import InputError


@dataclass(frozen=True, repr=False)
class Settings:
    """What this process was told; its repr hides the password in ``database_url``."""

    home: Path
    database_url: str
    cache_dir: Path
    compile_workers: int
    visible_devices: str | None

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
        return (
            f"Settings(home={str(self.home)!r}, database_url={without_secrets(self.database_url)!r}, "
            f"cache_dir={str(self.cache_dir)!r}, compile_workers={self.compile_workers}, "
            f"visible_devices={self.visible_devices!r})"
        )


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
