"""Work under leases: claimed by one, committed once, taken back from the dead, shared out fairly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from db.store import Store
from db.values import Claim
from db.work import ATTEMPTS, DEATHS
from tests.contract.service import (
    CLASS,
    COMPILE,
    bind,
    claim,
    claim_and_die,
    column,
    config,
    events_of,
    expire,
    finish,
    good,
    plan,
    process,
    refused,
    request,
    started,
    tuned,
    work_until_done,
)
from tests.contract.test_backup import rows
from tests.contract.test_store import pipe, store, url  # noqa: F401
from tuner.artifact import Artifact
from tuner.compile import Compiled
from tuner.errors import StaleClaim
from tuner.trial import Resources, Trial, TrialStatus

# ruff: noqa: F811

ODD = "died:\0 \ud800 \N{SNOWMAN}\n" + "x" * 5000
COMPILED = Compiled(TrialStatus.OK, 2.5, "", Resources(168, 0, 1024, 2048))
ARTIFACT = Artifact.of("fake/k.o", b"object")


# -- one holder


def test_processes_that_claim_at_once_share_the_work_without_overlap(store: Store, url: str) -> None:
    job, studies = started(store, 1, 2, 3, configs=40)
    workers = [process(work_until_done.__name__, url, f"w{i}") for i in range(4)]
    for worker in workers:
        assert pipe(worker.stdout).readline() == "holding\n"
    for worker in workers:
        pipe(worker.stdin).write("go\n")
        pipe(worker.stdin).flush()
    said = [worker.communicate(timeout=120)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    done = Counter(number for numbers in said for number in numbers)
    assert set(done.values()) == {1}
    assert len(done) == 120
    assert all(len(numbers) >= 3 for numbers in said)
    for study_id in studies:
        assert Counter(t.config for t in store.study(study_id).trials()) == Counter(map(config, range(40)))
    assert Counter(e.kind for e in events_of(store, url, job.id))["trial"] == 120


def test_a_claim_is_of_one_study_and_in_the_order_of_ranks(store: Store) -> None:
    _, (first, _) = started(store, 1, 2, configs=3)
    found = store.work.claim("w1", stage="measure", keys=[CLASS], limit=10)
    assert [(c.study_id, c.config, c.epoch, c.attempts) for c in found] == [(first, config(v), 1, 1) for v in range(3)]
    assert store.work.claim("w2", stage="compile", keys=[COMPILE], limit=10) == []
    assert store.work.claim("w2", stage="measure", keys=["another"], limit=10) == []
    assert store.work.ready() == {("measure", CLASS): 3}


def test_of_many_commits_of_one_claim_one_counts(store: Store, url: str) -> None:
    job, (study_id,) = started(store, configs=1)
    found, barrier = claim(store), Barrier(8)

    def commit(number: int) -> bool:
        barrier.wait(timeout=30)
        return refused(store.work.commit_trial, found, good(found.config, float(number)), 1.0)

    with ThreadPoolExecutor(8) as pool:
        stale = list(pool.map(commit, range(1, 9)))
    assert stale.count(False) == 1
    assert [t.ratio for t in store.study(study_id).trials()] == [stale.index(False) + 1]
    assert [e.kind for e in events_of(store, url, job.id)] == ["submitted", "bound", "trial"]


# -- fencing

OPERATIONS: dict[str, tuple[str, Callable[[Store, Claim], None]]] = {
    "trial": ("measure", lambda s, c: s.work.commit_trial(c, good(c.config), 1.0)),
    "compiled": ("compile", lambda s, c: s.work.commit_compiled(c, COMPILED, [ARTIFACT])),
    "compile error": (
        "compile",
        lambda s, c: s.work.commit_compiled(c, Compiled(TrialStatus.COMPILE_ERROR, 1.0, "no", Resources())),
    ),
    "finals": ("finals", lambda s, c: s.work.commit_finals(c, tuned(), {})),
    "begin": ("measure", lambda s, c: s.work.begin(c)),
    "release": ("measure", lambda s, c: s.work.release(c, "spoiled")),
    "give back": ("measure", lambda s, c: s.work.give_back(c)),
}


@pytest.mark.parametrize("second", ["w1", "w2"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_lease_that_was_taken_back_and_given_again_changes_nothing(
    store: Store, url: str, operation: str, second: str
) -> None:
    stage, act = OPERATIONS[operation]
    if stage == "finals":
        _, (study_id,) = started(store, configs=0)
        plan(store, study_id, [], finals=True)
        stage = "measure"
    else:
        started(store, configs=1, stage=stage)
    old = claim(store, "w1", stage)
    expire(url)
    assert [e.quarantined for e in store.work.reap()] == [False]
    before = rows(url)
    with pytest.raises(StaleClaim, match=f"work {old.id} .* was taken back"):
        act(store, old)
    assert rows(url) == before
    new = claim(store, second, stage)
    assert (new.id, new.epoch) == (old.id, old.epoch + 1)
    before = rows(url)
    with pytest.raises(StaleClaim, match=f"lease {old.epoch}"):
        act(store, old)
    assert rows(url) == before
    act(store, new)
    assert rows(url) != before


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "begin"])
def test_the_same_commit_twice_is_stale(store: Store, url: str, operation: str) -> None:
    stage, act = OPERATIONS[operation]
    _, (study_id,) = started(
        store, configs=0 if stage == "finals" else 1, stage="measure" if stage == "finals" else stage
    )
    if stage == "finals":
        plan(store, study_id, [], finals=True)
    found = claim(store, stage="measure" if stage == "finals" else stage)
    act(store, found)
    before = rows(url)
    assert refused(act, store, found)
    assert rows(url) == before


def test_commits_that_race_with_the_reaper_are_either_kept_or_refused(store: Store, url: str) -> None:
    _, (study_id,) = started(store, configs=30)
    held = store.work.claim("w1", stage="measure", keys=[CLASS], limit=30)
    expire(url)
    barrier = Barrier(4)

    def commit(part: int) -> set[int]:
        barrier.wait(timeout=30)
        return {c.id for c in held[part::3] if not refused(store.work.commit_trial, c, good(c.config), 1.0)}

    def reap() -> int:
        barrier.wait(timeout=30)
        return sum(len(store.work.reap()) for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        reaper = pool.submit(reap)
        kept = set().union(*pool.map(commit, range(3)))
    assert reaper.result() + len(kept) == 30
    assert {t.config for t in store.study(study_id).trials()} == {c.config for c in held if c.id in kept}
    assert set(column(url, "SELECT id FROM work WHERE state = 'done'")) == kept
    assert store.work.ready().get(("measure", CLASS), 0) == 30 - len(kept)


def test_a_commit_after_the_lease_ran_out_counts_while_nobody_took_it_back(store: Store, url: str) -> None:
    _, (study_id,) = started(store, configs=1)
    found = claim(store)
    expire(url)
    store.work.commit_trial(found, good(found.config), 1.0)
    assert store.work.reap() == []
    assert len(store.study(study_id).trials()) == 1


# -- the way of a config


def test_compiled_work_is_handed_on_with_what_it_needs(store: Store, url: str) -> None:
    job, (study_id,) = started(store, configs=2, stage="compile")
    first, second = store.work.claim("c1", stage="compile", keys=[COMPILE], limit=2)
    assert (first.compiled, first.artifacts) == (None, ())
    store.work.commit_compiled(first, COMPILED, [ARTIFACT])
    store.work.commit_compiled(second, Compiled(TrialStatus.COMPILE_TIMEOUT, 9.5, "too long", Resources()))
    assert store.work.claim("c1", stage="compile", keys=[COMPILE]) == []
    found = claim(store)
    assert (found.config, found.compiled, found.artifacts) == (first.config, COMPILED, (ARTIFACT,))
    (failed,) = store.study(study_id).trials()
    assert (failed.config, failed.status, failed.error, failed.compile_s) == (
        second.config,
        TrialStatus.COMPILE_TIMEOUT,
        "too long",
        9.5,
    )
    assert [e.data["status"] for e in events_of(store, url, job.id) if e.kind == "trial"] == ["compile_timeout"]


def test_finals_publish_and_end_everything(store: Store, url: str) -> None:
    job, (study_id,) = started(store, configs=0)
    plan(store, study_id, [], finals=True)
    found = claim(store, begin=True)
    assert (found.kind, found.config) == ("finals", None)
    store.work.commit_finals(found, tuned(3), {"wall_s": 2.5})
    study = store.study(study_id)
    assert (study.done, study.tuned(), study.stats()) == (True, tuned(3), {"wall_s": 2.5})
    ended = store.jobs.get(job.id)
    assert (ended.state, ended.counts, ended.items[0].tuned) == ("done", {"done": 1}, tuned(3))
    assert [e.kind for e in events_of(store, url, job.id)] == ["submitted", "bound", "item_done", "done"]
    assert store.planning.progress() == []


# -- leases and deaths


def test_a_heartbeat_extends_the_leases_of_its_worker_alone(store: Store, url: str) -> None:
    started(store, configs=4)
    mine, other = claim(store, "w1"), claim(store, "w2")
    lost = claim(store, "w1")  # its answer never came: the worker does not know of it
    expire(url)
    store.fleet.beat("w1", held=[mine.id, other.id])
    assert [e.config for e in store.work.reap()] == [other.config, lost.config]
    assert column(url, "SELECT id FROM work WHERE state = 'leased'") == [mine.id]
    taken = claim(store, "w2")
    assert taken.id == other.id
    expire(url)
    store.fleet.beat("w1", held=[mine.id, taken.id])
    assert [e.config for e in store.work.reap()] == [taken.config]
    store.work.commit_trial(mine, good(mine.config), 1.0)


def test_nothing_is_taken_back_before_its_time(store: Store) -> None:
    started(store, configs=1)
    claim(store)
    assert store.work.reap() == []
    assert store.work.claim("w2", stage="measure", keys=[CLASS]) == []


def test_a_short_lease_runs_out_by_itself(url: str) -> None:
    with Store.open(url, lease_s=0.0) as store:
        started(store, configs=1)
        found = claim(store)
        expired = store.work.reap()
        while not expired:  # within the clock's resolution
            expired = store.work.reap()
        assert [(e.study_id, e.kind, e.config, e.deaths) for e in expired] == [
            (found.study_id, "trial", found.config, 0)
        ]


def test_only_work_that_was_begun_counts_a_death(store: Store, url: str) -> None:
    started(store, configs=3)
    store.work.claim("w1", stage="measure", keys=[CLASS], limit=2)
    begun = claim(store, "w1")
    store.work.begin(begun)
    expire(url)
    assert {(e.config, e.deaths) for e in store.work.reap()} == {(config(0), 0), (config(1), 0), (config(2), 1)}
    found = store.work.claim("w2", stage="measure", keys=[CLASS], limit=3)
    assert [(c.config, c.deaths, c.attempts) for c in found] == [(config(v), v // 2, 2) for v in range(3)]


@pytest.mark.parametrize(
    ("stage", "status"), [("compile", TrialStatus.COMPILE_CRASH), ("measure", TrialStatus.RUN_CRASH)]
)
def test_a_config_that_kills_three_workers_is_quarantined_and_the_study_goes_on(
    store: Store, url: str, stage: str, status: TrialStatus
) -> None:
    job, (study_id,) = started(store, configs=2, stage=stage)
    other = claim(store, "w0", stage)
    for death in range(1, DEATHS + 1):
        assert store.study(study_id).trials() == []
        assert claim(store, f"w{death}", stage, begin=True).config == config(1)
        expire(url)
        store.fleet.beat("w0", held=[other.id])
        assert [(e.deaths, e.quarantined) for e in store.work.reap()] == [(death, death == DEATHS)]
    (trial,) = store.study(study_id).trials()
    assert (trial.config, trial.status) == (config(1), status)
    assert "quarantined after it cost 3 workers" in trial.error
    assert "w3" in trial.error
    event = events_of(store, url, job.id)[-1]
    assert (event.kind, event.data["status"], event.data["worker"]) == ("quarantined", str(status), "w3")
    assert store.planning.planned(study_id).open == 1
    if stage == "compile":
        store.work.commit_compiled(other, COMPILED)
        other = claim(store)
    store.work.commit_trial(other, good(other.config), 1.0)
    finish(store, study_id)
    assert store.jobs.get(job.id).state == "done"


def test_killed_processes_are_counted_and_their_config_ends(store: Store, url: str) -> None:
    _, (study_id,) = started(store, configs=1)
    for death in range(DEATHS):
        with process(claim_and_die.__name__, url, f"w{death}") as worker:
            pipe(worker.stdout).read()
        assert worker.returncode == -9
        expire(url)
        store.work.reap()
    assert [t.status for t in store.study(study_id).trials()] == [TrialStatus.RUN_CRASH]


def test_finals_that_kill_three_workers_fail_the_study_and_a_later_job_begins_it_again(store: Store, url: str) -> None:
    job, (study_id,) = started(store, configs=1)
    one = claim(store)
    store.work.commit_trial(one, good(one.config), 1.0)
    plan(store, study_id, [], finals=True)
    for _ in range(DEATHS):
        claim(store, begin=True)
        expire(url)
        (expired,) = store.work.reap()
    assert (expired.kind, expired.quarantined) == ("finals", True)
    failed = store.jobs.get(job.id)
    assert (failed.state, failed.items[0].state) == ("failed", "failed")
    assert "finals cost 3 workers" in failed.items[0].error
    assert [e.kind for e in events_of(store, url, job.id)][-2:] == ["item_failed", "failed"]
    later, _ = store.jobs.submit(request(1))
    assert bind(store, later) == [study_id]
    finish(store, study_id)
    assert store.jobs.get(later.id).state == "done"
    assert store.jobs.get(job.id).state == "failed"
    assert [t.config for t in store.study(study_id).trials()] == [config(0)]


@pytest.mark.parametrize("kind", ["trial", "finals"])
def test_what_machines_fail_at_is_given_up_in_the_end(store: Store, url: str, kind: str) -> None:
    job, (study_id,) = started(store, configs=1 if kind == "trial" else 0)
    if kind == "finals":
        plan(store, study_id, [], finals=True)
    for attempt in range(1, ATTEMPTS + 1):
        found = claim(store, begin=True)
        assert (found.attempts, found.deaths) == (attempt, 0)
        store.work.release(found, ODD)
    assert store.planning.planned(study_id).open == 0
    if kind == "finals":
        failed = store.jobs.get(job.id)
        assert failed.state == "failed"
        assert f"failed on machines {ATTEMPTS} times: died:\\0 \\ud800 \N{SNOWMAN}" in failed.items[0].error
    else:
        (trial,) = store.study(study_id).trials()
        assert trial.status is TrialStatus.RUN_CRASH
        assert trial.error == f"quarantined after it failed on machines {ATTEMPTS} times: {ODD}"
        assert events_of(store, url, job.id)[-1].kind == "quarantined"


def test_what_failed_comes_last(store: Store) -> None:
    started(store, configs=4)
    store.work.release(claim(store), ODD)
    store.work.release(claim(store), "lost its GPU")
    found = store.work.claim("w1", stage="measure", keys=[CLASS], limit=9)
    assert [c.config for c in found] == [config(v) for v in (2, 3, 0, 1)]


def test_what_one_worker_died_with_goes_on_at_once_and_what_two_did_comes_last(store: Store) -> None:
    started(store, configs=3)
    for dead, expected in (("w1", 0), ("w2", 1)):
        (found,) = store.work.claim(dead, stage="measure", keys=[CLASS], begin=True)
        assert (found.config, found.deaths) == (config(0), expected)
        store.work.reap(dead)
    found = store.work.claim("w3", stage="measure", keys=[CLASS], limit=9)
    assert [(c.config, c.deaths) for c in found] == [(config(1), 0), (config(2), 0), (config(0), 2)]


def test_work_that_was_not_begun_is_given_back_at_no_cost(store: Store) -> None:
    started(store, configs=2)
    for _ in range(2 * ATTEMPTS):
        store.work.give_back(claim(store))
    again = claim(store)
    assert (again.config, again.attempts, again.deaths) == (config(0), 1, 0)


def test_a_worker_that_stops_gives_back_what_it_holds_at_no_cost(store: Store) -> None:
    started(store, configs=3)
    held = store.work.claim("w1", stage="measure", keys=[CLASS], limit=2, begin=True)
    other = claim(store, "w2")
    store.fleet.stop("w1")
    again = store.work.claim("w3", stage="measure", keys=[CLASS], limit=9)
    assert [(c.id, c.deaths, c.attempts) for c in again] == [(c.id, 0, 1) for c in held]
    assert refused(store.work.commit_trial, held[0], good(held[0].config), 1.0)
    store.work.commit_trial(other, good(other.config), 1.0)


# -- whose turn it is


def share(
    store: Store, seconds: dict[str, float], turns: int, opened: list[list[str]] | None = None
) -> dict[str, float]:
    """Let workers take turns, each trial as long as its study's ``seconds``; return the time that each study got."""
    got: dict[str, float] = dict.fromkeys(seconds, 0.0)
    open_studies = opened or [[], []]
    workers = len(open_studies)
    for turn in range(turns):
        worker = turn % workers
        found = claim(store, f"w{worker}", open_studies=open_studies[worker])
        open_studies[worker] = [found.study_id]
        store.work.commit_trial(found, good(found.config), seconds[found.study_id])
        got[found.study_id] += seconds[found.study_id]
        store.planning.account()
    return got


