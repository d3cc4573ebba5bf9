"""What a run time is told for a workload, and how it was matched: pure values, no I/O.

Owns the matching rules. Does not load snapshots or install anything.

    >>> match = find(workload, target, toolchain, "graph", entries)
    >>> match.kind, match.config.label, match.warnings
    (<MatchKind.EXACT: 'exact'>, 'tile_m=128 tile_n=96', ())

An entry of another architecture is never used. An entry of another GPU model, power cap or
toolchain may be used, and every difference is a warning. The best entry is the first by:

1. the policy asked for before the other one (a graph answer is not an eager answer);
2. exact, then bucket, then nearest (``MatchKind``);
3. the least distance, in doublings (``distance``);
4. the fewest soft mismatches, the newest version, then the config's, workload's and study's text,
   so that the order in which entries come never decides.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.config import Config
from tuner.pattern import Part, Pattern
from tuner.target import Target, Toolchain
from tuner.trial import TunedConfig, Verdict
from tuner.workload import Workload

RULES = 1  # raise it when ``group_keys`` changes: snapshots carry these texts
MAX_DISTANCE = 3.0  # doublings: beyond it a neighbour's winner says nothing


class MatchKind(enum.StrEnum):
    """How an answer was found, best first."""

    EXACT = "exact"  # the same workload
    BUCKET = "bucket"  # the same, with batch and both seqlens (of varlen also all tokens) rounded up to powers of two
    NEAREST = "nearest"  # the same kind of workload, other sizes or pattern parameters
    DEFAULT = "default"  # nothing tuned fits


_ORDER = tuple(MatchKind)


@dataclass(frozen=True)
class Entry:
    """One published answer, with where and how it was measured."""

    workload: Workload
    target: Target
    toolchain: Toolchain
    policy: str
    tuned: TunedConfig
    study_id: str
    version: int


@dataclass(frozen=True)
class Match:
    """The answer. ``entry`` is None and ``distance`` infinite exactly if the kind is default."""

    kind: MatchKind
    entry: Entry | None
    distance: float
    warnings: tuple[str, ...]
    reason: str

    @property
    def config(self) -> Config | None:
        """What to run, or None for the stock kernel."""
        return self.entry.tuned.config if self.entry else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; the distance is None for a default."""
        tuned = self.entry.tuned if self.entry else None
        return {
            "kind": str(self.kind),
            "config": tuned.config.to_dict() if tuned else None,
            "extras": dict(tuned.extras) if tuned else {},
            "verdict": str(tuned.verdict) if tuned else None,
            "speedup": tuned.speedup if tuned else None,
            "distance": self.distance if self.entry else None,
            "warnings": list(self.warnings),
            "reason": self.reason,
            "workload": self.entry.workload.to_dict() if self.entry else None,
            "study_id": self.entry.study_id if self.entry else None,
            "version": self.entry.version if self.entry else None,
        }


def find(workload: Workload, target: Target, toolchain: Toolchain, policy: str, entries: Sequence[Entry]) -> Match:
    """Choose the entry to use for ``workload``, by the rules at the top of this module."""
    best: tuple[tuple[Any, ...], Match] | None = None
    for entry in entries:
        kind = _kind(workload, entry.workload) if entry.target.arch == target.arch else MatchKind.DEFAULT
        if kind is MatchKind.DEFAULT:
            continue
        far, soft = distance(workload, entry.workload), _soft_mismatches(target, toolchain, entry)
        same_policy = entry.policy == policy
        texts = (entry.tuned.config.key, entry.workload.key, entry.study_id)
        rank = (not same_policy, _ORDER.index(kind), far, len(soft), -entry.version, texts)
        if best is None or rank < best[0]:
            other = () if same_policy else (f"tuned for policy {entry.policy}, not {policy}: the winner may differ",)
            best = rank, Match(kind, entry, far, other + soft, _reason(kind, entry, far))
    return best[1] if best else _default(workload, target, entries)


def distance(a: Workload, b: Workload) -> float:
    """Sum |log2 of the ratio| of batch * heads_q, seqlen_q, seqlen_k and the pattern's parameters.

    Of two varlen workloads also of all their queries and all their keys; seqlens are the longest there.
    Means something only between workloads whose patterns have the same names.
    """
    pairs = [(a.batch * a.heads_q, b.batch * b.heads_q), (a.seqlen_q, b.seqlen_q), (a.seqlen_k, b.seqlen_k)]
    if "varlen" == a.layout == b.layout:
        pairs += [(a.total_q, b.total_q), (a.total_k, b.total_k)]
    magnitudes = zip(_magnitudes(a.pattern), _magnitudes(b.pattern), strict=True)
    # rounded, so that two that are equally far tie whatever the order of the float additions
    return round(sum(abs(math.log2(x) - math.log2(y)) for x, y in (*pairs, *magnitudes)), 9)


