"""The snapshot that this process uses: loaded, refreshed in the background, and asked.

One reference holds what is in use. A refresh makes a new ``Finder`` beside it and then replaces the
reference, so a thread that asks meanwhile gets the old answer or the new one, never a mixture.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import InputError, SnapshotError
from tuner.lookup import Match, MatchKind
from tuner.runtime.finder import Answer, Finder
from tuner.runtime.snapshot import MAX_BYTES, Snapshot
from tuner.spec import policy_for
from tuner.target import Target, Toolchain, probe
from tuner.target import toolchain as toolchain_here
from tuner.workload import Workload

log = logging.getLogger("tuner.runtime")
_URL_TIMEOUT_S = 30.0
_NOTHING = Match(
    MatchKind.DEFAULT,
    None,
    math.inf,
    (),
    "nothing tuned fits: use the stock kernel (no snapshot is loaded; call tuner.runtime.load)",
)
_finder: Finder | None = None
_refresher: _Refresher | None = None
_loading = threading.Lock()


@dataclass(frozen=True)
class _Here:
    target: Target
    toolchain: Toolchain
    policy: str


def load(
    source: str | Path,
    *,
    refresh_s: float | None = None,
    target: Target | None = None,
    toolchain: Toolchain | None = None,
    policy: str = "auto",
    strict: bool = False,
) -> bool:
    """Use the snapshot at a path or an http(s) URL; tell whether it could be.

    ``target`` is the device that it is for; None takes the first GPU, or the CPU where there is none.
    With ``refresh_s`` the source is read again that often. Call again to use another.

    Raises:
        SnapshotError: with ``strict``, if the snapshot cannot be used.
        InputError: for a policy that the target does not have, or a refresh of no time.
    """
    global _refresher
    if refresh_s is not None and not 0 < refresh_s < math.inf:
        raise InputError(f"refresh_s is {refresh_s!r}; it must be a positive number of seconds")
    target = target or probe()
    here = _Here(target, toolchain or toolchain_here(), policy_for(policy, target))
    with _loading:
        if _refresher is not None:
            _refresher.stopped.set()
        ok = _use(str(source), here, strict=strict)
        _refresher = _Refresher(str(source), here, refresh_s) if refresh_s else None
        if _refresher is not None:
            _refresher.start()
    return ok


def find(workload: Workload | None = None, /, **fields: Any) -> Match:
    """Return which config a workload gets; give a Workload, or its fields as ``Workload.from_dict`` has them.

    heads_kv and seqlen_k, left out, are heads_q and seqlen_q.

    Raises:
        WorkloadError, PatternError: for an impossible workload.
    """
    finder = _finder
    key = workload.key if workload is not None else tuple(fields.items())
    if finder is None:
        return _NOTHING
    try:
        answer = finder.answers.get(key)
    except TypeError:  # a list among the fields, which no workload takes
        answer = None
    if answer is None:
        answer = _look(finder, workload, fields, key)
    answer.times += 1
    return answer.match


def current() -> Finder | None:
    """Return what answers now, or None before anything is loaded."""
    return _finder


def stats() -> dict[str, Any]:
    """Return the digest in use, and how often each kind of answer was given since it was loaded."""
    finder = _finder
    counts = dict.fromkeys(map(str, MatchKind), 0)
    if finder is not None:
        for answer in {id(a): a for a in list(finder.answers.values())}.values():
            counts[str(answer.match.kind)] += answer.times
    return {"digest": finder.snapshot.digest if finder else None, "answers": counts}


def unload() -> None:
    """Forget the snapshot and end the refresh."""
    global _finder, _refresher
    with _loading:
        if _refresher is not None:
            _refresher.stopped.set()
        _refresher, _finder = None, None


def _look(finder: Finder, workload: Workload | None, fields: dict[str, Any], key: Any) -> Answer:
    if workload is None:
        same = {"heads_kv": fields.get("heads_q"), "seqlen_k": fields.get("seqlen_q")}
        workload = Workload.from_dict({**{k: v for k, v in same.items() if v is not None}, **fields})
        answer = finder.answer(workload)
        return finder.answers.setdefault(key, answer)
    return finder.answer(workload)


def _use(source: str, here: _Here, *, strict: bool) -> bool:
    global _finder
    try:
        snapshot = Snapshot.read(_bytes_of(source))
        if _finder is not None and _finder.snapshot.digest == snapshot.digest and _same_place(_finder, here):
            return True
        finder = Finder(snapshot, here.target, here.toolchain, here.policy)
    except SnapshotError as e:
        if strict:
            raise
        log.warning("snapshot %s is not used: %s", source, e)
        return False
    if finder.mismatch:
        log.warning("snapshot %s: %s; every answer is the default", source, finder.mismatch)
    _finder = finder
    return True


def _same_place(finder: Finder, here: _Here) -> bool:
    return (finder.target, finder.toolchain, finder.policy) == (here.target, here.toolchain, here.policy)


def _bytes_of(source: str) -> bytes:
    try:
        if source.startswith(("http://", "https://")):
            return _fetched(source)
        with Path(source).open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as e:
        raise SnapshotError(f"{source} cannot be read ({e}); check the path or URL") from None


def _fetched(url: str) -> bytes:
    import http.client  # 24 to 32 ms to import, half of tuner.runtime: a path needs neither
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=_URL_TIMEOUT_S) as answer:
            data: bytes = answer.read(MAX_BYTES + 1)
    except http.client.HTTPException as e:
        raise OSError(f"{type(e).__name__}: {e}") from None
    return data


class _Refresher(threading.Thread):
    """Reads the source again and again, and warns once for each kind of trouble."""

    def __init__(self, source: str, here: _Here, every_s: float) -> None:
        super().__init__(name="flashtune-refresh", daemon=True)
        self.stopped = threading.Event()
        self._source, self._here, self._every_s = source, here, every_s

    def run(self) -> None:
        said = ""
        while not self.stopped.wait(self._every_s):
            try:
                with _loading:
                    if not self.stopped.is_set():
                        _use(self._source, self._here, strict=True)
                said = ""
            except SnapshotError as e:
                if str(e) != said:
                    said = str(e)
                    log.warning("snapshot %s is not used, the one before stays: %s", self._source, e)
