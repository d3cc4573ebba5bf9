"""What is computed: one attention problem, as a frozen value with a canonical key.

Shapes: q is (batch, seqlen_q, heads_q, head_dim), k is (batch, seqlen_k, heads_kv, head_dim),
v is (batch, seqlen_k, heads_kv, head_dim_v), out is (batch, seqlen_q, heads_q, head_dim_v).

    >>> w = Workload(batch=2, heads_q=16, heads_kv=16, seqlen_q=1024, seqlen_k=1024, head_dim=128)
    >>> w.key
    'w1|fwd|bfloat16|b2|hq16|hkv16|sq1024|sk1024|d128|dv128|dense|det0|full'

In the layout ``varlen`` the sequences lie one behind the other, with no batch axis and no padding: q is
(total_q, heads_q, head_dim), k and v (total_k, heads_kv, ...). ``lengths_q`` and ``lengths_k`` have one
length for each of ``batch`` sequences, ``seqlen_q`` and ``seqlen_k`` are the longest. A pattern holds
within each sequence, aligned at its end. A sequence may be empty.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from tuner import lengths
from tuner.errors import WorkloadError
from tuner.pattern import Pattern, document_lengths, parse

KEY_VERSION = "w1"
JOINT_OP = "fwd+bwd"  # what a training step waits for: the forward, then the backward on what that left
OPS = ("fwd", "bwd", JOINT_OP)
DTYPES = ("bfloat16", "float16", "float32")
DTYPE_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
LAYOUTS = ("dense", "varlen")
MAX_SIZE = 1 << 24  # of batch, heads and seqlens: counting pairs and drawing documents loops over them
_ENDS_ALIGNED = {"causal", "sliding_window"}  # under these, queries that outnumber the keys would see nothing


@dataclass(frozen=True)
class Workload:
    """One attention problem. Raises WorkloadError on construction if a field is impossible."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int = 0  # 0 means head_dim
    op: str = "fwd"
    dtype: str = "bfloat16"
    pattern: Pattern = field(default_factory=Pattern)
    layout: str = "dense"
    deterministic: bool = False
    lengths_q: tuple[int, ...] = ()  # of varlen
    lengths_k: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.head_dim_v) is int and self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        object.__setattr__(self, "dtype", DTYPE_SHORT.get(str(self.dtype), self.dtype))
        if type(self.deterministic) is not bool:
            raise WorkloadError(f"deterministic is {self.deterministic!r}; it must be true or false")
        for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_SIZE:
                raise WorkloadError(f"{name} is {value!r}; it must be a whole number of at least 1, at most {MAX_SIZE}")
        for name in ("head_dim", "head_dim_v"):
            value = getattr(self, name)
            if type(value) is not int or not 8 <= value <= 512 or value % 8:
                raise WorkloadError(f"{name} is {value!r}; it must be a multiple of 8 from 8 to 512")
        if self.heads_q % self.heads_kv:
            raise WorkloadError(
                f"heads_q {self.heads_q} is not a multiple of heads_kv {self.heads_kv}; "
                "grouped heads must divide evenly"
            )
        for name, known in (("op", OPS), ("dtype", DTYPES), ("layout", LAYOUTS)):
            if getattr(self, name) not in known:
                raise WorkloadError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        self._check_lengths()
        self._check_pattern()

    def _check_lengths(self) -> None:
        for name, longest in (("lengths_q", "seqlen_q"), ("lengths_k", "seqlen_k")):
            given = getattr(self, name)
            if self.layout == "dense":
                if given != ():
                    raise WorkloadError(f"{name} is given with layout dense; write layout varlen, or leave it out")
                continue
            if not isinstance(given, (list, tuple)) or not given:
                raise WorkloadError(f"layout varlen needs {name}, one length for each sequence, and got {given!r:.80}")
            if len(given) != self.batch or len(given) > lengths.MAX_SEQUENCES:
                limit = f"make them agree, with at most {lengths.MAX_SEQUENCES}"
                raise WorkloadError(f"{name} has {len(given)} lengths and batch is {self.batch}; {limit}")
            wrong = next((n for n in given if type(n) is not int or not 0 <= n <= MAX_SIZE), None)
            if wrong is not None:
                raise WorkloadError(f"{name} has a length of {wrong!r:.40}; it must be from 0 to {MAX_SIZE}")
            if max(given) != getattr(self, longest):
                said = f"{longest} is {getattr(self, longest)}, and the longest of {name} is {max(given)}"
                raise WorkloadError(f"{said}; make them agree, or leave {longest} out")
            if sum(given) >= 1 << 31:
                raise WorkloadError(f"{name} sum to {sum(given)}; offsets are 32-bit: they may sum to {(1 << 31) - 1}")
            object.__setattr__(self, name, tuple(given))

    def _check_pattern(self) -> None:
        document = self.pattern.mask("document")
        if document is not None:
            if self.layout == "varlen":
                raise WorkloadError(
                    f"{document} in layout varlen, which is packed already: make each document a sequence, or use dense"
                )
            if self.seqlen_q != self.seqlen_k:
                raise WorkloadError(f"{document} needs seqlen_q == seqlen_k, got {self.seqlen_q} and {self.seqlen_k}")
            document_lengths(document, self.seqlen_k)
        prefix = self.pattern.mask("prefix_lm")
        if prefix is not None and self.layout == "varlen":
            raise WorkloadError(f"{prefix} in layout varlen: it needs a BlockMask, which packed calls lack; use dense")
        if prefix is not None and int(prefix["prefix"]) > self.seqlen_k:  # type: ignore[arg-type]
            raise WorkloadError(f"{prefix} is longer than seqlen_k {self.seqlen_k}; shorten it")
        if not self.pattern.mask_names & _ENDS_ALIGNED:
            return
        for i, (q, k) in enumerate(self.sequences):
            if q > k:
                where = f"sequence {i} has {q} queries and {k} keys"
                if self.layout == "dense":
                    where = f"seqlen_q {q} is longer than seqlen_k {k}"
                raise WorkloadError(
                    f"{where}: under {self.pattern} the first queries would see nothing; use full, or more keys"
                )

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Return the (queries, keys) of each varlen sequence; of a dense workload, of the one that all are like."""
        if self.layout == "dense":
            return ((self.seqlen_q, self.seqlen_k),)
        return tuple(zip(self.lengths_q, self.lengths_k, strict=True))

    @property
    def total_q(self) -> int:
        """Count the queries of all sequences."""
        return sum(self.lengths_q) if self.layout == "varlen" else self.batch * self.seqlen_q

    @property
    def total_k(self) -> int:
        """Count the keys of all sequences."""
        return sum(self.lengths_k) if self.layout == "varlen" else self.batch * self.seqlen_k

    @property
    def sees_one_key(self) -> bool:
        """Tell whether every query sees a single key: its softmax is constant, and dq and dk are zero."""
        document = self.pattern.mask("document")
        window = self.pattern.mask("sliding_window")
        longest = self.seqlen_k if document is None else max(document_lengths(document, self.seqlen_k))
        return longest == 1 or (window is not None and window["window"] == 1)

    def __hash__(self) -> int:
        return hash(self.key)  # made once: hashing twelve fields takes longer than a whole lookup

    @cached_property
    def key(self) -> str:
        """Canonical, versioned text: equal exactly for equal workloads."""
        return "|".join(
            (
                KEY_VERSION,
                self.op,
                self.dtype,
                f"b{self.batch}",
                f"hq{self.heads_q}",
                f"hkv{self.heads_kv}",
                f"sq{self.seqlen_q}",
                f"sk{self.seqlen_k}",
                f"d{self.head_dim}",
                f"dv{self.head_dim_v}",
                self.layout + self._lengths_text(),
                f"det{int(self.deterministic)}",
                str(self.pattern),
            )
        )

    def _lengths_text(self) -> str:
        """Return ``(512*3,100)``, or ``(1*64;8192,300*63)`` where keys differ from queries; empty for dense."""
        if self.layout == "dense":
            return ""
        sides = (self.lengths_q,) if self.lengths_q == self.lengths_k else (self.lengths_q, self.lengths_k)
        return f"({';'.join(map(lengths.text, sides))})"

    @property
    def label(self) -> str:
        """Short text for people: ``causal b2 h16 s8192 d128``, with the op at the end unless it is a forward.

        A varlen's has its longest sequence and the sum of all: ``causal b8 h16 varlen s2048 t9120 d128``.
        """
        heads = f"h{self.heads_q}" if self.heads_q == self.heads_kv else f"h{self.heads_q}/{self.heads_kv}"
        seqlen = f"s{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"s{self.seqlen_q}x{self.seqlen_k}"
        if self.layout == "varlen":
            tokens = f"t{self.total_q}" if self.lengths_q == self.lengths_k else f"t{self.total_q}x{self.total_k}"
            seqlen = f"varlen {seqlen} {tokens}"
        dim = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}/{self.head_dim_v}"
        return f"{self.pattern} b{self.batch} {heads} {seqlen} {dim}" + ("" if self.op == "fwd" else f" {self.op}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_dict`` gives the same workload back."""
        out = {**asdict(self), "pattern": str(self.pattern)}
        for name in ("lengths_q", "lengths_k"):
            given = out.pop(name)
            if self.layout == "varlen":
                out[name] = list(given)
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Workload:
        """Build from plain values. Lengths may be in any form of ``tuner.lengths``; ``lengths`` gives both.

        With lengths, batch and seqlens that are left out follow from them, and the layout is varlen.

        Raises:
            WorkloadError: for an unknown or missing field, or an impossible value.
            PatternError: for a pattern that cannot be read.
        """
        known = {f.name for f in fields(cls)} | {"lengths"}
        unknown = sorted(set(values) - known)
        if unknown:
            raise WorkloadError(f"unknown workload field {unknown[0]!r}; known: {', '.join(sorted(known))}")
        values = lengths.fill(values)
        needed = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim")
        missing = [n for n in needed if n not in values]
        if missing:
            raise WorkloadError(f"workload field {missing[0]} is missing; give it")
        pattern = values.get("pattern", "full")
        return cls(**{**values, "pattern": pattern if isinstance(pattern, Pattern) else parse(pattern)})

    def with_(self, **changes: Any) -> Workload:
        """Return a copy with some fields changed; new lengths bring their batch, seqlens and layout."""
        if "lengths_q" in changes or "lengths_k" in changes:
            given = {name: changes.get(name, getattr(self, name)) for name in ("lengths_q", "lengths_k")}
            changes = lengths.fill({**changes, **given})
        elif changes.get("layout", "varlen") == "dense":
            changes = {**changes, "lengths_q": (), "lengths_k": ()}
        return replace(self, **changes)

    def visible_pairs(self) -> int:
        """Count the (query, key) pairs that take part, for one head and one batch entry; of varlen, in all."""
        if self.pattern.mask("document"):
            return self._visible_in_documents()
        return sum(times * self._visible(sq, sk) for (sq, sk), times in Counter(self.sequences).items())

    def _visible(self, sq: int, sk: int) -> int:
        shift, names = sk - sq, self.pattern.mask_names
        if "sliding_window" in names:
            window = _int_of(self.pattern, "sliding_window", "window")
            return sum(min(window, i + shift + 1) for i in range(sq))
        if "causal" in names:
            return sum(i + shift + 1 for i in range(sq))
        if "prefix_lm" in names:
            prefix = _int_of(self.pattern, "prefix_lm", "prefix")
            return sum(max(prefix, i + shift + 1) for i in range(sq))
        return sq * sk

    def _visible_in_documents(self) -> int:
        document = self.pattern.mask("document")
        assert document is not None
        names, total, start = self.pattern.mask_names, 0, 0
        window = _int_of(self.pattern, "sliding_window", "window", math.inf)
        prefix = _int_of(self.pattern, "prefix_lm", "prefix", 0)
        for n in document_lengths(document, self.seqlen_k):
            if "sliding_window" in names:
                total += sum(min(window, i + 1) for i in range(n))
            elif "causal" in names:
                total += n * (n + 1) // 2
            elif "prefix_lm" in names:
                total += sum(max(min(max(prefix - start, 0), n), i + 1) for i in range(n))
            else:
                total += n * n
            start += n
        return int(total)

    def flops(self) -> int:
        """Floating-point operations of the useful work: 2 per multiply-add, QK and PV.

        Backward counts 2.5 times the forward (five matrix products instead of two), as the
        FlashAttention papers do; both together 3.5 times.
        """
        entries = self.batch if self.layout == "dense" else 1  # the pairs of varlen are of all its sequences
        forward = 2 * entries * self.heads_q * self.visible_pairs() * (self.head_dim + self.head_dim_v)
        return {"fwd": forward, "bwd": forward * 5 // 2, JOINT_OP: forward * 7 // 2}[self.op]


def _int_of(pattern: Pattern, mask: str, key: str, default: float = 0) -> Any:
    part = pattern.mask(mask)
    return default if part is None else part[key]
