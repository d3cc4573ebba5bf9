"""The lengths of the sequences of a varlen workload: read, drawn, and written as short text.

Owns the text forms. What lengths a workload may have is ``tuner.workload``'s.

    >>> read("512*3,100", None, "lengths")
    (512, 512, 512, 100)
    >>> text((512, 512, 512, 100))
    '512*3,100'
    >>> read("mean=512,seed=1", 3, "lengths")
    (393, 320, 517)
"""

from __future__ import annotations

import random
import re
from itertools import groupby
from typing import Any

from tuner.errors import WorkloadError

MAX_SEQUENCES = 100_000  # of one workload, as of the documents of a pattern
MAX_LENGTHS_TEXT = 1_000_000  # characters

_FORMS = "write numbers as 512,1024*3 (three of 1024), a list of whole numbers, or mean=2048,seed=0"


def read(value: Any, batch: Any, name: str) -> tuple[Any, ...]:
    """Return the lengths that ``value`` gives: a list as it is, a text of lengths, or ``mean`` and ``seed``.

    Drawn lengths are uniform in [mean / 2, 3 mean / 2], one for each of ``batch``, as
    ``tuner.pattern.document_lengths`` draws them.

    Raises:
        WorkloadError: for what is neither, and where ``batch`` is needed and missing.
    """
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if not isinstance(value, str) or len(value) > MAX_LENGTHS_TEXT:
        raise WorkloadError(f"{name} is {value!r:.80}; {_FORMS}")
    drawn = re.fullmatch(r"\s*mean\s*=\s*([0-9]{1,9})\s*(?:,\s*seed\s*=\s*([0-9]{1,18})\s*)?", value)
    if drawn:
        return _draw(int(drawn[1]), int(drawn[2] or 0), batch, f"{name} {value!r}")
    items = [
        re.fullmatch(r"\s*([0-9]{1,9})\s*(?:\*\s*([0-9]{1,9})\s*)?", item) for item in value.strip("[] ").split(",")
    ]
    if not all(items):
        raise WorkloadError(f"{name} is {value!r:.80}; {_FORMS}")
    runs = [(int(m[1]), int(m[2] or 1)) for m in items if m]
    if sum(times for _, times in runs) > MAX_SEQUENCES:
        raise WorkloadError(f"{name} {value!r:.80} has over {MAX_SEQUENCES} sequences; give fewer")
    return tuple(length for length, times in runs for _ in range(times))


def fill(values: dict[str, Any]) -> dict[str, Any]:
    """Return a workload's fields with lengths written out, and what follows from them where it is left out.

    Raises:
        WorkloadError: if they contradict each other, or are no lengths.
    """
    names = [n for n in ("lengths", "lengths_q", "lengths_k") if values.get(n) is not None]
    out = {k: v for k, v in values.items() if k not in ("lengths", "lengths_q", "lengths_k")}
    if not names:
        return out
    if "lengths" in names and len(names) > 1:
        raise WorkloadError(f"lengths and {names[1]} contradict each other; give lengths, or lengths_q and lengths_k")
    both = ("lengths_q", "lengths_k")
    given = {
        n: read(values[m], values.get("batch"), m)
        for n in both
        if (m := "lengths" if "lengths" in names else n) in names
    }
    missing = [n for n in both if n not in given]
    if missing:
        raise WorkloadError(f"{missing[0]} is missing beside {names[0]}; give both, or lengths for both")
    out.setdefault("layout", "varlen")
    out.setdefault("batch", len(given["lengths_q"]))
    for name, longest in (("lengths_q", "seqlen_q"), ("lengths_k", "seqlen_k")):
        wrong = next((n for n in given[name] if type(n) is not int), None)
        if wrong is not None:
            raise WorkloadError(f"{name} has a length of {wrong!r:.40}; lengths are whole numbers")
        if given[name]:
            out.setdefault(longest, max(given[name]))
    return out | given


def _draw(mean: int, seed: int, batch: Any, what: str) -> tuple[int, ...]:
    if type(batch) is not int or not 1 <= batch <= MAX_SEQUENCES:
        raise WorkloadError(f"{what} draws a length for each of batch, which is {batch!r}; give 1 to {MAX_SEQUENCES}")
    if mean < 1:
        raise WorkloadError(f"{what} has mean {mean}; it must be at least 1")
    rng = random.Random(seed)
    return tuple(rng.randint(max(1, mean // 2), mean + mean // 2) for _ in range(batch))


def text(lengths: tuple[int, ...]) -> str:
    """Return the canonical text of lengths, repetitions counted: ``512*3,100``."""
    runs = ((length, sum(1 for _ in same)) for length, same in groupby(lengths))
    return ",".join(f"{length}*{times}" if times > 1 else str(length) for length, times in runs)


def ragged(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], causal: bool, seed: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return other lengths that the same compiled kernels and the same memory serve, drawn from ``seed``.

    As many sequences in another order, each at most as long as it was and at least half, but one that
    keeps the longest queries and one that keeps the longest keys. Equal lengths of queries and keys stay
    equal, empty sequences empty; under ``causal`` no queries outnumber their keys.
    """
    rng = random.Random(seed)
    order = list(range(len(lengths_q)))
    rng.shuffle(order)
    keep_q, keep_k = lengths_q.index(max(lengths_q)), lengths_k.index(max(lengths_k))
    out: list[tuple[int, int]] = []
    for i in order:
        q, k = lengths_q[i], lengths_k[i]
        if lengths_q == lengths_k:
            k = q = q if i == keep_q else rng.randint(-(-q // 2), q)
        else:
            k = k if i == keep_k or (causal and i == keep_q) else rng.randint(-(-k // 2), k)
            q = q if i == keep_q else rng.randint(-(-q // 2), q)
            q = min(q, k) if causal else q
        out.append((q, k))
    return tuple(q for q, _ in out), tuple(k for _, k in out)
