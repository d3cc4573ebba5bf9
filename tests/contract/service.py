"""What the tests of the service's store share: jobs that are under way, and functions that run as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from sqlalchemy import text

from db import events
from db.planning import FINALS, NewWork
from db.store import Store
from db.values import Claim, Job, JobEvent
from tests.contract.test_store import raw_connection
from tuner.config import Config
from tuner.errors import StaleClaim
from tuner.job import JobRequest
from tuner.spec import StudySpec
from tuner.target import Toolchain, named
from tuner.trial import Measurement, Trial, TrialStatus, TunedConfig, Verdict
from tuner.workload import Workload

CLASS, COMPILE = "fake.measure", "fake.compile"


def request(*batches: int, **fields: object) -> JobRequest:
    """Return a job with a workload for each batch size."""
    base = {"heads_q": 2, "heads_kv": 2, "seqlen_q": 64, "seqlen_k": 64, "head_dim": 8}
    workloads = [{"name": f"b{batch}", "batch": batch, **base} for batch in batches or (1,)]
    return JobRequest.from_dict({"arch": "fake", "workloads": workloads, **fields})


def spec(workload: Workload) -> StudySpec:
    return StudySpec(workload, named("fake"), Toolchain(), "graph", ("fake/1",))


def bind(store: Store, job: Job, class_key: str = CLASS) -> list[str]:
    """Give every waiting item of a job its study."""
    items = [item for item in store.planning.waiting(1000) if item.job_id == job.id]
    found = [store.planning.bind(item.id, spec(item.workload), class_key, COMPILE) for item in items]
    assert None not in found
    return [study_id for study_id in found if study_id]


def config(variant: int) -> Config:
    return Config.make("fake", 1, variant=variant)


def plan(store: Store, study_id: str, variants: Sequence[int], stage: str = "measure", *, finals: bool = False) -> None:
    guard = store.planning.planned(study_id).guard
    work = [NewWork(config(v), stage, 0) for v in variants]
    assert store.planning.plan(study_id, guard, work, finals=finals)


def started(
    store: Store, *batches: int, configs: int = 4, stage: str = "measure", **fields: object
) -> tuple[Job, list[str]]:
    """Return a job and its studies, each with configs to try."""
    job, _ = store.jobs.submit(request(*batches, **fields))
    studies = bind(store, job)
    for study_id in studies:
        plan(store, study_id, range(configs), stage)
    return store.jobs.get(job.id), studies


def claim(store: Store, worker: str = "w1", stage: str = "measure", **more: object) -> Claim:
    """Claim one piece of work, which must be there."""
    key = COMPILE if stage == "compile" else CLASS
    (found,) = store.work.claim(worker, stage=stage, keys=[key], **more)  # type: ignore[arg-type]
    return found


def good(config: Config | None, ratio: float = 1.5) -> Trial:
    assert config is not None
    measured = Measurement("graph", (10.0, 10.5), (15.0, 15.75), ratio, 10.25)
    return Trial(config, TrialStatus.OK, "", 1.0, 2.0, measurement=measured)


def tuned(variant: int = 0) -> TunedConfig:
    return TunedConfig(
        config=config(variant),
        default=Config.make("fake", 1),
        verdict=Verdict.PUBLISHED,
        speedup=1.5,
        low=1.4,
        high=1.6,
        confidence=0.95,
        margin=0.02,
        ties=(),
        finalists=(),
        verification=None,
        reason="faster",
        rounds=20,
        rounds_dropped=0,
    )


def finish(store: Store, study_id: str, variant: int = 0) -> None:
    """Plan a study's finals and run them."""
    plan(store, study_id, [], finals=True)
    found = claim(store, open_studies=[study_id])
    while found.kind != FINALS or found.study_id != study_id:
        store.work.commit_trial(found, good(found.config), 0.0)
        found = claim(store, open_studies=[study_id])
    store.work.commit_finals(found, tuned(variant), {})


def expire(url: str) -> None:
    """Let every lease have run out."""
    with raw_connection(url) as raw:
        raw.execute(text("UPDATE work SET lease_until = 1 WHERE state = 'leased'"))


def column(url: str, query: str) -> list[object]:
    """Return the first column of a query, asked behind the store's back."""
    with raw_connection(url) as raw:
        return list(raw.scalars(text(query)))


def events_of(store: Store, url: str, ref: str | None = None, after: str = "") -> list[JobEvent]:
    """Return events once every committed one can be seen: other transactions on the server may hold them up."""
    where = f" WHERE job_id = '{ref}'" if ref else ""
    (count,) = column(url, f"SELECT count(*) FROM events{where}")
    deadline = time.monotonic() + 60
    while len(store.jobs.events(ref, limit=10_000)) != count:
        assert time.monotonic() < deadline, f"{count} events are stored and not all can be seen"
        time.sleep(0.02)
    return store.jobs.events(ref, after=after, limit=10_000)


# -- run as processes of their own


def process(function: str, *args: str) -> subprocess.Popen[str]:
    code = f"import sys; from tests.contract.service import {function} as f; f(*sys.argv[1:])"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *args]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)


def work_until_done(url: str, worker: str) -> None:
    """Claim once, say so and wait; then claim and commit until nothing is left, and print the claims' numbers."""
    with Store.open(url) as store:
        found = store.work.claim(worker, stage="measure", keys=[CLASS], limit=3)
        print("holding", flush=True)
        sys.stdin.readline()
        while found:
            for one in found:
                store.work.commit_trial(one, good(one.config), 0.1)
                print(one.id, flush=True)
            found = store.work.claim(worker, stage="measure", keys=[CLASS], limit=3)


def submit_and_die(url: str) -> None:
    """Be killed within the transaction of a submission, at its last statement."""
    events.add = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with Store.open(url) as store:
        store.jobs.submit(request(1, 2), idempotency_key="k")


def claim_and_die(url: str, worker: str) -> None:
    with Store.open(url) as store:
        found = claim(store, worker, begin=True)
        print(found.id, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def refused(call: object, *args: object) -> bool:
    """Tell whether a call was refused as stale."""
    assert callable(call)
    try:
        call(*args)
    except StaleClaim:
        return True
    return False