def group_keys(w: Workload) -> tuple[str, str]:
    """Return two texts: equal for all that may answer ``w`` at all, and for those of its bucket."""
    alike = "|".join(map(str, _invariants(w).values()))
    return alike, "|".join(map(str, (alike, *_bucket(w))))


def _kind(a: Workload, b: Workload) -> MatchKind:
    if a.key == b.key:
        return MatchKind.EXACT
    if _invariants(a) != _invariants(b):
        return MatchKind.DEFAULT
    if _bucket(a) == _bucket(b):
        return MatchKind.BUCKET
    return MatchKind.NEAREST if distance(a, b) <= MAX_DISTANCE else MatchKind.DEFAULT


def _invariants(w: Workload) -> dict[str, Any]:
    """Return what must be equal for one workload's winner to say anything about another's."""
    return {
        "op": w.op,
        "dtype": w.dtype,
        "heads_q / heads_kv": w.heads_q // w.heads_kv,
        "head_dim": w.head_dim,
        "head_dim_v": w.head_dim_v,
        "layout": w.layout,
        "deterministic": w.deterministic,
        "pattern": " ".join(p.name for p in _parts(w.pattern)) or "full",
    }


def _bucket(w: Workload) -> tuple[int | str, ...]:
    totals = (w.total_q, w.total_k) if w.layout == "varlen" else ()
    sizes = (_ceil_pow2(n) for n in (w.batch, w.seqlen_q, w.seqlen_k, *totals))
    return (w.heads_q, str(w.pattern), *sizes)


def _ceil_pow2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _parts(pattern: Pattern) -> tuple[Part, ...]:
    return pattern.masks + pattern.scores


def _magnitudes(pattern: Pattern) -> list[float]:
    """Return one size for each part that has parameters; for documents, their mean length."""
    return [_magnitude(dict(p.params)) for p in _parts(pattern) if p.params]


def _magnitude(params: dict[str, Any]) -> float:
    if "lengths" in params:
        return float(sum(params["lengths"]) / len(params["lengths"]))
    # a seed is a name, not a size
    (size,) = (v for k, v in params.items() if k != "seed")
    return float(size)


def _soft_mismatches(target: Target, toolchain: Toolchain, entry: Entry) -> tuple[str, ...]:
    """Say what differs between here and where the entry was tuned; an unknown figure is no difference."""
    there, out = entry.target, []
    if there.model != target.model:
        out.append(f"tuned on {there.model}, this is {target.model}")
    elif there.num_sms and target.num_sms and there.num_sms != target.num_sms:
        out.append(f"tuned on {there.num_sms} SMs, this has {target.num_sms}")
    if None not in (there.power_cap_w, target.power_cap_w) and there.power_cap_w != target.power_cap_w:
        out.append(f"tuned under a power cap of {there.power_cap_w} W, this has {target.power_cap_w} W")
    here = toolchain.to_dict()
    for name, version in entry.toolchain.to_dict().items():
        if version != here[name]:
            out.append(f"tuned with {name} {version or '(none)'}, this has {here[name] or '(none)'}")
    return tuple(out)


def _reason(kind: MatchKind, entry: Entry, far: float) -> str:
    text = {
        MatchKind.EXACT: "tuned for exactly this workload",
        MatchKind.BUCKET: f"tuned for {entry.workload.label}, equal after rounding sizes up to powers of two",
        MatchKind.NEAREST: f"tuned for {entry.workload.label}, {far:.2f} doublings away (limit {MAX_DISTANCE:g})",
    }[kind]
    return text + ("; tuning kept the default" if entry.tuned.verdict is Verdict.KEPT_DEFAULT else "")


def _default(workload: Workload, target: Target, entries: Sequence[Entry]) -> Match:
    usable = [e.workload for e in entries if e.target.arch == target.arch]
    warnings: tuple[str, ...] = ()
    if usable:
        why = _why_not(workload, usable)
    elif entries:
        archs = ", ".join(sorted({e.target.arch for e in entries}))
        why = f"everything tuned is for {archs}, this is {target.arch}"
        warnings = (why,)
    else:
        why = "nothing is tuned yet"
    return Match(MatchKind.DEFAULT, None, math.inf, warnings, f"nothing tuned fits: use the stock kernel ({why})")


def _why_not(workload: Workload, others: Sequence[Workload]) -> str:
    """Say what keeps the closest of ``others`` from being used."""
    wanted = _invariants(workload)

    def differences(w: Workload) -> list[str]:
        return [f"{k} {v}, not {wanted[k]}" for k, v in _invariants(w).items() if v != wanted[k]]

    def closeness(w: Workload) -> tuple[int, float, str]:
        apart = differences(w)
        return len(apart), 0.0 if apart else distance(workload, w), w.key

    closest = min(others, key=closeness)
    apart = differences(closest)
    if apart:
        return f"the closest, {closest.label}, has {'; '.join(apart)}"
    return f"the nearest, {closest.label}, is {distance(workload, closest):.2f} doublings away, limit {MAX_DISTANCE:g}"