def test_jobs_of_equal_priority_share_the_devices_whatever_their_size(store: Store) -> None:
    _, many = started(store, 1, 2, 3, 4, configs=60)
    _, (single,) = started(store, 5, configs=60)
    seconds = {**dict.fromkeys(many, 1.0), single: 3.0}
    large, small, opened = 0.0, 0.0, [[single], [single]]
    for turn in range(120):
        got = share(store, seconds, 1, opened=[opened[turn % 2]])
        (opened[turn % 2],) = [[s] for s, given in got.items() if given]
        large, small = large + sum(got[s] for s in many), small + got[single]
        # ten seconds to stay with an open study, and the trial under way then
        assert abs(large - small) <= 10 + 3 + 1, turn
    assert large + small >= 120


def test_a_new_job_neither_starves_nor_is_starved(store: Store) -> None:
    _, (old,) = started(store, 1, configs=150)
    share(store, {old: 10.0}, 50)
    _, (new,) = started(store, 2, configs=100)
    got = share(store, {old: 1.0, new: 1.0}, 100)
    assert abs(got[old] - got[new]) <= 12, got


def test_a_job_is_not_charged_for_what_its_study_was_given_before_it(store: Store) -> None:
    first, (study,) = started(store, 1, configs=50)
    share(store, {study: 100.0}, 50)
    finish(store, study)
    assert store.jobs.get(first.id).state == "done"
    _, (other,) = started(store, 2, configs=100)
    more, _ = store.jobs.submit(request(1, settings={"max_trials": 500}))
    assert bind(store, more) == [study]
    plan(store, study, range(100, 200))
    got = share(store, {study: 1.0, other: 1.0}, 100)
    assert abs(got[study] - got[other]) <= 12, got


