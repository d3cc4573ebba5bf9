"""``flashtune submit``: hand workloads to the service, and follow them if asked to."""

from __future__ import annotations

from typing import Annotated

import typer

from api import options as o
from api import watching
from api.service import open_service
from tuner.job import JobRequest
from tuner.spec import StudySettings


def submit(
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
    arch: Annotated[
        str, typer.Option("--arch", help="Where to measure: sm_90a, sm_100a, cpu, ...; auto: any machine that can.")
    ] = "auto",
    policy: o.PolicyOption = "auto",
    family: o.FamilyOption = None,
    trials: o.TrialsOption = StudySettings.max_trials,
    seconds: o.SecondsOption = StudySettings.max_seconds,
    margin: o.MarginOption = StudySettings.margin,
    priority: Annotated[int, typer.Option("--priority", help="-100 to 100; higher is served first.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again even if the database knows the answer.")
    ] = False,
    name: Annotated[str, typer.Option("--name", help="A name for people to know the job by.")] = "",
    idempotency_key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="Any text: the same submission under the same key makes one job."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the job to its end, as `watch` does.")] = False,
    url: o.UrlOption = None,
    db: o.DatabaseOption = None,
    json: o.JsonOption = False,
) -> None:
    """Submit one workload, or a file of them, to be tuned; print the job's id.

    With --json --watch there is one JSON document a line: the job, then its events.
    """
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
    own = {named.policy for named in workloads}
    request = JobRequest(
        workloads=tuple(workloads),
        arch=arch,
        policy=own.pop() or policy if len(own) == 1 else policy,
        families=tuple(family or ()),
        settings=StudySettings(max_trials=trials, max_seconds=seconds, margin=margin),
        priority=priority,
        force=force,
        name=name,
    )
    with open_service(url, db, create=True) as service:
        job, created = service.submit(request, idempotency_key)
        if json:
            document = {**job, "created": created}
            o.print_json_line(document) if watch else o.print_json(document)
        else:
            print(job["id"], flush=True)
            text = f"submitted {len(workloads)} workload(s)" if created else "submitted before under this key"
            next_step = "" if watch else f"; follow it by `flashtune watch {job['id']}`"
            o.stderr.print(text + next_step, markup=False, highlight=False, soft_wrap=True)
        if watch:
            watching.follow(service, job["id"], json=json)
