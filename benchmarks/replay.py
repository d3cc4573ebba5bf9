"""The search against recorded tables, beside Optuna's TPE, chance, and Kernel Tuner's strategies.

    python benchmarks/replay.py --kernel-tuner /elsewhere/bin/python --out result.json.gz --plot docs/replay.png

Kernel Tuner replays the same tables, handed over as T4, in its simulation mode; it wants an environment
of its own (``python -m venv V; V/bin/pip install kernel_tuner``). Without ``--kernel-tuner`` its rows are
left out, and the output says so. Tables of one file teach each other, never themselves. Rivals are also
shown as if they, too, had begun with the stock config (``+default``: one config less, and the better of
the two). ``--sensitivity`` halves and doubles every constant that the search's beliefs are made of.

Exits 1 if the first table misses a target: over all cells and seeds a median regret of at most 1.01, a
worst of at most 1.03, and in no cell a mean above random's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from api import options as o
from api import replay_plot
from api.replaying import cell_facts, summary
from tuner import guess, priors, surrogate, t4, tables
from tuner.replay import Replay, neighbours_of, replay, replay_all
from tuner.tables import Cell

HERE = Path(__file__).parent
TABLES = (
    HERE.parent / "tests/fixtures/h200_fa4_fwd_sweep.jsonl",
    HERE / "results/2026-12-01-h200/trials-run3.jsonl.gz",
)
OURS = ("ours", "cold", "first", "tpe", "random")
KERNEL_TUNER = (
    *("random_sample", "minimize", "basinhopping", "diff_evo", "genetic_algorithm", "greedy_mls"),
    *("ordered_greedy_mls", "greedy_ils", "dual_annealing", "mls", "pso", "simulated_annealing"),
    *("firefly_algorithm", "bayes_opt", "hybrid_vndx", "adaptive_tabu_greywolf"),
)
BESIDE = ("tpe", "random")  # also shown with the stock config
WITH_DEFAULT = "+default"
CONSTANTS = {
    priors: ("_PER_DOUBLING", "_PER_HEAD_DIM", "_PER_NAME"),
    surrogate: ("_SAME_WORD", "_STEPS", "_ADDITIVE", "_OFFSET", "_NOISE", "_OWN", "_BAD", "_SCALE"),
    guess: ("_EVIDENCE",),
}
MEDIAN, WORST = 1.01, 1.03


def kernel_tuner(python: Path, cells: Sequence[Cell], budget: int, seeds: int) -> tuple[str, list[Replay], list[str]]:
    """Return Kernel Tuner's version, its replays, and which of its strategies failed and why."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(len(cells))]
        for file, cell in zip(files, cells, strict=True):
            file.write_text(t4.dumps(cell))
        command = [str(python), str(HERE / "kernel_tuner_child.py"), str(budget), str(seeds), ",".join(KERNEL_TUNER)]
        done = subprocess.run([*command, *map(str, files)], check=True, stdout=subprocess.PIPE, text=True)
        version, *lines = map(json.loads, done.stdout.splitlines())
        found, failed = [], set[str]()
        for line in lines:
            if "error" in line:
                failed.add(f"{line['strategy']}: {line['error']}")
                continue
            cell = cells[files.index(Path(line["file"]))]
            found.append(_as_replay(cell, f"kt:{line['strategy']}", line["seed"], line["configs"]))
    return version["kernel_tuner"], found, sorted(failed)


def _as_replay(cell: Cell, strategy: str, seed: int, configs: list[dict[str, Any]]) -> Replay:
    rows = {tuple(sorted(dict(r.config.params).items())): r for r in cell.rows}
    best, regrets, keys = float("inf"), list[float](), list[str]()
    for params in configs:
        row = rows[tuple(sorted(params.items()))]
        best = min(best, row.time_us or best)
        regrets.append(best / cell.least_us)
        keys.append(row.config.key)
    return Replay(cell.name, strategy, seed, tuple(regrets), tuple(keys))


def after_default(found: Sequence[Replay], cells: Sequence[Cell], budget: int) -> list[Replay]:
    """Return rivals' replays as if each had begun with the stock config, within the same budget."""
    stock = {c.name: c.default_us / c.least_us for c in cells if c.default_us}
    return [
        Replay(
            r.cell, r.strategy + WITH_DEFAULT, r.seed, (first, *(min(first, x) for x in r.regrets[: budget - 1])), ()
        )
        for r in found
        if (first := stock.get(r.cell, float("inf")))
    ]


def targets(found: Sequence[Replay]) -> list[str]:
    """Return which targets ``ours`` misses; empty if none."""
    ours, missed = summary(found, "ours"), []
    if ours["median"] > MEDIAN:
        missed.append(f"median regret {ours['median']:.4f} is above {MEDIAN}")
    if ours["worst"] > WORST:
        missed.append(f"worst regret {ours['worst']:.4f} is above {WORST}")
    for cell in dict.fromkeys(r.cell for r in found):
        mine, chance = (summary([r for r in found if r.cell == cell], s)["mean"] for s in ("ours", "random"))
        if mine > chance:
            missed.append(f"in {cell} the mean regret {mine:.4f} is above random's {chance:.4f}")
    return missed


