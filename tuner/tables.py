"""Recorded tables: what each config of a workload took, as a search would have measured it.

A cell is one workload with the times of one family's configs. Cells come from

- ``.jsonl``, also gzipped: the trials of studies, one a line with its workload
  (``benchmarks/results/*/trials-*.jsonl.gz``), or an exhaustive sweep of FA4's forward
  (``tests/fixtures/h200_fa4_fwd_sweep.jsonl``);
- ``.json``: Kernel Tuner's T4 (``tuner.t4``).

    >>> cells = read([Path("tests/fixtures/h200_fa4_fwd_sweep.jsonl")])
    >>> len(cells), len(cells[0].rows), cells[0].best.config.label
    (8, 61, '128x128 overlap native rs stages=2')
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.config import Config, Param
from tuner.errors import FlashtuneError, InputError
from tuner.families import load
from tuner.pattern import parse
from tuner.target import Target, named
from tuner.trial import Measurement, Trial, TrialStatus
from tuner.workload import KEY_VERSION, Workload

_SWEPT = ("tile_m", "tile_n", "mma_pv_is_rs", "intra_wg_overlap", "num_stages")
# What the sweep's tunables do not say: native masks, a BlockMask of none, no packed heads.
_NOT_SWEPT: dict[str, Param] = {"mask": "native", "q_blocks": 1, "pack_gqa": False}
# FA4's stock tiles for the head dims that were swept. The sweep measured "config null" once, first, on a
# GPU in another state: it reads up to 11% slower or 6% faster than the same kernel under its own name.
_STOCK_TILES = {64: (192, 128), 128: (128, 128)}


@dataclass(frozen=True)
class Row:
    """One config and what came of it; ``time_us`` is None exactly if it failed."""

    config: Config
    status: TrialStatus
    time_us: float | None
    samples_us: tuple[float, ...] = ()
    compile_s: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Cell:
    """One workload's table. ``default_us`` is the time of the family's stock config, None if unknown.

    Raises InputError on construction if nothing in it worked, or a config is there twice.
    """

    name: str
    workload: Workload | None  # None in a table made elsewhere: it has no neighbours
    target: Target
    rows: tuple[Row, ...]
    default_us: float | None = None
    policy: str = "graph"

    def __post_init__(self) -> None:
        if not any(r.time_us for r in self.rows):
            raise InputError(
                f"cell {self.name}: none of its {len(self.rows)} configs has a time; record some that work"
            )
        seen: set[str] = set()
        names = {k for k, _ in self.rows[0].config.params}
        tunables = ", ".join(sorted(names))
        for config in (r.config for r in self.rows):
            if config.key in seen:
                raise InputError(f"cell {self.name}: config {config.label} is there twice; keep one of them")
            if config.is_stock or {k for k, _ in config.params} != names:
                raise InputError(
                    f"cell {self.name}: config {config.label} has not the tunables of the others ({tunables})"
                )
            seen.add(config.key)

    @property
    def best(self) -> Row:
        """The fastest row; the first of equals."""
        return min((r for r in self.rows if r.time_us), key=lambda r: r.time_us or math.inf)

    @property
    def least_us(self) -> float:
        """The best time in the table, the default's included: what regret is relative to."""
        return min(self.best.time_us or math.inf, self.default_us or math.inf)

    @property
    def family(self) -> tuple[str, int]:
        return self.rows[0].config.family, self.rows[0].config.version

    def trial(self, row: Row, reference_us: float) -> Trial:
        """Return a row as the trial that a study would have stored, beside a default of ``reference_us``."""
        if row.time_us is None:
            return Trial(row.config, row.status, row.error, row.compile_s)
        ratio = reference_us / row.time_us
        measured = Measurement(self.policy, (row.time_us,), (reference_us,), ratio, row.time_us)
        return Trial(row.config, TrialStatus.OK, "", row.compile_s, measurement=measured)

    def stock_trial(self) -> Trial | None:
        """Return the stock config's trial, if its time is known."""
        if self.default_us is None:
            return None
        stock = Row(Config.make(*self.family), TrialStatus.OK, self.default_us)
        return self.trial(stock, self.default_us)


def read(paths: Sequence[Path]) -> list[Cell]:
    """Return the cells of all files, in their order.

    Raises:
        InputError: naming the file, the line, what is wrong with it, and what to do.
    """
    from tuner import t4

    cells = []
    for path in paths:
        text = _text(path)
        try:
            cells += [t4.loads(text, path.stem)] if path.suffix == ".json" else _lines(text)
        except FlashtuneError as e:
            raise InputError(f"{path}: {e}") from None
    return cells


def from_trials(workload: Workload, target: Target, trials: Sequence[Trial], policy: str = "graph") -> list[Cell]:
    """Return a cell for each family of a study that has tuned configs with a time.

    A row's time is the stock config's divided by the ratio that was measured beside the default, so
    that what the machine did meanwhile is out of it.
    """
    cells = []
    for family in sorted({(t.config.family, t.config.version) for t in trials if not t.config.is_stock}):
        mine = [t for t in trials if (t.config.family, t.config.version) == family]
        if any(t.ratio for t in mine if not t.config.is_stock):
            cells.append(_family_cell(workload, target, mine, policy))
    return cells


