"""Record exhaustive tables: every feasible config of a documented grid, for cells of a workload file.

    python benchmarks/exhaustive.py benchmarks/exhaustive.toml --out results --list      # count; needs no GPU
    python benchmarks/exhaustive.py benchmarks/exhaustive.toml --out results --seconds 480

Goes on where ``--out`` stands: ``exhaustive.jsonl`` has every trial so far, one a line, failures with their
status included. Cells that are whole are written to ``exhaustive.jsonl.gz``, which ``flashtune replay``
and ``flashtune tables`` read; its first line says what was fixed. The grid is the family's whole space with

forward (``fa4_fwd_sm90``)
    ``num_stages`` 2, a literal in FA4; ``mask`` FA4's own argument where the pattern has one, else a
    BlockMask; ``q_blocks`` 1, a BlockMask as fine as the tiles; ``pack_gqa`` wherever heads are grouped,
    as FA4 chooses. Left: tile_m, tile_n, mma_pv_is_rs, intra_wg_overlap.
backward (``fa4_bwd_sm90``)
    what FA4's own table has for the head dim: ``num_stages_Q`` and ``num_stages_dO`` 2, ``num_wg`` 2, the
    three atom layouts, ``dQ_single_wg``; ``q_blocks`` 1. Left: both tile sides, num_stages_PdS, three swaps.

Times are beside the family's stock config, which is in every table. Exit code 3: time was up before all
cells were whole.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tuner import families, workload_file
from tuner.compile import Compiled, CompilePool
from tuner.config import Config, Param
from tuner.errors import DefaultError, InputError
from tuner.families.base import KernelFamily
from tuner.families.fa4_tiles import mask_refused
from tuner.sandbox import Sandbox
from tuner.spec import policy_for
from tuner.target import Target, named
from tuner.trial import Trial, TrialStatus
from tuner.workload import Workload
from tuner.workload_file import NamedWorkload
from workers.device_lock import lock_device
from workers.runner import Place
from workers.settings import Settings


@dataclass(frozen=True)
class Grid:
    """One cell with everything to record for it; the stock config comes first."""

    name: str
    workload: Workload
    policy: str
    family: KernelFamily
    configs: tuple[Config, ...]


def fixed(family: str, workload: Workload) -> dict[str, Param]:
    """Return the tunables that do not vary, with their values, as the module's text says."""
    if family == "fa4_fwd_sm90":
        mask = "block" if mask_refused("native", workload) else "native"
        grouped = workload.heads_q > workload.heads_kv
        return {"num_stages": 2, "q_blocks": 1, "mask": mask, "pack_gqa": grouped}
    if family == "fa4_bwd_sm90":
        layouts = {"AtomLayoutMSdP": 1, "AtomLayoutNdKV": 2, "AtomLayoutMdQ": 2 if workload.head_dim <= 64 else 1}
        stages = {"num_stages_Q": 2, "num_stages_dO": 2}
        return {**layouts, **stages, "num_wg": 2, "dQ_single_wg": False, "q_blocks": 1}
    return {}


def grid(cell: NamedWorkload, target: Target, only: Sequence[str] = ()) -> Grid:
    """Return what to record for a cell, with the first family here that has something to tune.

    Raises:
        InputError: if none has, or the family's space lacks a fixed value.
    """
    able, refused = families.able(cell.workload, target, only)
    family = next((f for f in able if f.space(cell.workload)), None)
    if family is None:
        raise InputError(f"{cell.name}: nothing can be tuned for it on {target.arch}: {refused}")
    space = dict(family.space(cell.workload))
    for name, value in fixed(family.name, cell.workload).items():
        if value not in space[name]:
            raise InputError(f"{cell.name}: the grid fixes {name} at {value}, and the space has {space[name]}")
        space[name] = (value,)
    points = (
        Config.make(family.name, family.version, **dict(zip(space, values, strict=True)))
        for values in itertools.product(*space.values())
    )
    right = tuple(c for c in points if not family.feasible(c, cell.workload, target))
    policy = policy_for(cell.policy or "auto", target)
    return Grid(cell.name, cell.workload, policy, family, (family.stock(cell.workload), *right))


