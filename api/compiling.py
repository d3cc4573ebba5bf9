"""``flashtune compile``: cross-compile a family's configs without a GPU and show what they take."""

from __future__ import annotations

import time
from concurrent.futures import as_completed
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from api import options as o
from api.tables import kernel_name
from tuner import families
from tuner.compile import Compiled, CompilePool
from tuner.config import Config
from tuner.errors import InputError
from tuner.spec import StudySettings
from tuner.target import Target, named, toolchain
from tuner.trial import TrialStatus
from tuner.workload import Workload
from workers.settings import Settings


def compile_configs(
    ctx: typer.Context,
    target: Annotated[str, typer.Option("--target", "-t", help="What to compile for, as sm_90a.")] = "sm_90a",
    family: Annotated[
        str | None, typer.Option("--family", "-f", help="Kernel family; default: the target's tunable one.")
    ] = None,
    pattern: o.PatternOption = "causal",
    batch: o.BatchOption = 1,
    heads: o.HeadsOption = 16,
    heads_kv: o.HeadsKvOption = None,
    seqlen: o.SeqlenOption = 4096,
    seqlen_k: o.SeqlenKOption = None,
    lengths: o.LengthsOption = None,
    lengths_q: o.LengthsQOption = None,
    lengths_k: o.LengthsKOption = None,
    head_dim: o.HeadDimOption = 128,
    head_dim_v: o.HeadDimVOption = None,
    dtype: o.DtypeOption = "bfloat16",
    op: o.OpOption = "fwd",
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many configs, the stock one included.")] = 8,
    seed: Annotated[int, typer.Option(help="Which configs: they are drawn from the feasible ones.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds for one compile.")] = StudySettings.compile_timeout_s,
    json: o.JsonOption = False,
) -> None:
    """Compile configs for a GPU that need not be here; prints registers, spills and shared memory."""
    workload = o.workload_from(
        ctx,
        *(pattern, batch, heads, heads_kv, seqlen, seqlen_k, head_dim, head_dim_v, dtype, op),
        lengths=lengths,
        lengths_q=lengths_q,
        lengths_k=lengths_k,
    )
    goal = named(target)
    limits = StudySettings(compile_timeout_s=timeout, seed=seed)
    settings = Settings.from_env()
    settings.check_cache_dir()
    configs = _configs(family, workload, goal, count, seed)
    start, rows = time.monotonic(), []
    cache = settings.cache_dir / "cross" / goal.arch
    workers = max(settings.compile_workers, 2)
    with CompilePool(goal, cache, workers=min(workers, len(configs))) as pool, Progress(console=o.stderr) as progress:
        bar = progress.add_task(f"compiling {len(configs)} configs for {goal.arch}", total=len(configs))
        futures = {pool.submit(c, workload, timeout_s=limits.compile_timeout_s): c for c in configs}
        for future in as_completed(futures):
            rows.append((futures[future], future.result()))
            progress.advance(bar)
    rows.sort(key=lambda row: configs.index(row[0]))
    seconds = time.monotonic() - start
    if json:
        o.print_json(
            {
                "target": goal.to_dict(),
                "toolchain": toolchain().to_dict(),
                "workload": workload.to_dict(),
                "seconds": seconds,
                "configs": [_row_dict(config, found) for config, found in rows],
            }
        )
    else:
        o.stdout.print(_table(workload, goal, rows, seconds))
    if not any(found.status is TrialStatus.OK for _, found in rows):
        raise typer.Exit(1)


def _configs(name: str | None, workload: Workload, target: Target, count: int, seed: int) -> list[Config]:
    able, refused = families.able(workload, target)
    if name is not None:
        family = families.load(name)
        if reason := family.refuses(workload, target):
            raise InputError(f"{name} {reason}")
    else:
        tunable = [f for f in able if f.compile_in == "cpu"]
        if not tunable:
            reasons = "; ".join(f"{n} {why}" for n, why in refused.items() if families.load(n).compile_in == "cpu")
            raise InputError(f"no family compiles {workload.label} for {target.arch}: {reasons}")
        family = tunable[0]
    from tuner.search import Search  # heavy, and needed here alone

    search = Search(family, workload, target, budget=10**6, seed=seed)
    return [family.stock(workload), *search.ask(count - 1)]


def _row_dict(config: Config, found: Compiled) -> dict[str, Any]:
    return {
        "config": config.to_dict(),
        "status": str(found.status),
        "compile_s": found.seconds,
        "error": found.error,
        **found.resources.to_dict(),
    }


def _table(workload: Workload, target: Target, rows: list[tuple[Config, Compiled]], seconds: float) -> Table:
    title = f"{workload.label} for {target.arch}: {len(rows)} configs in {seconds:.1f} s"
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("kernel", "status"):
        table.add_column(column, overflow="fold")
    for column in ("registers", "spill bytes", "shared bytes", "TMEM columns", "code bytes", "compile s"):
        table.add_column(column, justify="right")
    table.add_column("why", overflow="fold")
    for config, found in rows:
        r = found.resources
        taken = (r.registers, r.spill_bytes, r.smem_bytes, r.tmem_columns, r.code_bytes)
        figures = ("" if x is None else str(x) for x in taken)
        why = escape(found.error.split("\n")[0])
        table.add_row(kernel_name(config), str(found.status), *figures, f"{found.seconds:.1f}", why)
    return table