def finite_us(value: Any, what: str, scale: float = 1.0) -> float:
    """Return a time in microseconds. Raises InputError unless it is a number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{what} is {value!r}; a time is a finite number above 0 (leave out what was not measured)")
    return float(value) * scale


def _family_cell(workload: Workload, target: Target, mine: list[Trial], policy: str) -> Cell:
    defaults = sorted(d for t in mine if t.measurement for d in t.measurement.default_us)
    default_us = defaults[len(defaults) // 2]  # of the study: the same kernel beside every config
    stock = next((t for t in mine if t.config.is_stock and t.ratio), None)
    rows = [
        Row(
            t.config,
            t.status,
            default_us / t.ratio if t.ratio else None,
            t.measurement.samples_us if t.measurement else (),
            t.compile_s,
            t.error,
        )
        for t in mine
        if not t.config.is_stock
    ]
    stock_us = default_us / stock.ratio if stock and stock.ratio else None
    return Cell(f"{workload.label} {mine[0].config.family}", workload, target, tuple(rows), stock_us, policy)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
        raise InputError(f"cannot read the table {path}: {getattr(e, 'strerror', None) or e}") from None


def _lines(text: str) -> list[Cell]:
    rows = list(_rows(text))
    if rows and "about" in rows[0][1]:
        del rows[0]  # says where the table is from
    if not rows:
        raise InputError("holds no rows; record a table, one JSON object a line")
    return _study_cells(rows) if "workload" in rows[0][1] else _sweep_cells(rows)


def _rows(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise InputError(f"line {number} is not JSON ({e.msg}); write one JSON object a line") from None
        if not isinstance(row, dict):
            raise InputError(f"line {number} is {row!r:.60}; write one JSON object a line")
        yield number, row


def _sweep_cells(rows: list[tuple[int, dict[str, Any]]]) -> list[Cell]:
    cells: dict[Workload, list[Row]] = {}
    for number, row in rows:
        try:
            workload = _swept_workload(row)
            found = cells.setdefault(workload, [])
            time_us = finite_us(row["median_ms"], "median_ms", 1e3)
            if (config := row["config"]) is not None:
                found.append(Row(_swept_config(config), TrialStatus.OK, time_us))
        except KeyError as e:
            raise InputError(f"line {number} lacks the field {e}; a sweep's row needs it") from None
        except FlashtuneError as e:
            raise InputError(f"line {number}: {e}") from None
    return [_sweep_cell(workload, tuple(found)) for workload, found in cells.items()]


def _sweep_cell(workload: Workload, rows: tuple[Row, ...]) -> Cell:
    tiles = _STOCK_TILES.get(workload.head_dim)
    twin = dict(zip(_SWEPT, (*tiles, True, True, 2), strict=True)) if tiles else {}
    default_us = next((r.time_us for r in rows if twin and twin.items() <= dict(r.config.params).items()), None)
    return Cell(workload.label, workload, named("sm_90a"), rows, default_us)


def _swept_workload(row: Mapping[str, Any]) -> Workload:
    return Workload(
        batch=row["batch"],
        heads_q=row["heads"],
        heads_kv=row["heads"],
        seqlen_q=row["seqlen"],
        seqlen_k=row["seqlen"],
        head_dim=row["head_dim"],
        pattern=parse("causal" if row["causal"] else "full"),
    )


def _swept_config(config: Any) -> Config:
    if not isinstance(config, dict) or set(config) != set(_SWEPT):
        raise InputError(f"config is {config!r:.120}; a sweep's has {', '.join(_SWEPT)}")
    return Config.make("fa4_fwd_sm90", load("fa4_fwd_sm90").version, **config, **_NOT_SWEPT)


def _study_cells(rows: list[tuple[int, dict[str, Any]]]) -> list[Cell]:
    studies: dict[str, dict[str, Trial]] = {}
    for number, row in rows:
        try:
            trial = Trial.from_dict(row)
            if trial.measurement is not None:
                finite_us(trial.measurement.ratio, "measurement.ratio")
            studies.setdefault(row["workload"], {})[trial.config.key] = trial
        except (KeyError, TypeError, ValueError) as e:
            raise InputError(f"line {number} is no trial ({e!r:.80}); see benchmarks/results for some") from None
        except FlashtuneError as e:
            raise InputError(f"line {number}: {e}") from None
    cells = []
    for key, trials in studies.items():
        arch = "sm_90a" if any("sm90" in t.config.family for t in trials.values()) else "cpu"
        cells += from_trials(workload_of_key(key), named(arch), list(trials.values()))
    return cells


def workload_of_key(key: str) -> Workload:
    """Return the workload whose ``key`` this is. Raises InputError if it is none."""
    version, _, rest = key.partition("|")
    fields = rest.split("|", 11)
    prefixes = ("", "", "b", "hq", "hkv", "sq", "sk", "d", "dv", "", "det", "")
    if version != KEY_VERSION or len(fields) != 12 or not all(map(str.startswith, fields, prefixes)):
        raise InputError(f"workload is {key!r:.80}; it must be a workload's key, as {KEY_VERSION}|fwd|bfloat16|b2|...")
    op, dtype, *sizes, layout, deterministic, pattern = (f[len(p) :] for f, p in zip(fields, prefixes, strict=True))
    layout, _, sequences = layout.rstrip(")").partition("(")
    # one side stands for both
    sides = zip(("lengths_q", "lengths_k"), (sequences.split(";") * 2)[:2], strict=True) if sequences else ()
    names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
    try:
        shape = {name: int(size) for name, size in zip(names, sizes, strict=True)}
    except ValueError:
        raise InputError(f"workload is {key!r:.80}; its sizes must be whole numbers") from None
    others = {"op": op, "dtype": dtype, "layout": layout, "deterministic": deterministic == "1", "pattern": pattern}
    return Workload.from_dict({**shape, **others, **dict(sides)})
