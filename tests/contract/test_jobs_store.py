"""Jobs: accepted once, bound to studies, followed by cursors, cancelled, ended."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier, Event

import pytest
from sqlalchemy import insert, select, text, update

from db.models import EventModel, JobModel, StudyModel
from db.planning import NewWork
from db.store import Store
from db.values import JobEvent, Keep
from tests.contract.service import (
    CLASS,
    bind,
    claim,
    column,
    config,
    events_of,
    finish,
    good,
    plan,
    process,
    refused,
    request,
    spec,
    started,
    submit_and_die,
    tuned,
)
from tests.contract.test_backup import rows
from tests.contract.test_store import raw_connection, store, url  # noqa: F401
from tuner.errors import Conflict, InputError, NotFound, StaleClaim
from tuner.job import JobRequest
from tuner.spec import StudySettings

# ruff: noqa: F811


# -- accepted


def test_a_job_comes_back_as_it_was_submitted(store: Store, url: str) -> None:
    fields = {"name": "nightly", "priority": -3, "policy": "eager", "families": ["fake"], "force": True}
    asked = request(3, 1, 2, **fields, settings={"max_trials": 7, "seed": 5})
    before = datetime.now(UTC)
    job, new = store.jobs.submit(asked, owner="ann")
    assert new
    store.close()
    with Store.open(url, create=False, read_only=True) as fresh:
        job = fresh.jobs.get(job.id)
    assert (job.name, job.priority, job.policy, job.families, job.force, job.owner, job.arch) == (
        "nightly",
        -3,
        "eager",
        ("fake",),
        True,
        "ann",
        "fake",
    )
    assert job.settings == asked.settings.to_dict()
    assert [(i.position, i.name, i.workload) for i in job.items] == [
        (n, w.name, w.workload.to_dict()) for n, w in enumerate(asked.workloads)
    ]
    assert {(i.state, i.study_id, i.error, i.trials, i.tuned) for i in job.items} == {("queued", None, "", 0, None)}
    assert (job.state, job.counts, job.finished_at) == ("queued", {"queued": 3}, None)
    assert before <= job.created_at <= datetime.now(UTC)


def test_a_submission_writes_its_event_with_it(store: Store, url: str) -> None:
    job, _ = store.jobs.submit(request(1, 2))
    assert [(e.job_id, e.kind, e.data) for e in events_of(store, url)] == [(job.id, "submitted", {"workloads": 2})]


def test_a_submission_that_is_killed_before_its_commit_leaves_nothing(store: Store, url: str) -> None:
    before = rows(url)
    with process(submit_and_die.__name__, url) as child:
        pass
    assert child.returncode == -9
    assert rows(url) == before
    assert store.jobs.submit(request(1, 2), idempotency_key="k")[1]


def test_the_same_key_and_request_from_fifty_threads_make_one_job(store: Store) -> None:
    barrier = Barrier(50)

    def submit(_: int) -> tuple[str, bool]:
        barrier.wait(timeout=60)
        job, new = store.jobs.submit(request(1, 2), owner="ann", idempotency_key="night-1")
        return job.id, new

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(submit, range(50)))
    assert len({job_id for job_id, _ in answers}) == 1
    assert sum(new for _, new in answers) == 1
    assert [j.counts for j in store.jobs.list().items] == [{"queued": 2}]


def test_a_key_answers_for_one_request_of_one_owner(store: Store, url: str) -> None:
    first, _ = store.jobs.submit(request(1), owner="ann", idempotency_key="k")
    for other in (request(2), request(1, priority=1), request(1, name="x"), request(1, force=True)):
        before = rows(url)
        with pytest.raises(Conflict, match=r"Idempotency-Key 'k' was used for another request; choose a new key"):
            store.jobs.submit(other, owner="ann", idempotency_key="k")
        assert rows(url) == before
    of_bob, new = store.jobs.submit(request(1), owner="bob", idempotency_key="k")
    assert new
    assert of_bob.id != first.id
    again, new = store.jobs.submit(request(1), owner="ann", idempotency_key="k")
    assert (again.id, new) == (first.id, False)
    assert store.jobs.submit(request(1), owner="ann")[1]


def test_a_forgotten_key_makes_a_new_job(store: Store) -> None:
    first, _ = store.jobs.submit(request(1), idempotency_key="k")
    store.prune(Keep(), datetime.now(UTC) + timedelta(hours=23))
    assert store.jobs.submit(request(1), idempotency_key="k")[0].id == first.id
    assert store.prune(Keep(), datetime.now(UTC) + timedelta(hours=24)) == {"idempotency_keys": 1}
    second, new = store.jobs.submit(request(1), idempotency_key="k")
    assert new
    assert second.id != first.id


@pytest.mark.parametrize("key", ["", " ", "a b", "x" * 256, "\0", "\N{SNOWMAN}", "k\n"])
def test_a_key_that_no_header_can_carry_is_refused(store: Store, key: str) -> None:
    with pytest.raises(InputError, match="1 to 255 printable ASCII characters without blanks"):
        store.jobs.submit(request(1), idempotency_key=key)
    assert store.jobs.list().items == []


# -- listed and found


def test_pages_stay_as_they_are_while_jobs_come(store: Store) -> None:
    old = [store.jobs.submit(request(1, name=str(n)))[0].id for n in range(23)]
    seen: list[str] = []
    after, pages = None, 0
    while pages == 0 or after:
        page = store.jobs.list(after=after, limit=5)
        seen += [job.id for job in page.items]
        after, pages = page.next, pages + 1
        store.jobs.submit(request(2))
    assert seen == old[::-1]
    assert pages == 5
    whole = store.jobs.list(limit=1000)
    assert (len(whole.items), whole.next) == (23 + 5, None)
    assert [job.counts for job in whole.items] == [{"queued": 1}] * 28


def test_a_page_that_is_just_full_is_the_last(store: Store) -> None:
    for _ in range(4):
        store.jobs.submit(request(1))
    page = store.jobs.list(limit=2)
    assert page.next is not None
    assert store.jobs.list(limit=2, after=page.next).next is None


def test_jobs_of_one_moment_are_each_listed_once(store: Store, url: str) -> None:
    ids = {store.jobs.submit(request(1))[0].id for _ in range(9)}
    with raw_connection(url) as raw:
        raw.execute(update(JobModel).values(created_at=datetime(2026, 1, 1, tzinfo=UTC)))
    seen: list[str] = []
    page = store.jobs.list(limit=2)
    seen += [job.id for job in page.items]
    while page.next:
        page = store.jobs.list(limit=2, after=page.next)
        seen += [job.id for job in page.items]
    assert (len(seen), set(seen)) == (9, ids)


def test_jobs_are_listed_by_state(store: Store) -> None:
    queued, _ = store.jobs.submit(request(1))
    gone, _ = store.jobs.submit(request(1))
    store.jobs.cancel(gone.id)
    running, _ = started(store, 2)
    states = {s: [job.id for job in store.jobs.list(state=s).items] for s in ("queued", "running", "cancelled", "done")}
    assert states == {"queued": [queued.id], "running": [running.id], "cancelled": [gone.id], "done": []}
    assert store.jobs.counts() == {"queued": 1, "running": 1, "cancelled": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0},
        {"limit": -1},
        {"limit": 1001},
        {"state": "odd"},
        {"after": "zzz"},
        {"after": "0123456789ab"},
        {"after": "a\0"},
    ],
)
def test_a_list_that_cannot_be_is_refused(store: Store, wrong: dict[str, object]) -> None:
    (value,) = wrong.values()
    with pytest.raises(InputError, match=f"{value!r}" if "\0" not in str(value) else "cursor"):
        store.jobs.list(**wrong)  # type: ignore[arg-type]


def test_a_job_is_found_by_its_id_or_the_only_beginning(store: Store, url: str) -> None:
    with raw_connection(url) as raw:
        for job, new in zip([store.jobs.submit(request(n))[0] for n in (1, 2)], ("abc1", "abc2"), strict=True):
            for table in ("events", "job_items", "idempotency_keys"):
                raw.execute(text(f"DELETE FROM {table} WHERE job_id = '{job.id}'"))
            raw.execute(text(f"UPDATE jobs SET id = '{new}00000000' WHERE id = '{job.id}'"))
    assert store.jobs.get("abc100000000").id == store.jobs.get(" ABC1 ").id == "abc100000000"
    for missing in ("abc", "abc3", "", "%", "abc_", "abc1000000001", "x\0", "abc100000001"):
        for call in (store.jobs.get, store.jobs.cancel, store.jobs.events):
            with pytest.raises(NotFound):
                call(missing)


# -- bound to studies


def test_two_jobs_for_one_question_share_its_study(store: Store, url: str) -> None:
    first, (study_id,) = started(store, 1)
    second, _ = store.jobs.submit(request(1, 2))
    assert bind(store, second)[0] == study_id
    plan(store, bind_of(store, second.id, 1), [0])
    found = claim(store, open_studies=[study_id])
    store.work.commit_trial(found, good(found.config), 1.0)
    for job in (first, second):
        assert [e.data.get("study") for e in events_of(store, url, job.id) if e.kind == "trial"] == [study_id]
    finish(store, study_id, variant=2)
    assert (store.jobs.get(first.id).state, store.jobs.get(second.id).state) == ("done", "running")
    assert [i.state for i in store.jobs.get(second.id).items] == ["done", "running"]
    finish(store, bind_of(store, second.id, 1))
    assert store.jobs.get(second.id).state == "done"
    assert [i.tuned for i in store.jobs.get(second.id).items] == [tuned(2), tuned(0)]


def bind_of(store: Store, job_id: str, position: int) -> str:
    found = store.jobs.get(job_id).items[position].study_id
    assert found is not None
    return found


def test_two_items_with_one_question_share_its_study(store: Store) -> None:
    named = request(1).to_dict()["workloads"][0]
    twice = JobRequest.from_dict({"arch": "fake", "workloads": [{**named, "name": n} for n in "ab"]})
    job, _ = store.jobs.submit(twice)
    first, second = bind(store, job)
    assert first == second
    finish(store, first)
    assert store.jobs.get(job.id).counts == {"done": 2}


def test_dispatchers_that_bind_at_once_bind_each_item_once(store: Store, url: str) -> None:
    job, _ = store.jobs.submit(request(*range(1, 7)))
    items, barrier = store.planning.waiting(), Barrier(6)

    def dispatch(_: int) -> list[str | None]:
        barrier.wait(timeout=30)
        return [store.planning.bind(item.id, spec(item.workload), CLASS, "") for item in items]

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(dispatch, range(6)))
    for found in zip(*answers, strict=True):
        assert len([study for study in found if study]) == 1
    assert Counter(e.kind for e in events_of(store, url, job.id)) == {"submitted": 1, "bound": 6}
    assert (len(store.studies()), store.jobs.get(job.id).counts) == (6, {"running": 6})
    assert store.planning.waiting() == []


def test_dispatchers_that_plan_at_once_plan_once(store: Store) -> None:
    _, (study_id,) = started(store, configs=0)
    guard, barrier = store.planning.planned(study_id).guard, Barrier(6)

    def dispatch(number: int) -> bool:
        barrier.wait(timeout=30)
        work = [NewWork(config(10 * number + v), "measure", 0) for v in range(3)]
        return store.planning.plan(study_id, guard, work)

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(dispatch, range(6)))
    assert won.count(True) == 1
    first = 10 * won.index(True)
    assert set(store.planning.planned(study_id).configs) == {config(first + v) for v in range(3)}


def test_a_known_answer_ends_an_item_at_once(store: Store, url: str) -> None:
    _, (study_id,) = started(store, 1)
    finish(store, study_id, variant=3)
    later, _ = store.jobs.submit(request(1))
    assert bind(store, later) == [study_id]
    assert (store.jobs.get(later.id).state, store.jobs.get(later.id).items[0].tuned) == ("done", tuned(3))
    told = events_of(store, url, later.id)
    assert [e.kind for e in told] == ["submitted", "item_done", "done"]
    assert told[1].data["known"] is True
    assert told[1].data["answer"]["config"] == tuned(3).config.to_dict()


def test_force_measures_again_in_a_new_run(store: Store) -> None:
    _, (study_id,) = started(store, 1)
    finish(store, study_id)
    forced, _ = store.jobs.submit(request(1, force=True))
    (second,) = bind(store, forced)
    assert second != study_id
    assert (store.study(second).run, store.study(study_id).done) == (2, True)
    assert store.jobs.get(forced.id).state == "running"


def test_a_larger_budget_reopens_a_study_and_a_smaller_one_does_not(store: Store) -> None:
    _, (study_id,) = started(store, 1, settings={"max_trials": 10})
    finish(store, study_id, variant=1)
    smaller, _ = store.jobs.submit(request(1, settings={"max_trials": 9}))
    bind(store, smaller)
    assert store.jobs.get(smaller.id).state == "done"
    larger, _ = store.jobs.submit(request(1, settings={"max_trials": 20}))
    assert bind(store, larger) == [study_id]
    study = store.study(study_id)
    assert (study.done, study.settings["max_trials"], len(study.trials())) == (False, 20, 4)
    assert study.tuned() == tuned(1), "the old answer serves until the new one"
    assert store.jobs.get(larger.id).items[0].tuned is None
    assert not store.planning.planned(study_id).finals
    finish(store, study_id, variant=2)
    assert store.jobs.get(larger.id).items[0].tuned == tuned(2)
    assert store.study(study_id).tuned() == tuned(2)


def test_a_larger_budget_that_joins_before_the_finals_are_over_is_searched(store: Store) -> None:
    _, (study_id,) = started(store, 1, settings={"max_trials": 4})
    for _ in range(4):
        found = claim(store)
        store.work.commit_trial(found, good(found.config), 1.0)
    plan(store, study_id, [], finals=True)
    held = claim(store)
    larger, _ = store.jobs.submit(request(1, settings={"max_trials": 20}))
    assert bind(store, larger) == [study_id]
    assert not store.planning.planned(study_id).finals
    with pytest.raises(StaleClaim):
        store.work.commit_finals(held, tuned(), {})
    assert (store.jobs.get(larger.id).state, store.study(study_id).settings["max_trials"]) == ("running", 20)


def served(url: str) -> dict[str, float]:
    with raw_connection(url) as raw:
        return {row.id: row.served_s for row in raw.execute(select(StudyModel.id, StudyModel.served_s))}


@pytest.mark.parametrize("fresh_first", [True, False])
def test_what_was_known_before_is_no_time_that_a_job_was_given(store: Store, url: str, fresh_first: bool) -> None:
    _, (known,) = started(store, 1)
    for _ in range(4):
        found = claim(store)
        store.work.commit_trial(found, good(found.config), 250.0)
    finish(store, known)
    _, (other,) = started(store, 7)
    for _ in range(2):
        found = claim(store)
        store.work.commit_trial(found, good(found.config), 250.0)
    store.planning.account()
    job, _ = store.jobs.submit(request(*((8, 1) if fresh_first else (1, 8))))
    (fresh,) = [s for s in bind(store, job) if s != known]
    store.planning.account()
    assert served(url)[fresh] == served(url)[other] == 500.0


def test_a_failed_study_that_is_begun_without_a_job_runs_under_the_new_settings(store: Store) -> None:
    _, (study_id,) = started(store, 1, settings={"max_trials": 8})
    store.planning.fail_study(study_id, "no kernel is right")
    workload = store.study(study_id).workload
    again = store.begin_study(spec(workload), StudySettings(max_trials=300))
    assert (again.id, again.settings["max_trials"]) == (study_id, 300)
    assert [s.state for s in store.studies()] == ["running"]


def test_a_failed_study_fails_its_items_and_begins_again_for_the_next_job(store: Store, url: str) -> None:
    job, (one, two) = started(store, 1, 2)
    store.planning.fail_study(one, "no kernel is right")
    store.planning.fail_study(one, "said twice")
    finish(store, two)
    failed = store.jobs.get(job.id)
    assert (failed.state, [(i.state, i.error) for i in failed.items]) == (
        "failed",
        [("failed", "no kernel is right"), ("done", "")],
    )
    assert Counter(e.kind for e in events_of(store, url, job.id))["item_failed"] == 1
    again, _ = store.jobs.submit(request(1))
    assert bind(store, again) == [one]
    finish(store, one)
    assert store.jobs.get(again.id).state == "done"


def test_an_item_that_no_machine_can_do_is_rejected(store: Store, url: str) -> None:
    job, _ = store.jobs.submit(request(1))
    (item,) = store.planning.waiting()
    store.planning.reject(item.id, "nothing computes\0 it \ud800")
    assert store.jobs.get(job.id).items[0].error == "nothing computes\\0 it \\ud800"
    assert store.planning.bind(item.id, spec(item.workload), CLASS, "") is None
    store.planning.reject(item.id, "again")
    assert [e.kind for e in events_of(store, url, job.id)] == ["submitted", "item_failed", "failed"]


def test_an_answer_from_elsewhere_ends_the_items_that_wait_for_it(store: Store) -> None:
    job, (study_id,) = started(store, 1)
    store.begin_study(spec(request(1).workloads[0].workload), StudySettings()).finish(tuned(1), {})
    store.planning.settle()
    assert (store.jobs.get(job.id).state, store.jobs.get(job.id).items[0].tuned) == ("done", tuned(1))
    assert store.work.claim("w", stage="measure", keys=[CLASS]) == []
    assert store.study(study_id).done


# -- ended


def test_studies_that_end_at_once_end_their_job_once(store: Store, url: str) -> None:
    job, studies = started(store, *range(1, 9), configs=0)
    for study_id in studies:
        plan(store, study_id, [], finals=True)
    finals, barrier = [claim(store) for _ in studies], Barrier(8)
    assert {c.study_id for c in finals} == set(studies)

    def end(number: int) -> None:
        with Store.open(url) as own:
            barrier.wait(timeout=30)
            if number % 4:
                own.work.commit_finals(finals[number], tuned(number), {})
            else:
                own.planning.fail_study(finals[number].study_id, f"failed {number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(end, range(8)))
    kinds = Counter(e.kind for e in events_of(store, url, job.id))
    assert kinds == {"submitted": 1, "bound": 8, "item_done": 6, "item_failed": 2, "failed": 1}
    last = events_of(store, url, job.id)[-1]
    assert (last.kind, last.data) == ("failed", {"counts": {"done": 6, "failed": 2}})
    ended = store.jobs.get(job.id)
    assert (ended.state, ended.counts) == ("failed", {"done": 6, "failed": 2})
    assert ended.finished_at is not None


def test_jobs_that_share_studies_end_while_trials_come(store: Store, url: str) -> None:
    """Ends and trials lock the same jobs in different orders; none may be lost to a deadlock."""
    jobs = [started(store, *range(1, 5), configs=0)]
    for _ in range(3):
        more, _ = store.jobs.submit(request(*range(1, 5)))
        jobs.append((more, bind(store, more)))
    studies = jobs[0][1]
    for study_id in studies:
        plan(store, study_id, range(30), finals=True)
    work = store.work.claim("w", stage="measure", keys=[CLASS], limit=31)
    while more_work := store.work.claim("w", stage="measure", keys=[CLASS], limit=31):
        work += more_work
    assert len(work) == 4 * 31
    finals = [c for c in work if c.kind == "finals"]
    trials = [c for c in work if c.kind == "trial"]
    barrier = Barrier(8)

    def run(number: int) -> None:
        barrier.wait(timeout=30)
        for one in trials[number::8]:
            store.work.commit_trial(one, good(one.config), 0.1)
            if number < 4 and one is trials[number::8][5]:
                store.work.commit_finals(finals[number], tuned(number), {})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
    for job, _ in jobs:
        kinds = Counter(e.kind for e in events_of(store, url, job.id))
        assert (kinds["item_done"], kinds["done"]) == (4, 1)
    assert [len(store.study(s).trials()) for s in studies] == [30] * 4


# -- cancelled


def test_a_cancelled_job_gives_up_what_waits_and_keeps_what_is_under_way(store: Store, url: str) -> None:
    job, (study_id,) = started(store, 1, configs=3)
    held = claim(store)
    cancelled = store.jobs.cancel(job.id)
    assert (cancelled.state, cancelled.counts) == ("cancelled", {"cancelled": 1})
    assert cancelled.finished_at is not None
    assert store.work.claim("w2", stage="measure", keys=[CLASS]) == []
    assert store.work.ready() == {}
    assert store.planning.progress() == []
    store.work.commit_trial(held, good(held.config), 1.0)
    assert [t.config for t in store.study(study_id).trials()] == [held.config]
    assert [e.kind for e in events_of(store, url, job.id)] == ["submitted", "bound", "cancelled"]
    before = rows(url)
    again = store.jobs.cancel(job.id)
    assert (again.state, again.finished_at) == ("cancelled", cancelled.finished_at)
    assert rows(url) == before
    later, _ = store.jobs.submit(request(1))
    assert bind(store, later) == [study_id]
    assert store.jobs.get(later.id).items[0].trials == 1
    assert store.work.ready() == {("measure", CLASS): 2}
    finish(store, study_id)
    assert (store.jobs.get(later.id).state, store.jobs.get(job.id).state) == ("done", "cancelled")


def test_a_shared_study_goes_on_for_the_job_that_was_not_cancelled(store: Store) -> None:
    first, (study_id,) = started(store, 1)
    second, _ = store.jobs.submit(request(1))
    bind(store, second)
    store.jobs.cancel(first.id)
    finish(store, study_id)
    assert (store.jobs.get(first.id).state, store.jobs.get(second.id).state) == ("cancelled", "done")
    assert store.jobs.get(first.id).items[0].tuned is None


def test_a_waiting_job_that_is_cancelled_is_not_bound(store: Store) -> None:
    job, _ = store.jobs.submit(request(1, 2))
    first, second = store.planning.waiting()
    assert store.planning.bind(first.id, spec(first.workload), CLASS, "")
    store.jobs.cancel(job.id)
    assert store.planning.bind(second.id, spec(second.workload), CLASS, "") is None
    assert store.planning.waiting() == []


def test_a_done_job_cannot_be_cancelled_any_more(store: Store, url: str) -> None:
    job, (study_id,) = started(store, 1)
    finish(store, study_id)
    before = rows(url)
    assert store.jobs.cancel(job.id).state == "done"
    assert rows(url) == before


def test_a_cancel_that_races_with_the_end_leaves_one_of_them(store: Store, url: str) -> None:
    for batch in range(1, 11):
        job, (study_id,) = started(store, batch, configs=0)
        plan(store, study_id, [], finals=True)
        found, barrier = claim(store), Barrier(3)

        def end() -> bool:
            barrier.wait(timeout=30)  # noqa: B023
            return refused(store.work.commit_finals, found, tuned(), {})  # noqa: B023

        def cancel() -> None:
            barrier.wait(timeout=30)  # noqa: B023
            store.jobs.cancel(job.id)  # noqa: B023

        with ThreadPoolExecutor(3) as pool:
            ending = pool.submit(end)
            for call in [pool.submit(cancel) for _ in range(2)]:
                call.result()
        assert not ending.result()
        assert store.study(study_id).done
        ended = store.jobs.get(job.id)
        kinds = [e.kind for e in events_of(store, url, job.id)][2:]
        assert kinds == (["cancelled"] if ended.state == "cancelled" else ["item_done", "done"])
        assert ended.counts == {str(ended.state): 1}


# -- followed


def follow(store: Store, stop: Event, limit: int) -> list[JobEvent]:
    """Read all events by cursors, as a client would, until nothing more comes after ``stop``."""
    seen: list[JobEvent] = []
    last_look = False
    while True:
        found = store.jobs.events(after=seen[-1].cursor if seen else "", limit=limit)
        seen += found
        if not found:
            if last_look:
                return seen
            last_look = stop.is_set()


def test_a_reader_that_follows_sees_every_event_once_while_many_write(store: Store, url: str) -> None:
    _, (study_id,) = started(store, 99, configs=80)
    work, stop = store.work.claim("w", stage="measure", keys=[CLASS], limit=80), Event()
    assert {c.study_id for c in work} == {study_id}

    def write(number: int) -> None:
        with Store.open(url) as own:
            for one in work[number::8]:
                own.work.commit_trial(one, good(one.config), 0.1)
                job, _ = own.jobs.submit(request(1))
                own.jobs.cancel(job.id)

    with ThreadPoolExecutor(10) as pool:
        readers = [pool.submit(follow, store, stop, limit) for limit in (3, 500)]
        list(pool.map(write, range(8)))
        events_of(store, url)  # until other transactions on the server hold nothing up
        stop.set()
        seen = [reader.result(timeout=120) for reader in readers]
    assert seen[0] == seen[1] == events_of(store, url)
    numbers = [int(e.cursor.split("-")[1]) for e in seen[0]]
    assert sorted(numbers) == sorted(column(url, "SELECT id FROM events"))  # type: ignore[type-var]
    assert len(numbers) == len(set(numbers)) == 2 + 3 * 80


@pytest.mark.parametrize("url", [pytest.param("postgresql", marks=pytest.mark.service)], indirect=True)
def test_a_transaction_that_numbers_early_and_commits_late_is_not_passed_over(store: Store, url: str) -> None:
    job, _ = store.jobs.submit(request(1))
    first = events_of(store, url)
    early = {"job_id": job.id, "kind": "early", "at": datetime.now(UTC), "data": {}}
    with raw_connection(url) as raw:
        number = raw.scalar(insert(EventModel).values(early).returning(EventModel.id))
        store.jobs.cancel(job.id)
        assert column(url, "SELECT kind FROM events WHERE kind = 'cancelled'") == ["cancelled"]
        assert store.jobs.events(after=first[-1].cursor) == [], "it would stand behind the one under way"
    told = events_of(store, url, after=first[-1].cursor)
    assert [e.kind for e in told] == ["early", "cancelled"]
    assert int(told[0].cursor.split("-")[1]) == number
    assert store.jobs.events(after=told[0].cursor) == told[1:]
    assert store.jobs.events(after=told[1].cursor) == []


@pytest.mark.parametrize("url", [pytest.param("postgresql", marks=pytest.mark.service)], indirect=True)
def test_a_transaction_that_begins_early_and_numbers_late_is_not_passed_over(store: Store, url: str) -> None:
    job, _ = store.jobs.submit(request(1))
    cursor = events_of(store, url)[-1].cursor
    late = {"job_id": job.id, "kind": "late", "at": datetime.now(UTC), "data": {}}
    with raw_connection(url) as raw:
        raw.execute(text("SELECT pg_current_xact_id()"))
        store.jobs.cancel(job.id)
        raw.execute(insert(EventModel).values(late))
    events_of(store, url)
    (first,) = store.jobs.events(after=cursor, limit=1)
    (second,) = store.jobs.events(after=first.cursor, limit=1)
    assert {first.kind, second.kind} == {"late", "cancelled"}
    assert store.jobs.events(after=second.cursor) == []


def test_a_jobs_events_leave_others_out_and_go_on_after_a_cursor(store: Store, url: str) -> None:
    one, _ = started(store, 1)
    store.jobs.submit(request(2))
    store.jobs.cancel(one.id)
    told = events_of(store, url, one.id)
    assert [e.kind for e in told] == ["submitted", "bound", "cancelled"]
    assert {e.job_id for e in told} == {one.id}
    assert store.jobs.events(one.id, after=told[0].cursor) == told[1:]
    assert store.jobs.events(one.id[:6], limit=2) == told[:2]
    assert [e.job_id for e in events_of(store, url, after=told[-1].cursor)] == []
    assert len(events_of(store, url)) == 4


@pytest.mark.parametrize(
    "cursor", ["x", "1", "1-", "-1", "1-2-3", "1-2 ", "a-b", "1\0-2", "9" * 19 + "-1", "1-" + "9" * 30, "\u0661-1"]
)
def test_a_cursor_that_is_none_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(InputError, match=r"cursor .* leave it out"):
        store.jobs.events(after=cursor)
    with pytest.raises(InputError, match="limit is 0"):
        store.jobs.events(limit=0)


def test_a_cursor_beyond_the_end_sees_nothing(store: Store) -> None:
    store.jobs.submit(request(1))
    assert store.jobs.events(after="9" * 18 + "-" + "9" * 18) == []


def test_a_cancelled_job_takes_its_priority_with_it(store: Store, url: str) -> None:
    low, (study_id,) = started(store, 1, priority=1)
    high, _ = store.jobs.submit(request(1, priority=7))
    assert bind(store, high) == [study_id]
    assert column(url, "SELECT priority FROM studies") == [7]
    store.jobs.cancel(high.id)
    assert column(url, "SELECT priority FROM studies") == [1]
    assert [s.id for s in store.planning.progress()] == [study_id]
    store.jobs.cancel(low.id)
    assert store.planning.progress() == []
