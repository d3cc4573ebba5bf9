"""Who is blamed when a worker dies: what two died with is compiled alone, so that the third death is its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from db.store import Store
from db.work import DEATHS
from tests.contract.service import CLASS, COMPILE, claim, column, expire, started
from tests.contract.test_store import raw_connection
from tuner.compile import Compiled
from tuner.target import named, toolchain
from tuner.trial import TrialStatus
from workers.artifacts import open_artifacts
from workers.compile_side import CompileSide
from workers.heart import Heart
from workers.identity import identify
from workers.settings import Settings

CONFIGS = 4
BEGUN = "SELECT count(*) FROM work WHERE begun AND state = 'leased' AND stage = 'compile'"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/blame.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


@pytest.fixture
def begun() -> threading.Lock:
    return threading.Lock()


@pytest.fixture
def side(store: Store, begun: threading.Lock, tmp_path: Path) -> Iterator[CompileSide]:
    (tmp_path / "script.json").write_text(
        json.dumps({"outcomes": {str(n): {"compile_s": 0.3} for n in range(CONFIGS)}})
    )
    env = {"FLASHTUNE_HOME": str(tmp_path), "FLASHTUNE_FAKE_SCRIPT": str(tmp_path / "script.json")}
    settings = Settings.from_env({**env, "FLASHTUNE_COMPILE_WORKERS": "2"})
    info = replace(identify(("compile",), named("fake"), toolchain()), compile_key=COMPILE)
    store.fleet.register(info)
    with Heart(store, info, lease_s=45) as heart:
        made = CompileSide(settings, store, info, heart, open_artifacts(settings, store), lambda queue: None, begun)
        yield made
        made.close()


def test_what_two_died_with_is_begun_one_at_a_time_and_not_beside_a_measurement(
    store: Store, url: str, side: CompileSide, begun: threading.Lock
) -> None:
    started(store, configs=CONFIGS, stage="compile")
    with raw_connection(url) as raw:
        raw.execute(text("UPDATE work SET deaths = :n"), {"n": DEATHS - 1})
    with begun:  # as while the other half measures
        assert side.step()  # claims them
        assert not side.step()
        assert column(url, BEGUN) == [0]
    most = 0
    while column(url, "SELECT count(*) FROM work WHERE stage = 'compile'") != [0]:
        side.step()
        (now,) = column(url, BEGUN)
        assert begun.locked() == bool(now)
        assert isinstance(now, int)
        most = max(most, now)
        side.wait(0.05)
    assert most == 1
    assert not begun.locked()


def test_what_was_never_lost_compiles_beside_the_rest(store: Store, url: str, side: CompileSide) -> None:
    started(store, configs=CONFIGS, stage="compile")
    side.step()
    assert column(url, BEGUN) == [CONFIGS]


def test_giving_back_lets_the_other_half_begin(
    store: Store, url: str, side: CompileSide, begun: threading.Lock
) -> None:
    started(store, configs=CONFIGS, stage="compile")
    with raw_connection(url) as raw:
        raw.execute(text("UPDATE work SET deaths = :n"), {"n": DEATHS - 1})
    side.step()
    side.step()
    assert begun.locked()
    side.give_back()
    assert not begun.locked()
    assert column(url, "SELECT DISTINCT state FROM work") == ["ready"]


def test_deaths_while_it_compiled_are_forgiven_once_it_compiles(store: Store, url: str) -> None:
    started(store, configs=1, stage="compile")
    for death in range(1, DEATHS):
        claim(store, stage="compile", begin=True)
        expire(url)
        assert [e.deaths for e in store.work.reap()] == [death]
    store.work.commit_compiled(claim(store, stage="compile"), Compiled(TrialStatus.OK))
    (found,) = store.work.claim("w2", stage="measure", keys=[CLASS])
    assert found.deaths == 0
