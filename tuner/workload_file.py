"""Workload files: TOML lists of workloads for ``flashtune tune`` and ``submit``.

Owns the file's grammar; what a workload may be is ``tuner.workload``'s.

    [defaults]                        # optional: what the workloads below do not say
    dtype = "bfloat16"
    tokens = 16384                    # batch = max(1, tokens // seqlen_q)

    [[workload]]
    name = "prefill"
    heads = 16                        # heads_q and heads_kv
    seqlen = [1024, 8192]             # seqlen_q and seqlen_k; a list makes one workload for each value
    head_dim = 128
    pattern = ["causal", "sliding_window(1024)"]

Packed sequences have ``lengths`` (or ``lengths_q`` and ``lengths_k``) and no seqlen: a list, a text as
"512,1024*3", or "mean=2048,seed=0" beside batch.

Lists may stand for seqlen, pattern, head_dim, batch, dtype and policy; several make their product, and
each workload's name tells which: ``prefill[seqlen=1024,pattern=causal]``. ``policy`` says how these
workloads are measured, graph or eager; without it the command's own policy holds.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tuner.errors import InputError, PatternError, WorkloadError
from tuner.spec import POLICIES
from tuner.workload import Workload

_INTS = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "tokens", "seqlen", "heads")
_TYPES: dict[str, type] = {
    **dict.fromkeys(_INTS, int),
    **dict.fromkeys(("op", "dtype", "pattern", "layout", "policy"), str),
    **dict.fromkeys(("lengths", "lengths_q", "lengths_k"), str),
    "deterministic": bool,
}
_LENGTHS = ("lengths", "lengths_q", "lengths_k")
_TYPE_TEXT = {int: "a whole number", str: "a text in quotes", bool: "true or false"}
_LISTS = ("seqlen", "pattern", "head_dim", "batch", "dtype", "policy")
_SHORT = {"seqlen": ("seqlen_q", "seqlen_k"), "heads": ("heads_q", "heads_kv"), "tokens": ("batch",)}


@dataclass(frozen=True)
class NamedWorkload:
    """A workload with the name that its file gives it; ``policy`` is empty where the file says none."""

    name: str
    workload: Workload
    policy: str = ""


def load(path: Path) -> list[NamedWorkload]:
    """Read a workload file, with lists expanded, in the order of the file.

    Raises:
        InputError: if the file cannot be read or is not TOML.
        WorkloadError: if what it says is not a list of distinct workloads.
    """
    document = _read(path)
    for key in document:
        _known(key, ("defaults", "workload"), f"{path}: key")
    defaults, tables = document.get("defaults", {}), document.get("workload", [])
    if not isinstance(defaults, dict):
        raise WorkloadError(f"{path}: defaults is {defaults!r}; write it as a table under [defaults]")
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise WorkloadError(f"{path}: workload is {tables!r}; write each one as a table under [[workload]]")
    if not tables:
        raise WorkloadError(f"{path}: there is no workload; add a [[workload]] table")
    _check_table(defaults, f"{path}: [defaults]")
    out = [w for i, table in enumerate(tables, 1) for w in _workloads(path, i, table, defaults)]
    _check_distinct(path, out)
    return out


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"workload file {path} does not exist; give the path of a TOML file") from None
    except OSError as e:
        raise InputError(f"cannot read workload file {path}: {e.strerror or e}; give a readable file") from None
    except UnicodeDecodeError as e:
        raise InputError(f"workload file {path} is not UTF-8 at byte {e.start}; save it as UTF-8") from None
    except (ValueError, RecursionError) as e:
        raise InputError(f"workload file {path} is not TOML: {_line(e)}; correct it there") from None


def _workloads(path: Path, number: int, table: dict[str, Any], defaults: dict[str, Any]) -> Iterator[NamedWorkload]:
    own = dict(table)
    name = own.pop("name", None)
    if not isinstance(name, str) or not name.strip():
        raise WorkloadError(f"{path}: workload number {number} has the name {name!r}; give it a name in quotes")
    where = f"{path}: workload {name!r}"
    _check_table(own, where)
    merged = _merge(defaults, own)
    axes = {k: v for k, v in merged.items() if isinstance(v, list) and k not in _LENGTHS}
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        suffix = f"[{','.join(f'{k}={v}' for k, v in chosen.items())}]" if chosen else ""
        one = {**merged, **chosen}
        policy = one.pop("policy", "")
        try:
            workload = Workload.from_dict(_long_form(one))
        except (WorkloadError, PatternError) as e:
            raise WorkloadError(f"{path}: workload {name + suffix!r}: {_line(e)}") from None
        yield NamedWorkload(name + suffix, workload, policy)


def _check_table(table: dict[str, Any], where: str) -> None:
    for key, value in table.items():
        _known(key, tuple(_TYPES), f"{where} key")
        if key in _LENGTHS and isinstance(value, list):
            continue  # Workload says what is wrong with them
        kind, many = _TYPES[key], isinstance(value, list) and key in _LISTS
        if many and not value:
            raise WorkloadError(f"{where}: {key} is an empty list; give it a value")
        # not isinstance: a bool is an int to Python, not to a person
        wrong = [v for v in (value if many else [value]) if type(v) is not kind]
        if wrong:
            lists = f"; a list may stand for {', '.join(_LISTS)}" if isinstance(wrong[0], list) else ""
            raise WorkloadError(f"{where}: {key} is {wrong[0]!r}; it must be {_TYPE_TEXT[kind]}{lists}")
        unknown = [v for v in (value if many else [value]) if key == "policy" and v not in POLICIES]
        if unknown:
            raise WorkloadError(f"{where}: policy is {unknown[0]!r}; it must be {' or '.join(POLICIES)}, or left out")
    for short, longs in _SHORT.items():
        both = [n for n in longs if n in table]
        if short in table and both:
            given = f"{short} = {table[short]!r} and {both[0]} = {table[both[0]]!r}"
            raise WorkloadError(f"{where}: {given} contradict each other; leave one out")


def _merge(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Lay ``own`` over ``defaults``, where a shorthand replaces its fields and a field its part of a shorthand."""
    merged = dict(defaults)
    for short, longs in _SHORT.items():
        if short in own:
            for n in longs:
                merged.pop(n, None)
        elif short in merged and any(n in own for n in longs):
            value = merged.pop(short)
            merged |= {n: value for n in longs}
    if any(n in own for n in _LENGTHS):  # they say how long and, but for drawn ones, how many
        replaced = {"tokens", "seqlen", "seqlen_q", "seqlen_k", *_LENGTHS}
        merged = {k: v for k, v in merged.items() if k not in replaced}
    return merged | own


