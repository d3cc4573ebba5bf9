"""Tables for people: outcomes of tuning, trials of a study, jobs, API keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from db.values import ApiKey, JobState
from tuner.config import Config
from tuner.trial import Finalist, Trial, TunedConfig, Verdict
from tuner.workload import Workload
from workers.runner import Outcome

_UNTUNABLE = (
    "flex_flash_stock",
    "flex_flash_sm100_stock",
    "flex_triton_stock",
    "flex_triton_autotune",
    "cudnn",
    "sdpa_cpu",
)


def outcome_tables(outcomes: Iterable[Outcome]) -> Iterator[Table]:
    """Yield one table a workload that came to an answer: rivals, winner, intervals, verdict."""
    for outcome in outcomes:
        if outcome.tuned is not None:
            yield finals_table(outcome.named.name, outcome.named.workload, outcome.tuned)


def finals_table(name: str, workload: Workload, tuned: TunedConfig) -> Table:
    """Return the finals: one row a finalist, fastest first."""
    note = f"{tuned.rounds} paired rounds, intervals at {tuned.confidence:.0%} over all, margin {tuned.margin:.0%}"
    if any(f.parts_us for f in tuned.finalists):
        note += "; the parts were timed apart, so they need not add up"
    table = Table(
        title=f"{escape(name)}: {_verdict_text(tuned)}",
        title_justify="left",
        caption=note,
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("kernel", overflow="fold")
    parts = dict.fromkeys(name for f in tuned.finalists for name in f.parts_us)
    for column in ("median us", *(f"{name} us" for name in parts), "TFLOP/s", "vs default", "interval", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for f in sorted(tuned.finalists, key=lambda f: -f.speedup):
        table.add_row(
            kernel_name(f.config),
            f"{f.median_us:.1f}",
            *(f"{f.parts_us[name]:.1f}" if name in f.parts_us else "" for name in parts),
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
    tunable = config.family not in _UNTUNABLE
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


def jobs_table(jobs: Iterable[Mapping[str, Any]]) -> Table:
    """Return one line a job, from ``Job.to_dict()``."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("id", "name", "state"):
        table.add_column(column, overflow="fold", no_wrap=column != "name")
    for column in ("done", "age", "priority"):
        table.add_column(column, justify="right", no_wrap=True)
    for job in jobs:
        counts = job["counts"]
        table.add_row(
            job["id"],
            escape(job["name"]),
            job["state"],
            f"{counts.get(JobState.DONE, 0)} of {sum(counts.values())}",
            age_text(datetime.now(UTC) - datetime.fromisoformat(job["created_at"])),
            str(job["priority"]),
        )
    return table


def job_table(job: Mapping[str, Any]) -> Table:
    """Return one line a workload of a job, from ``Job.to_dict()``."""
    name = f" ({job['name']})" if job["name"] else ""
    table = Table(
        title=escape(f"job {job['id']}{name}: {job['state']}"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("workload", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("study", no_wrap=True)
    table.add_column("trials", justify="right", no_wrap=True)
    for column in ("answer", "error"):
        table.add_column(column, overflow="fold")
    for item in job["items"]:
        table.add_row(
            escape(item["name"]),
            item["state"],
            item["study_id"] or "",
            str(item["trials"]) if item["study_id"] else "",
            escape(answer_text(item["answer"])) if item["answer"] else "",
            escape(item["error"]),
        )
    return table


def answer_text(answer: Mapping[str, Any]) -> str:
    """Return an answer, as ``answer_dict`` has it, in a few words: the winner and its interval, or the default."""
    if answer["verdict"] == Verdict.KEPT_DEFAULT:
        return f"keep the default ({answer['label']})"
    return f"{answer['label']} {answer['speedup']:.3f}x [{answer['low']:.3f}, {answer['high']:.3f}]"


def keys_table(keys: Iterable[ApiKey]) -> Table:
    """Return one line a key; its text is not known."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("id", "name", "begins", "scopes", "a minute", "made (UTC)", "last used", "revoked"):
        table.add_column(column, overflow="fold", no_wrap=column == "id")
    for key in keys:
        times = (key.created_at, key.last_used_at, key.revoked_at)
        table.add_row(
            key.id,
            escape(key.name),
            key.prefix,
            ", ".join(key.scopes),
            "" if key.rate_per_minute is None else str(key.rate_per_minute),
            *("" if at is None else f"{at:%Y-%m-%d %H:%M}" for at in times),
        )
    return table


def age_text(age: timedelta) -> str:
    """Return an age in its largest unit, as ``5 min``; one from a clock ahead of ours is ``0 s``."""
    seconds = max(0, int(age.total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


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
