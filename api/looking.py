"""``flashtune lookup``: what the run time would be told, and how it matched."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api import options as o
from tuner import lookup as rules
from tuner.config import Config
from tuner.spec import policy_for
from tuner.target import named, probe, toolchain
from workers.settings import Settings


def lookup(
    ctx: typer.Context,
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
    target: Annotated[
        str, typer.Option("--target", help="sm_90a, sm_100a, ..., or a device as auto, cpu, cuda:0.")
    ] = "auto",
    policy: o.PolicyOption = "auto",
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Say which config a workload gets, and whether it matched exactly, by bucket, nearest, or not."""
    workload = o.workload_from(
        ctx,
        *(pattern, batch, heads, heads_kv, seqlen, seqlen_k, head_dim, head_dim_v, dtype, op, deterministic),
        *(lengths, lengths_q, lengths_k),
    )
    here = (
        probe(target, Settings.from_env().visible_devices)
        if target in ("auto", "cpu", "fake") or target.startswith("cuda")
        else named(target)
    )
    policy = policy_for(policy, here)
    with o.open_store(db, create=False, read_only=True) as store:
        entries = store.published()
    match = rules.find(workload, here, toolchain(), policy, entries)
    if json:
        o.print_json(match.to_dict())
        return

    def say(text: str) -> None:
        o.stdout.print(text, markup=False, highlight=False)

    say(f"{workload.label} on {here.model} ({here.arch}), policy {policy}")
    say(f"match: {match.kind}")
    if match.entry is not None:
        tuned = match.entry.tuned
        say(f"config: {tuned.config.family} {tuned.config.label}")
        for name, value in tuned.extras.items():
            say(f"{name}: {_extra_text(value)}")
        interval = f"{tuned.speedup:.3f}x [{tuned.low:.3f}, {tuned.high:.3f}]"
        say(f"verdict: {tuned.verdict}, {interval} over {tuned.default.family}")
        say(f"study: {match.entry.study_id}")
    say(f"why: {match.reason}")
    for warning in match.warnings:
        o.stderr.print(f"warning: {warning}", markup=False, highlight=False)


def _extra_text(value: Any) -> str:
    """Return an extra for people: a config as its label, times by name."""
    if not isinstance(value, dict):
        return str(value)
    if "params" in value:
        config = Config.from_dict(value)
        return f"{config.family} {config.label}"
    return ", ".join(
        f"{name} {item:.1f}" if isinstance(item, float) else f"{name} {item}" for name, item in value.items()
    )