def _long_form(values: dict[str, Any]) -> dict[str, Any]:
    """Write the shorthands out as the fields of a Workload."""
    out = dict(values)
    for short in ("seqlen", "heads"):
        if short in out:
            out |= dict.fromkeys(_SHORT[short], out.pop(short))
    if "tokens" in out and any(n in out for n in _LENGTHS):
        raise WorkloadError("tokens and lengths contradict each other: lengths say how many tokens there are; drop one")
    if "tokens" in out:
        tokens = out.pop("tokens")
        if tokens < 1:
            raise WorkloadError(f"tokens is {tokens}; it must be a whole number of at least 1")
        # without a usable seqlen_q any batch will do: Workload says what is wrong
        out["batch"] = max(1, tokens // max(1, out.get("seqlen_q", 1)))
    return out


def _check_distinct(path: Path, workloads: list[NamedWorkload]) -> None:
    by_key: dict[tuple[str, str], str] = {}
    names: set[str] = set()
    for w in workloads:
        if (w.workload.key, w.policy) in by_key:
            both = f"{by_key[w.workload.key, w.policy]!r} and {w.name!r}"
            raise WorkloadError(f"{path}: workloads {both} are the same ({w.workload.label}); drop one")
        if w.name in names:
            raise WorkloadError(f"{path}: two workloads have the name {w.name!r}; rename one")
        by_key[w.workload.key, w.policy] = w.name
        names.add(w.name)


def _known(key: str, known: tuple[str, ...], where: str) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise WorkloadError(f"{where} {key!r} is unknown; {hint}")


def _line(e: BaseException) -> str:
    return " ".join(str(e).split())
