"""The planner on both databases: a budget in seconds of a device, and neighbours that teach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from db.planning import NewWork
from db.store import Store
from tests.contract.service import bind, claim, config, good, request, spec
from tests.contract.test_store import store, url  # noqa: F401
from tuner.config import Config
from tuner.spec import StudySettings
from workers.planner import Planner

STOCK = Config.make("fake", 1)


@pytest.mark.parametrize(("limit", "ends"), [(5.0, True), (6.5, False), (None, False)])
def test_a_study_that_had_its_seconds_goes_to_the_finals(
    store: Store,  # noqa: F811
    limit: float | None,
    ends: bool,
) -> None:
    job, _ = store.jobs.submit(request(1, settings={"max_seconds": limit}))
    (study_id,) = bind(store, job)
    guard = store.planning.planned(study_id).guard
    assert store.planning.plan(study_id, guard, [NewWork(STOCK, "measure", 0)])
    store.work.commit_trial(claim(store), good(STOCK, 1.0), 6.0)
    assert Planner(store).advance(study_id)
    planned = store.planning.planned(study_id)
    assert planned.finals is ends
    assert len(planned.configs) == (1 if ends else 3)  # two variants, as the workload has heads


def test_a_new_study_begins_where_a_neighbours_best_was(store: Store) -> None:  # noqa: F811
    job, _ = store.jobs.submit(request(1, settings={"max_trials": 20}))
    (study_id,) = bind(store, job)
    workload = store.study(study_id).workload.with_(heads_q=400, heads_kv=1)
    there = store.begin_study(spec(workload.with_(batch=4)), StudySettings())
    for variant in range(0, 400, 13):
        there.add_trial(good(config(variant), 1.5 - abs(variant - 260) / 400))
    mine = store.begin_study(spec(workload), replace(StudySettings(), max_trials=20))
    assert Planner(store).advance(mine.id)
    first = [c for c in store.planning.planned(mine.id).configs if not c.is_stock]
    assert len(first) == 8
    assert all(abs(int(c["variant"]) - 260) < 60 for c in first[:4])


def test_a_planner_remembers_the_studies_that_go_on_and_no_more_than_it_may(store: Store) -> None:  # noqa: F811
    job, _ = store.jobs.submit(request(1, settings={"max_trials": 2}))
    workload = store.study(bind(store, job)[0]).workload.with_(heads_q=40, heads_kv=1)
    ids = [store.begin_study(spec(workload.with_(batch=2 + n)), StudySettings()).id for n in range(4)]
    planner = Planner(store, keep=3)
    assert all(planner.advance(study_id) for study_id in ids)
    assert list(planner.remembered) == ids[1:]
    planner.forget_all_but([ids[0], ids[2]])
    assert list(planner.remembered) == [ids[2]]