def suite(path: Path, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, list[Replay]]]:
    """Replay one file of tables by everything; return what to store, and the replays by strategy."""
    cells, began = tables.read([path]), time.monotonic()
    say = progress(path.name)
    found = list(replay_all(cells, OURS, budget=args.budget, seeds=args.seeds, say=say))
    noisy = list(replay_all(cells, ("ours", "random"), budget=args.budget, seeds=args.seeds, noise=0.005, say=say))
    batched = list(replay_all(cells, ("ours", "cold"), budget=args.budget, seeds=args.seeds, ahead=6, say=say))
    version, failed = "", ["not run: give --kernel-tuner PYTHON, an environment that has it"]
    if args.kernel_tuner:
        version, theirs, failed = kernel_tuner(args.kernel_tuner, cells, args.budget, args.seeds)
        found += theirs
    found += after_default([r for r in found if r.strategy in BESIDE or ":" in r.strategy], cells, args.budget)
    strategies = list(dict.fromkeys(r.strategy for r in found))
    print(f"\n{path.name}: {len(cells)} cells, {args.seeds} seeds, at most {args.budget} configs")
    summaries = [summary(found, s) for s in strategies]
    for s in sorted(summaries, key=lambda s: s["mean"]):
        print(f"  {s['strategy']:<38} median {s['median']:.4f}  mean {s['mean']:.4f}  p90 {s['p90']:.4f}  "
              f"worst {s['worst']:.4f}  configs {s['evaluated'] or args.budget:.1f}")  # fmt: skip
    document = {
        "table": path.name,
        "cells": [cell_facts(c) for c in cells],
        "kernel_tuner": version or None,
        "kernel_tuner_failures": failed,
        "summary": summaries,
        "by_cell": {c.name: [summary([r for r in found if r.cell == c.name], s) for s in strategies] for c in cells},
        "with_noise_0.005": [summary(noisy, s) for s in ("ours", "random")],
        "asked_six_ahead": [summary(batched, s) for s in ("ours", "cold")],
        "missed": targets(found),
        "wall_s": time.monotonic() - began,
        "replays": [stored(r) for r in found if not r.strategy.endswith(WITH_DEFAULT)],
    }
    for name in ("with_noise_0.005", "asked_six_ahead"):
        for s in document[name]:
            print(
                f"  {name}: {s['strategy']:<10} median {s['median']:.4f}  mean {s['mean']:.4f}  worst {s['worst']:.4f}"
            )
    return document, {s: [r for r in found if r.strategy == s] for s in strategies}


def stored(r: Replay) -> dict[str, Any]:
    """Return a replay to keep: what rivals evaluated, their own seeds say."""
    document = r.to_dict() | {"regrets": [round(x, 5) for x in r.regrets]}
    return document if r.strategy in OURS[:3] else {k: v for k, v in document.items() if k != "configs"}


def sensitivity(path: Path, budget: int) -> list[dict[str, Any]]:
    """Return ours' regret with every constant halved and doubled, one at a time."""
    cells, rows = tables.read([path]), []
    for module, names in CONSTANTS.items():
        for name in names:
            usual = getattr(module, name)
            for factor in (0.5, 2.0):
                setattr(module, name, min(usual * factor, 0.95) if usual < 1 else type(usual)(usual * factor))
                found = [replay(c, "ours", seed=0, budget=budget, neighbours=neighbours_of(c, cells)) for c in cells]
                rows.append({"constant": name, "value": getattr(module, name), **summary(found, "ours")})
                print(f"  {name} = {rows[-1]['value']:g}: mean {rows[-1]['mean']:.4f} worst {rows[-1]['worst']:.4f}")
            setattr(module, name, usual)
    return rows


def progress(name: str) -> Any:
    """Return what shows how many replays are done, every tenth of them."""

    def say(done: int, total: int) -> None:
        if done % max(1, total // 10) == 0:
            print(f"{name}: {done} of {total} replays", file=sys.stderr, flush=True)

    return say


def main() -> int:
    """Replay, print a table, and write the results and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", type=Path, default=TABLES, help="recorded tables; one suite a file")
    parser.add_argument("--budget", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--kernel-tuner", type=Path, metavar="PYTHON", help="interpreter that has kernel_tuner")
    parser.add_argument("--sensitivity", action="store_true", help="also vary the constants, on the first table")
    parser.add_argument("--out", type=Path, help="where to write the results, JSON")
    parser.add_argument("--plot", type=Path, help="where to draw the first suite, .png or .html")
    args = parser.parse_args()
    if not args.kernel_tuner:
        print("without Kernel Tuner: give --kernel-tuner PYTHON to have its strategies beside", file=sys.stderr)
    suites = [suite(path, args) for path in args.tables]
    missed = suites[0][0]["missed"]
    print("\n" + ("; ".join(f"missed: {m}" for m in missed) or "every target is met on the first table"))
    varied = sensitivity(args.tables[0], args.budget) if args.sensitivity else None
    if args.plot:
        shown = {s: r for s, r in suites[0][1].items() if not s.startswith("kt:") or not s.endswith(WITH_DEFAULT)}
        title = f"regret on {len(suites[0][0]['cells'])} recorded cells, {args.seeds} seeds each"
        replay_plot.write(args.plot, shown, args.budget, title)
    if args.out:
        document = {
            "program": "benchmarks/replay.py",
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "budget": args.budget,
            "seeds": args.seeds,
            "suites": [d for d, _ in suites],
            "sensitivity": varied,
        }
        data = json.dumps(o.plain(document), indent=1, allow_nan=False).encode()  # infinite while nothing worked
        args.out.write_bytes(gzip.compress(data, mtime=0) if args.out.suffix == ".gz" else data)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
