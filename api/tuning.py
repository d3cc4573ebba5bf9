"""``flashtune tune``: tune here and now, with a progress bar and a table at the end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from api import options as o
from api.tables import kernel_name, outcome_tables
from tuner.spec import StudySettings
from tuner.study import Event
from tuner.workload_file import NamedWorkload
from workers.runner import Outcome, Place, Runner
from workers.settings import Settings


def tune(
    ctx: typer.Context,
    file: o.FileArgument = None,
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
    deterministic: o.DeterministicOption = False,
    device: o.DeviceOption = "auto",
    policy: o.PolicyOption = "auto",
    family: o.FamilyOption = None,
    trials: o.TrialsOption = StudySettings.max_trials,
    seconds: o.SecondsOption = StudySettings.max_seconds,
    margin: o.MarginOption = StudySettings.margin,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    compile_timeout: Annotated[float, typer.Option(help="Seconds for one compile.")] = StudySettings.compile_timeout_s,
    run_timeout: Annotated[
        float, typer.Option(help="Seconds for one verify and measure.")
    ] = StudySettings.run_timeout_s,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again even if the database knows the answer.")
    ] = False,
    fake_script: o.FakeScriptOption = None,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Tune one workload, or a file of them, on what this machine has."""
    workloads = o.workloads_from(
        ctx,
        file,
        lambda: o.workload_from(
            ctx,
            *(pattern, batch, heads, heads_kv, seqlen, seqlen_k, head_dim, head_dim_v, dtype, op, deterministic),
            *(lengths, lengths_q, lengths_k),
        ),
    )
    o.check_policies(policy, workloads)
    study_settings = StudySettings(
        max_trials=trials,
        max_seconds=seconds,
        margin=margin,
        seed=seed,
        compile_timeout_s=compile_timeout,
        run_timeout_s=run_timeout,
    )
    script = o.read_script(fake_script)
    settings = Settings.from_env()
    place = Place.find(settings, device=device, policy=policy, only=family or (), script=script)
    for named in workloads:  # what is wrong with the wish is said before anything is opened or made for it
        place.spec(named)
    settings.check_cache_dir()
    with (
        o.open_store(db) as store,
        Runner(settings, store, place) as runner,
        _terminate_as_interrupt(),
    ):
        where = f"{place.target.model} ({place.target.arch})"
        o.stderr.print(f"tuning {len(workloads)} workload(s) on {where}, policy {place.policy}", highlight=False)
        outcomes = []
        with _Bars(o.stderr, len(workloads)) as bars:
            for outcome in runner.tune(workloads, study_settings, force=force, say=bars.show):
                outcomes.append(outcome)
                bars.finish(outcome)
    outcomes.sort(key=lambda x: workloads.index(x.named))
    rate = {
        "trials": runner.trials,
        "wall_s": runner.wall_s,
        "trials_per_s": runner.trials / runner.wall_s if runner.wall_s else None,
        "device_idle_share": 1 - runner.busy_s / runner.wall_s if runner.wall_s else None,
        "gpu_utilization": runner.gpu_utilization,
    }
    if json:
        o.print_json(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "target": place.target.to_dict(),
                "toolchain": place.toolchain.to_dict(),
                "policy": place.policy,
                "settings": study_settings.to_dict(),
                "rate": rate,
                "outcomes": [outcome_dict(x, place.policy) for x in outcomes],
            }
        )
    else:
        for table in outcome_tables(outcomes):
            o.stdout.print(table)
        if runner.wall_s:
            o.stderr.print(
                f"{runner.trials} configs in {runner.wall_s:.0f} s ({rate['trials_per_s']:.2f} a second, compiling "
                f"included), device idle {rate['device_idle_share']:.0%}",
                highlight=False,
            )
    if any(x.error for x in outcomes):
        raise typer.Exit(1)


def outcome_dict(outcome: Outcome, policy: str) -> dict[str, Any]:
    """Return one workload's outcome as plain JSON values; ``policy`` is that of workloads that say none."""
    return {
        "name": outcome.named.name,
        "policy": outcome.named.policy or policy,
        "workload": outcome.named.workload.to_dict(),
        "study": outcome.study_id,
        "from_database": outcome.from_database,
        "error": outcome.error,
        "tuned": outcome.tuned.to_dict() if outcome.tuned else None,
        "stats": dict(outcome.stats),
    }


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C, so that children and locks are let go."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Bars:
    """One bar for the workloads and one for the study, with the best so far."""

    def __init__(self, console: Console, workloads: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._all = self._progress.add_task("workloads", total=workloads, visible=workloads > 1)
        self._study = self._progress.add_task("starting", total=None)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, named: NamedWorkload, event: Event) -> None:
        best = ""
        if event.best is not None and event.best.ratio is not None:
            best = f"  best {event.best.ratio:.3f}x ({event.best.config.family} {event.best.config.label})"
        step = {"start": "compiling and checking the default", "finals": "finals"}.get(event.kind, "searching")
        total = max(event.total, event.done, 1)
        self._progress.update(
            self._study, description=escape(f"{named.name}: {step}{best}"), completed=event.done, total=total
        )
        trial = event.trial
        if not self._progress.console.is_terminal and trial is not None:  # a log gets a line, not a bar
            speed = "" if trial.ratio is None else f" {trial.ratio:.3f}x"
            self._progress.console.print(
                f"{named.name} [{event.done}/{event.total}] {kernel_name(trial.config)}: {trial.status}{speed}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def finish(self, outcome: Outcome) -> None:
        self._progress.advance(self._all)
        if outcome.error:
            self._progress.console.print(
                f"{outcome.named.name}: {outcome.error}", style="red", markup=False, highlight=False, soft_wrap=True
            )
        elif outcome.tuned is not None:
            known = " (from the database)" if outcome.from_database else ""
            self._progress.console.print(
                f"{outcome.named.name}: {outcome.tuned.verdict}{known}", markup=False, highlight=False, soft_wrap=True
            )
