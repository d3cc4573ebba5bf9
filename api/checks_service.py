"""What ``flashtune doctor`` finds out about what a fleet shares: broker, folder, server clock, service.

What is not configured is not used, which is no fault. Changes nothing but a marker file in the shared
folder and a queue on the broker that is deleted at once.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from api import checks_keeping
from api.checks import Check, Level
from db.values import WorkerInfo
from workers.settings import Settings

MARKERS = ".flashtune-nodes"
CLOCK_LIMIT_S = 5.0  # heartbeats are compared with other machines' clocks, and 60 s of silence is a death
_ANSWER_S = 5.0


def broker(url: str | None) -> list[Check]:
    """Connect to the broker and try a quorum queue. Raises InputError with the next step."""
    if url is None:
        return [_unused("broker", "FLASHTUNE_BROKER_URL is not set: flashtune tune and up need none, a fleet does")]
    from workers.broker import check  # Celery takes long to import

    return [Check("broker", Level.OK, check(url))]


def clock(place: str) -> list[Check]:
    """Compare this machine's clock with the database server's. Raises StorageError."""
    if not place.startswith("postgresql"):
        return [_unused("clock", "a database that is a file has this machine's clock")]
    with checks_keeping.opened(place) as database, database.read() as session:
        session.connection()  # before the time is taken
        before = time.time()
        server = float(session.query(database.clock()).scalar())
        after = time.time()
    # the answer was made somewhen between the two
    off = max(0.0, before - server, server - after)
    seen = f"{off:.1f} s {'behind' if server > after else 'ahead of'} the database server's"
    if off > CLOCK_LIMIT_S:
        seen += f"; up to {CLOCK_LIMIT_S:g} s are harmless, more makes live workers look dead"
        return [Check("clock", Level.FAIL, seen, "set both clocks by NTP (timedatectl set-ntp true)")]
    return [Check("clock", Level.OK, seen if off >= 0.1 else "agrees with the database server's")]


def artifact_folder(folder: Path | None, workers: Sequence[WorkerInfo]) -> list[Check]:
    """Write this host's marker into the shared folder, and look for those of the other workers' hosts."""
    name = "artifact folder"
    if folder is None:
        unset = "FLASHTUNE_ARTIFACT_DIR is not set: compiled kernels travel through the database"
        return [_unused(name, unset)]
    if not folder.is_dir():
        return [
            Check(name, Level.FAIL, f"{folder} does not exist", f"mount the folder that all nodes share at {folder}")
        ]
    here = socket.gethostname()
    try:
        _mark(folder / MARKERS, here)
        marked = {path.name for path in (folder / MARKERS).iterdir()}
    except OSError as e:
        next_step = "make it writable for this user, or unset FLASHTUNE_ARTIFACT_DIR on all nodes to use the database"
        return [Check(name, Level.FAIL, f"{folder} cannot be written: {e.strerror}", next_step)]
    hosts = {w.host for w in workers if w.alive() and {"compile", "measure"} & set(w.roles)} - {here}
    if strange := sorted(hosts - marked):
        seen = f"{folder} is writable, and has no marker of {', '.join(strange)}"
        next_step = "run flashtune doctor there, then here again; if nothing changes, that is another folder: mount one"
        return [Check(name, Level.WARN, seen, next_step)]
    shared = f"shared with {', '.join(sorted(hosts))}" if hosts else "no other node is alive to compare with"
    return [Check(name, Level.OK, f"{folder} is writable; {shared}")]


def _mark(markers: Path, host: str) -> None:
    markers.mkdir(mode=0o700, exist_ok=True)
    marker = markers / host
    half = markers / f".{host}.{os.getpid()}"
    half.write_text(f"flashtune doctor ran on {host} at {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")
    half.replace(marker)


def service(settings: Settings) -> list[Check]:
    """Ask the service at FLASHTUNE_URL whether it is ready, and whether it takes the key."""
    name, url = "service", settings.url
    if url is None:
        return [_unused(name, "FLASHTUNE_URL is not set: client commands use the database itself")]
    try:
        ready = _status(url, "/readyz", None)
        if ready != 200:
            fault = "is there, and its database does not answer it" if ready == 503 else f"answers {ready} to /readyz"
            next_step = "see its log" if ready == 503 else "check that FLASHTUNE_URL is that of `flashtune serve`"
            return [Check(name, Level.FAIL, f"{url} {fault}", next_step)]
        status = _status(url, "/v1/jobs?limit=1", settings.api_key)
    except (OSError, HTTPException, UnicodeError) as e:
        untrusted = isinstance(e, ssl.SSLCertVerificationError)
        why = (
            e.verify_message if isinstance(e, ssl.SSLCertVerificationError) else getattr(e, "strerror", None) or str(e)
        )
        next_step = "install its certificate's authority here" if untrusted else "check FLASHTUNE_URL, and that it runs"
        return [Check(name, Level.FAIL, f"cannot reach {url}: {why or type(e).__name__}", next_step)]
    return [_access(url, status, settings.api_key is not None)]


def _access(url: str, status: int, has_key: bool) -> Check:
    if status == 200:
        return Check("service", Level.OK, f"{url} is ready{', and takes the key' if has_key else '; no key is needed'}")
    if status == 403:
        return Check("service", Level.OK, f"{url} is ready; the key is known, and may not read")
    if status == 401:
        seen = f"{url} is ready, and {'does not take the key in FLASHTUNE_API_KEY' if has_key else 'wants a key'}"
        next_step = "set FLASHTUNE_API_KEY to one that `flashtune keys create` made"
        return Check("service", Level.FAIL, seen, next_step)
    seen = f"{url} is ready, and answers {status} to a list of jobs"
    return Check("service", Level.WARN, seen, "try again; see its log")


def _status(url: str, path: str, key: str | None) -> int:
    """Return the status of one GET; follows no redirect and uses no proxy, so that the key goes nowhere else."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    with closing(kind(str(parts.hostname), parts.port, timeout=_ANSWER_S)) as connection:
        connection.request("GET", parts.path + path, headers={"Authorization": f"Bearer {key}"} if key else {})
        with connection.getresponse() as response:
            return response.status


def _unused(name: str, why: str) -> Check:
    return Check(name, Level.OK, f"not used: {why}")