def test_a_job_that_waits_at_a_lower_priority_does_not_bring_newcomers_forward(store: Store) -> None:
    started(store, 1, configs=5, priority=-5)
    _, (old,) = started(store, 2, configs=150)
    share(store, {old: 10.0}, 50)
    _, (new,) = started(store, 3, configs=100)
    got = share(store, {old: 1.0, new: 1.0}, 100)
    assert abs(got[old] - got[new]) <= 12, got


def test_a_bound_job_keeps_its_place_until_it_has_work(store: Store) -> None:
    _, (old,) = started(store, 1, configs=100)
    share(store, {old: 10.0}, 20)
    job, _ = store.jobs.submit(request(2))
    (new,) = bind(store, job)
    store.planning.account()  # before anything is planned for it
    plan(store, new, range(60))
    got = share(store, {old: 1.0, new: 1.0}, 60)
    assert abs(got[old] - got[new]) <= 12, got


def test_a_higher_priority_goes_first(store: Store) -> None:
    _, (low,) = started(store, 1, configs=3)
    _, (high,) = started(store, 2, configs=3, priority=5)
    order = [claim(store, open_studies=[low]).study_id for _ in range(6)]
    assert order == [high] * 3 + [low] * 3


def test_a_shared_study_has_the_highest_priority_of_its_jobs(store: Store) -> None:
    _, (study,) = started(store, 1, configs=3)
    _, (other,) = started(store, 2, configs=3, priority=5)
    third, _ = store.jobs.submit(request(1, priority=9))
    assert bind(store, third) == [study]
    assert [claim(store).study_id for _ in range(4)] == [study] * 3 + [other]


def test_a_worker_stays_with_what_it_has_open_up_to_a_bound(store: Store) -> None:
    _, (first,) = started(store, 1, configs=50)
    _, (second,) = started(store, 2, configs=50)
    assert claim(store, "w2").study_id == first
    for _ in range(9):
        found = claim(store, "w1", open_studies=[second])
        assert found.study_id == second
        store.work.commit_trial(found, good(found.config), 1.0)
        store.planning.account()
    store.work.commit_trial(claim(store, "w1", open_studies=[second]), good(config(9)), 5.0)
    store.planning.account()
    assert claim(store, "w1", open_studies=[second]).study_id == first


def test_a_failed_trial_of_odd_text_is_stored_and_told(store: Store, url: str) -> None:
    job, (study_id,) = started(store, configs=1)
    found = claim(store)
    store.work.commit_trial(found, Trial(config(0), TrialStatus.RUN_ERROR, ODD), 1.0)
    assert store.study(study_id).trials()[0].error == ODD
    assert events_of(store, url, job.id)[-1].data["error"] == ODD[:200]