class Record:
    """The trials so far, in a file of JSON lines that a killed process leaves whole but for its last line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}
        kept: list[str] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
                self._rows[row["workload"], Trial.from_dict(row).config.key] = row
            except (ValueError, KeyError):
                continue  # cut off amid a line: measured again
            kept.append(line)
        if kept:  # without the torn line, to which the next would be appended
            half = path.with_suffix(".tmp")
            half.write_text("\n".join(kept) + "\n")
            half.replace(path)
        self._file = path.open("a")

    def add(self, cell: Grid, trial: Trial) -> None:
        row = {"workload": cell.workload.key, "policy": cell.policy, **trial.to_dict()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._rows[cell.workload.key, trial.config.key] = row

    def missing(self, cell: Grid) -> list[Config]:
        return [c for c in cell.configs if (cell.workload.key, c.key) not in self._rows]

    def write(self, path: Path, cells: Sequence[Grid], about: Mapping[str, Any]) -> None:
        """Write the cells that are whole as one table; nothing if there is none."""
        rows = [self._rows[c.workload.key, config.key] for c in cells if not self.missing(c) for config in c.configs]
        if rows:
            lines = [json.dumps({"about": dict(about)}), *map(json.dumps, rows)]
            half = path.with_name(path.name + ".tmp")
            half.write_bytes(gzip.compress("\n".join(lines).encode()))
            half.replace(path)


def record(cells: Sequence[Grid], kept: Record, pool: CompilePool, sandbox: Sandbox, deadline: float) -> bool:
    """Record what is missing, cell after cell; return whether all was recorded before the deadline."""
    todo = [(cell, kept.missing(cell)) for cell in cells if kept.missing(cell)]
    futures: list[dict[Future[Compiled], Config]] = [
        # the stock is what the others are measured beside: it is needed even where its row is there
        {pool.submit(c, cell.workload, priority=n): c for c in dict.fromkeys((cell.configs[0], *missing))}
        for n, (cell, missing) in enumerate(todo)  # all at once: compilers work ahead of the device
    ]
    for (cell, missing), asked in zip(todo, futures, strict=True):
        began, before = time.monotonic(), len(missing)
        for trial in _measured(cell, set(missing), asked, sandbox, deadline):
            kept.add(cell, trial)
        pool.forget(cell.workload)
        left, took = len(kept.missing(cell)), time.monotonic() - began
        print(f"{cell.name}: {before - left} of {before} in {took:.0f} s, {left} left", flush=True)
        if time.monotonic() > deadline:
            return not any(kept.missing(c) for c in cells)
    return not any(kept.missing(c) for c in cells)


def _measured(
    cell: Grid, missing: set[Config], asked: dict[Future[Compiled], Config], sandbox: Sandbox, deadline: float
) -> Iterator[Trial]:
    """Yield the trials of one cell in the order in which they are compiled, until the deadline."""
    stock = next(f for f, c in asked.items() if c == cell.configs[0])
    while not stock.done():
        if time.monotonic() > deadline:
            return
        wait([stock], timeout=1.0)
    if stock.result().status is not TrialStatus.OK:
        print(f"{cell.name}: its stock config does not compile: {stock.result().error}", file=sys.stderr)
        return
    try:
        bench = sandbox.open(cell.workload, cell.configs[0], cell.policy)
    except DefaultError as e:
        print(f"{cell.name}: {e}", file=sys.stderr)
        return
    left = {f: c for f, c in asked.items() if c in missing}
    while left and time.monotonic() < deadline:
        for future in wait(left, timeout=1.0, return_when=FIRST_COMPLETED).done:
            config, compiled = left.pop(future), future.result()
            if compiled.status is TrialStatus.OK:
                yield bench.attempt(config, compiled)
            else:
                yield Trial(config, compiled.status, compiled.error, compiled.seconds)
            if time.monotonic() > deadline:
                break
    bench.close()


def main() -> int:
    """Count the cells' configs, or record them."""
    args = _arguments()
    cells = workload_file.load(args.file)
    if args.list:
        grids = [grid(c, named(args.list), args.family) for c in cells]
        for g in grids:
            print(f"{len(g.configs):5} {g.family.name} {g.name}: {g.workload.label}")
        print(f"{sum(len(g.configs) for g in grids):5} configs in {len(grids)} cells")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    settings = Settings.from_env()
    settings = replace(settings, cache_dir=args.cache) if args.cache else settings
    script = args.fake_script.read_text() if args.fake_script else ""
    place = Place.find(settings, device=args.device, script=script)
    grids = [grid(c, place.target, args.family) for c in cells]
    kept = Record(args.out / "exhaustive.jsonl")
    about = {
        "program": "benchmarks/exhaustive.py",
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": place.target.to_dict(),
        "toolchain": place.toolchain.to_dict(),
        "cells": {g.name: len(g.configs) for g in grids},
        "fixed": {g.name: fixed(g.family.name, g.workload) for g in grids},
    }
    settings.cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = lock_device(settings.cache_dir, place.target)
    target, cache, workers = place.target, settings.cache_dir, settings.compile_workers
    visible = target.uuid or (str(target.device_index) if target.is_gpu else "")
    with (
        CompilePool(target, cache, workers=workers, script=script, visible_devices=visible) as pool,
        Sandbox(target, cache, script=script, visible_devices=visible) as sandbox,
    ):
        try:
            whole = record(grids, kept, pool, sandbox, deadline)
        finally:
            kept.write(args.out / "exhaustive.jsonl.gz", grids, about)
            if lock is not None:
                os.close(lock)
    return 0 if whole else 3


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="a TOML file of workloads")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="of the whole run")
    parser.add_argument("--list", nargs="?", const="sm_90a", metavar="ARCH", help="only count what would be recorded")
    parser.add_argument("--family", action="append", default=[], help="only these families")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels")
    parser.add_argument("--fake-script", type=Path, help="run the fake family by this script, for tests")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as e:
        print(f"exhaustive.py: {e}", file=sys.stderr)
        sys.exit(2)
