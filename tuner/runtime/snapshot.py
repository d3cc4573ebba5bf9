"""The snapshot file: published configs, immutable, under the SHA-256 of their canonical text.

    line 1   {"bytes":N,"digest":"<sha256 of lines 2 to the end>","format":"flashtune-snapshot","version":1}
    line 2   {"entries":n,"rules":1,"targets":[...],"toolchains":[...]}
    line 3.. <workload key> TAB <group key> TAB <bucket key> TAB <arch> TAB <policy> TAB <the entry as JSON>

Owns the format: writing, reading, checking. The lines are sorted, and nothing says when the file was
made, so the same answers always give the same bytes. An entry's JSON is read when it is first asked
for, which is why ten thousand of them load in milliseconds.

    >>> snapshot = Snapshot.of(entries)
    >>> Snapshot.read(snapshot.data).digest == snapshot.digest
    True
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

from tuner.config import Config
from tuner.errors import FlashtuneError, SnapshotError
from tuner.lookup import RULES, Entry, group_keys
from tuner.target import Target, Toolchain
from tuner.trial import TunedConfig, Verdict
from tuner.workload import Workload

FORMAT = "flashtune-snapshot"
VERSION = 1
MAX_BYTES = 1 << 28  # of a file: 10,000 entries took 7.7 MB
_HEAD_BYTES = 256


class Line:
    """One entry: the texts that it is found by, and the entry itself, read once when it is needed."""

    __slots__ = ("_entry", "_meta", "_text", "alike", "arch", "bucket", "key", "policy")

    def __init__(self, columns: list[str], meta: dict[str, Any]) -> None:
        self.key, self.alike, self.bucket, self.arch, self.policy, self._text = columns
        self._meta = meta
        self._entry: Entry | None = None

    @property
    def entry(self) -> Entry:
        """Raises SnapshotError if the JSON is no entry, or not the one that its line is filed under."""
        if self._entry is None:  # two threads may both read it: they get equal values
            try:
                entry = _entry_of(json.loads(self._text), self._meta)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, FlashtuneError) as e:
                raise SnapshotError(
                    f"the entry of {self.key} cannot be read ({e}); export the snapshot again"
                ) from None
            if (entry.workload.key, entry.target.arch, entry.policy) != (self.key, self.arch, self.policy):
                raise SnapshotError(
                    f"the entry of {self.key} holds another: {entry.workload.key}; export the snapshot again"
                )
            self._entry = entry
        return self._entry

    @property
    def values(self) -> dict[str, Any]:
        """The entry as plain JSON values, with when it was published: what ``show`` and ``diff`` print."""
        values: dict[str, Any] = json.loads(self._text)
        values["target"] = self._meta["targets"][values["target"]]
        values["toolchain"] = self._meta["toolchains"][values["toolchain"]]
        return values

    @property
    def place(self) -> tuple[str, str, str, str]:
        """What an answer is for: workload, target, toolchain, policy. A snapshot holds one line for each."""
        e = self.entry
        return e.workload.key, e.target.key, e.toolchain.key, e.policy


class Snapshot:
    """Published configs at one moment. Never changes."""

    def __init__(self, digest: str, lines: tuple[Line, ...], data: bytes) -> None:
        self.digest = digest
        self.lines = lines
        self.data = data

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Snapshot:
        """Write entries down; one that has ``published_at`` keeps it."""
        entries = list(entries)
        targets = _table([_target_values(e.target) for e in entries])
        toolchains = _table([e.toolchain.to_dict() for e in entries])
        rows = sorted(_row(e, targets, toolchains) for e in entries)
        meta = {
            "entries": len(rows),
            "rules": RULES,
            "targets": [json.loads(t) for t in targets],
            "toolchains": [json.loads(t) for t in toolchains],
        }
        body = "".join(f"{text}\n" for text in (_canonical(meta), *rows)).encode()
        return cls.read(_head(body) + body)

    @classmethod
    def read(cls, data: bytes) -> Snapshot:
        """Check and read a file's bytes.

        Raises:
            SnapshotError: for a foreign, newer, truncated or damaged file, saying which.
        """
        if len(data) > MAX_BYTES:
            raise SnapshotError(f"the file has {len(data)} bytes; a snapshot has at most {MAX_BYTES}")
        head, newline, _ = data[:_HEAD_BYTES].partition(b"\n")
        if not newline:
            head = head[:40]
        found = _head_values(head)
        body = memoryview(data)[len(head) + 1 :]
        if found["version"] != VERSION:
            raise SnapshotError(
                f"the file has format version {found['version']}, this flashtune reads {VERSION}; update the older one"
            )
        if len(body) != found["bytes"]:
            raise SnapshotError(f"the file has {len(body)} bytes after its head, not {found['bytes']}; fetch it again")
        digest = hashlib.sha256(body).hexdigest()
        if digest != found["digest"]:
            raise SnapshotError(
                f"the file is damaged: its content has the digest {digest[:12]}, its head says "
                f"{found['digest'][:12]}; fetch it again"
            )
        return cls(digest, _lines(bytes(body)), data)


def _head(body: bytes) -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    return (_canonical({"bytes": len(body), "digest": digest, "format": FORMAT, "version": VERSION}) + "\n").encode()


def _head_values(head: bytes) -> dict[str, Any]:
    """Read the first line, which must be exactly as we write it: then no bit of it can be wrong unseen."""
    foreign = SnapshotError(f"the file is no flashtune snapshot: it begins with {head[:40]!r}")
    try:
        values = json.loads(head)
    except (ValueError, RecursionError):
        raise foreign from None
    if not isinstance(values, dict) or values.get("format") != FORMAT or type(values.get("version")) is not int:
        raise foreign
    known = {"bytes": int, "digest": str}
    if values["version"] == VERSION and (
        any(type(values.get(name)) is not kind for name, kind in known.items())
        or not re.fullmatch("[0-9a-f]{64}", values["digest"])
        or _canonical(values).encode() != head
        or len(values) != 4
    ):
        raise foreign
    return values


def _lines(body: bytes) -> tuple[Line, ...]:
    try:
        first, *rows = body.decode().split("\n")
        meta = json.loads(first)
        if rows.pop() != "" or len(rows) != meta["entries"]:
            raise ValueError(f"{len(rows)} entries, not {meta['entries']}")
        lines = tuple([Line(row.split("\t"), meta) for row in rows])
        if meta["rules"] != RULES:  # grouped by another flashtune: group again, which takes longer
            for line in lines:
                line.alike, line.bucket = group_keys(line.entry.workload)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as e:
        raise SnapshotError(f"the snapshot's content cannot be read ({e}); export it again") from None
    return lines


def _row(entry: Entry, targets: dict[str, int], toolchains: dict[str, int]) -> str:
    tuned, published_at = entry.tuned, getattr(entry, "published_at", None)
    values = {
        "workload": entry.workload.to_dict(),
        "target": targets[_canonical(_target_values(entry.target))],
        "toolchain": toolchains[_canonical(entry.toolchain.to_dict())],
        "policy": entry.policy,
        "config": tuned.config.to_dict(),
        "default": tuned.default.to_dict(),
        "verdict": str(tuned.verdict),
        "speedup": tuned.speedup,
        "low": tuned.low,
        "high": tuned.high,
        "confidence": tuned.confidence,
        "margin": tuned.margin,
        "reason": tuned.reason,
        "extras": dict(tuned.extras),
        "study_id": entry.study_id,
        "version": entry.version,
        "published_at": published_at.isoformat() if published_at else None,
    }
    alike, bucket = group_keys(entry.workload)
    columns = (entry.workload.key, alike, bucket, entry.target.arch, entry.policy, _canonical(values))
    return "\t".join(columns)


def _entry_of(v: dict[str, Any], meta: dict[str, Any]) -> Entry:
    tuned = TunedConfig(
        config=Config.from_dict(v["config"]),
        default=Config.from_dict(v["default"]),
        verdict=Verdict(v["verdict"]),
        speedup=v["speedup"],
        low=v["low"],
        high=v["high"],
        confidence=v["confidence"],
        margin=v["margin"],
        ties=(),
        finalists=(),
        verification=None,
        reason=v["reason"],
        rounds=0,
        rounds_dropped=0,
        extras=v["extras"],
    )
    target, tools = Target(**meta["targets"][v["target"]]), Toolchain(**meta["toolchains"][v["toolchain"]])
    return Entry(Workload.from_dict(v["workload"]), target, tools, v["policy"], tuned, v["study_id"], v["version"])


def _target_values(target: Target) -> dict[str, Any]:
    """Return a target without what names a single board, which says nothing about a config."""
    return {k: v for k, v in target.to_dict().items() if k not in ("uuid", "device_index")}


def _table(values: list[dict[str, Any]]) -> dict[str, int]:
    return {text: i for i, text in enumerate(sorted({_canonical(v) for v in values}))}


def _canonical(values: Any) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
