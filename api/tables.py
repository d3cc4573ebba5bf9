"""Tables for people: outcomes of tuning, trials of a study, compiled configs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from tuner.config import Config
from tuner.trial import Finalist, Trial, TunedConfig, Verdict
from tuner.workload import Workload
from workers.runner import Outcome


def outcome_tables(outcomes: Iterable[Outcome]) -> Iterator[Table]:
    """Yield one table a workload that came to an answer: rivals, winner, intervals, verdict."""
    for outcome in outcomes:
        if outcome.tuned is not None:
            yield finals_table(outcome.named.name, outcome.named.workload, outcome.tuned)


def finals_table(name: str, workload: Workload, tuned: TunedConfig) -> Table:
    """Return the finals: one row a finalist, fastest first."""
    note = f"{tuned.rounds} paired rounds, intervals at {tuned.confidence:.0%} over all, margin {tuned.margin:.0%}"
    table = Table(
        title=f"{escape(name)}: {_verdict_text(tuned)}",
        title_justify="left",
        caption=note,
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("kernel", overflow="fold")
    for column in ("median us", "TFLOP/s", "vs default", "interval", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for f in sorted(tuned.finalists, key=lambda f: -f.speedup):
        table.add_row(
            kernel_name(f.config),
            f"{f.median_us:.1f}",
            f"{workload.flops() / f.median_us / 1e6:.4g}",
            f"{f.speedup:.3f}x",
            escape(f"[{f.low:.3f}, {f.high:.3f}]"),
            "" if f.error is None else f"{f.error:.1e}",
            _role(f, tuned),
            style="bold" if f.config == tuned.config else None,
        )
    return table


def kernel_name(config: Config) -> str:
    """Return a family with its config, as ``fa4_fwd_sm90 128x96 native rs``; stock goes unsaid for rivals."""
    tunable = config.family not in ("flex_flash_stock", "flex_triton_stock", "cudnn", "sdpa_cpu")
    return f"{config.family} {config.label}" if tunable else config.family


def trials_table(trials: Sequence[Trial]) -> Table:
    """Return every trial with its status: measured ones fastest first, then the failures."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("#", "status", "kernel"):
        table.add_column(column, overflow="fold")
    for column in ("median us", "vs default", "error", "regs", "spill", "smem", "compile s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    number = {t.config.key: i for i, t in enumerate(trials, start=1)}
    for t in sorted(trials, key=lambda t: (t.ratio is None, -(t.ratio or 0.0), number[t.config.key])):
        r = t.resources
        table.add_row(
            str(number[t.config.key]),
            str(t.status),
            kernel_name(t.config),
            "" if t.measurement is None else f"{t.measurement.median_us:.1f}",
            "" if t.ratio is None else f"{t.ratio:.3f}x",
            "" if t.verification is None else f"{t.verification.error:.1e}",
            *("" if x is None else str(x) for x in (r.registers, r.spill_bytes, r.smem_bytes)),
            "" if t.compile_s is None else f"{t.compile_s:.1f}",
            escape((t.error or "; ".join(t.notes)).split("\n")[0]),
        )
    return table


def _verdict_text(tuned: TunedConfig) -> str:
    what = kernel_name(tuned.config)
    if tuned.verdict is Verdict.KEPT_DEFAULT:
        text = f"kept default ({what}): {tuned.reason}"
    else:
        text = f"published {what}: {tuned.reason}"
    if tuned.ties:
        text += f"; ties: {len(tuned.ties)}"
    return escape(text)


def _role(f: Finalist, tuned: TunedConfig) -> str:
    roles = []
    if f.config == tuned.config:
        roles.append("winner")
    if f.config == tuned.default:
        roles.append("default")
    elif f.config in tuned.ties:
        roles.append("tie")
    elif f.config.is_stock:
        roles.append("rival")
    return ", ".join(roles)
