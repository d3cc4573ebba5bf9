"""Backup and restore: every row comes back, from and into either database, and never half."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Select, Table, select

from db.backup import backup, restore
from db.models import Base
from db.store import Store
from db.values import WorkerInfo
from tests.contract import service
from tests.contract.test_store import SETTINGS, SPEC, TARGET, TOOLCHAIN, answer, ok, raw_connection, url  # noqa: F401
from tuner.errors import StorageError
from tuner.trial import Trial, TrialStatus

FLASHTUNE = Path(sys.executable).with_name("flashtune")


COUNTS = {
    "studies": 3,
    "trials": 522,
    "tuned_configs": 1,
    "jobs": 2,
    "job_items": 3,
    "work": 4,
    "events": 5,
    "workers": 1,
    "api_keys": 1,
    "idempotency_keys": 1,
    "artifacts": 1,
}


def fill(place: str) -> None:
    """Store two runs of a study, with trials of both kinds, the first run answered; and a job under way."""
    with Store.open(place) as store:
        study = store.begin_study(SPEC, SETTINGS)
        for tile in range(520):  # more than a chunk of the copy
            study.add_trial(ok(tile) if tile % 3 else Trial(ok(tile).config, TrialStatus.RUN_CRASH, "died of SIGSEGV"))
        study.finish(answer(), {"wall_s": 1.5})
        store.begin_study(SPEC, SETTINGS, force=True).add_trial(ok(7))
        _, (study_id,) = service.started(store, 5, configs=3)
        found = service.claim(store)
        store.work.commit_trial(found, service.good(found.config), 2.5)
        service.claim(store, "w2", begin=True)
        service.plan(store, study_id, [], finals=True)
        store.jobs.cancel(store.jobs.submit(service.request(6, 7), idempotency_key="k")[0].id)
        now = datetime.now(UTC)
        store.fleet.register(WorkerInfo("w2", "h", 7, ("measure",), "c", "k", TARGET, TOOLCHAIN, now, now))
        store.keys.create("ci", ["read", "submit"], 60)
        store.artifacts_put("0" * 64, bytes(range(256)))


def rows(place: str) -> dict[str, list[tuple[object, ...]]]:
    """Read every row by SQL of its own."""
    with raw_connection(place) as connection:
        return {
            t.name: [tuple(map(str, r)) for r in connection.execute(_query(t))] for t in Base.metadata.sorted_tables
        }


def _query(table: Table) -> Select[Any]:
    kept = [column for column in table.c if column.name != "xid"]  # transactions of one server mean nothing to another
    return select(*kept).order_by(*table.primary_key.columns)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    fill(str(tmp_path / "origin.db"))
    backup(str(tmp_path / "origin.db"), tmp_path / "kept.db")
    return tmp_path / "kept.db"


def test_every_row_comes_back(url: str, tmp_path: Path) -> None:  # noqa: F811
    fill(url)
    before = rows(url)
    counts = backup(url, tmp_path / "kept.db")
    assert counts == {name: len(found) for name, found in before.items()} == COUNTS
    assert rows(f"sqlite:///{tmp_path}/kept.db") == before
    assert sorted(p.name for p in tmp_path.iterdir() if "kept" in p.name) == ["kept.db"], "one file, nothing beside it"


def test_a_restored_database_goes_on(url: str, kept: Path) -> None:  # noqa: F811
    restore(kept, url)
    assert rows(url) == rows(f"sqlite:///{kept}")
    with Store.open(url) as store:
        study = store.begin_study(SPEC, SETTINGS)
        assert (study.run, study.done, [t.config for t in study.trials()]) == (2, False, [ok(7).config])
        study.add_trial(ok(8))  # a new row's number must not collide with the copied ones
        study.finish(answer(64), {})
        assert [p.tuned.config for p in store.published()] == [answer(64).config]


def test_a_database_with_studies_is_not_overwritten(url: str, kept: Path) -> None:  # noqa: F811
    restore(kept, url)
    before = rows(url)
    with pytest.raises(StorageError, match="holds 3 studies; restore into an empty one"):
        restore(kept, url)
    assert rows(url) == before


def test_a_database_with_jobs_and_no_studies_is_not_overwritten(url: str, kept: Path) -> None:  # noqa: F811
    with Store.open(url) as store:
        store.jobs.submit(service.request(1))
    before = rows(url)
    with pytest.raises(StorageError, match="holds 1 jobs; restore into an empty one"):
        restore(kept, url)
    assert rows(url) == before


def test_a_restored_service_goes_on_where_it_was(url: str, tmp_path: Path) -> None:  # noqa: F811
    """There and back: out of the tested database into a file, and from the file into either kind."""
    fill(url)
    backup(url, tmp_path / "kept.db")
    with raw_connection(url) as raw:
        for table in reversed(Base.metadata.sorted_tables):
            raw.execute(table.delete())
    restore(tmp_path / "kept.db", url)
    with Store.open(url) as store:
        old = service.events_of(store, url)
        assert [e.kind for e in old] == ["submitted", "bound", "trial", "submitted", "cancelled"]
        (running,) = store.jobs.list(state="running").items
        store.jobs.submit(service.request(9))
        told = service.events_of(store, url)
        assert told[: len(old)] == old
        assert [e.kind for e in told[len(old) :]] == ["submitted"], "new events come after the old ones"
        assert service.events_of(store, url, after=old[-1].cursor) == told[len(old) :]
        service.expire(url)
        (expired,) = store.work.reap()
        assert expired.deaths == 1
        service.finish(store, str(store.jobs.get(running.id).items[0].study_id))
        assert store.jobs.get(running.id).state == "done"
        assert store.artifacts_get("0" * 64) == bytes(range(256))
        assert not store.jobs.submit(service.request(6, 7), idempotency_key="k")[1]
        (worker,) = store.fleet.workers()
        assert (worker.target, worker.toolchain) == (TARGET, TOOLCHAIN)


def test_a_backup_does_not_overwrite_a_file(kept: Path, tmp_path: Path) -> None:
    before = kept.read_bytes()
    with pytest.raises(StorageError, match=r"kept\.db exists already"):
        backup(str(tmp_path / "origin.db"), kept)
    assert kept.read_bytes() == before


def test_a_damaged_backup_changes_nothing(kept: Path, tmp_path: Path) -> None:
    data = bytearray(kept.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4096] = b"\xff" * 4096
    (tmp_path / "bad.db").write_bytes(data)
    (tmp_path / "text.db").write_text("not a database at all, and long enough to have a header of sixteen bytes")
    for name in ("bad.db", "text.db", "missing.db"):
        with pytest.raises(StorageError, match=name.replace(".", r"\.")):
            restore(tmp_path / name, str(tmp_path / "new.db"))
    if (tmp_path / "new.db").exists():
        assert sqlite3.connect(tmp_path / "new.db").execute("SELECT count(*) FROM studies").fetchone() == (0,)


def test_a_database_in_use_is_kept_as_of_one_moment(tmp_path: Path) -> None:
    """A writer goes on meanwhile: what is kept has every trial up to some moment, and no study without its own."""
    place = str(tmp_path / "busy.db")
    with Store.open(place) as store:
        study = store.begin_study(SPEC, SETTINGS)
        study.add_trial(ok(0))
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from tests.contract.test_store import SPEC, SETTINGS, ok\n"
        "from db.store import Store\n"
        "with Store.open(sys.argv[1]) as store:\n"
        "    study = store.begin_study(SPEC, SETTINGS)\n"
        "    for tile in range(1, 10**6):\n"
        "        study.add_trial(ok(tile)); print(tile, flush=True)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, place, str(Path(__file__).parents[2])], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
        counts = backup(place, tmp_path / "kept.db")
        assert writer.poll() is None
    finally:
        writer.kill()
    with Store.open(str(tmp_path / "kept.db")) as store:
        (row,) = store.studies()
        assert [t.config for t in store.study(row.id).trials()] == [ok(n).config for n in range(counts["trials"])]
    assert counts["trials"] > 20


def test_the_commands(kept: Path, tmp_path: Path) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([FLASHTUNE, *args], capture_output=True, text=True, check=False, cwd=tmp_path)

    restored = run("restore", str(kept), "--db", "new.db", "--json")
    assert restored.returncode == 0, restored.stderr
    assert json.loads(restored.stdout)["rows"] == COUNTS
    written = run("backup", "again.db", "--db", "new.db")
    assert written.returncode == 0, written.stderr
    said = " ".join(written.stdout.split())
    assert said.startswith("wrote again.db: ")
    assert all(f"{count} {table.replace('_', ' ')}" in said for table, count in COUNTS.items())
    for args in (
        ("backup", "again.db", "--db", "new.db"),
        ("backup", "x.db", "--db", "none.db"),
        ("restore", "none.db"),
    ):
        refused = run(*args)
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused.stderr
    assert not (tmp_path / "x.db").exists()
    nowhere = run("backup", "no/where.db", "--db", "new.db")
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert "there is no folder" in nowhere.stderr
    assert not (tmp_path / "no").exists()
