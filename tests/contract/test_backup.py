"""Backup and restore: every row comes back, from and into either database, and never half."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from db.backup import backup, restore
from db.models import Base
from db.store import Store
from tests.contract.test_store import SETTINGS, SPEC, answer, ok, raw_connection, url  # noqa: F401
from tuner.errors import StorageError
from tuner.trial import Trial, TrialStatus

FLASHTUNE = Path(sys.executable).with_name("flashtune")


def fill(place: str) -> None:
    """Store two runs of a study, with trials of both kinds, the first run answered."""
    with Store.open(place) as store:
        study = store.begin_study(SPEC, SETTINGS)
        for tile in range(520):  # more than a chunk of the copy
            study.add_trial(ok(tile) if tile % 3 else Trial(ok(tile).config, TrialStatus.RUN_CRASH, "died of SIGSEGV"))
        study.finish(answer(), {"wall_s": 1.5})
        store.begin_study(SPEC, SETTINGS, force=True).add_trial(ok(7))


def rows(place: str) -> dict[str, list[tuple[object, ...]]]:
    """Read every row by SQL of its own."""
    with raw_connection(place) as connection:
        return {
            t.name: [tuple(map(str, r)) for r in connection.execute(t.select().order_by(*t.primary_key.columns))]
            for t in Base.metadata.sorted_tables
        }


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    fill(str(tmp_path / "origin.db"))
    backup(str(tmp_path / "origin.db"), tmp_path / "kept.db")
    return tmp_path / "kept.db"


def test_every_row_comes_back(url: str, tmp_path: Path) -> None:  # noqa: F811
    fill(url)
    before = rows(url)
    counts = backup(url, tmp_path / "kept.db")
    assert (
        counts
        == {name: len(found) for name, found in before.items()}
        == {"studies": 2, "trials": 521, "tuned_configs": 1}
    )
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
    with pytest.raises(StorageError, match="holds 2 studies; restore into an empty one"):
        restore(kept, url)
    assert rows(url) == before


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
    assert json.loads(restored.stdout)["rows"] == {"studies": 2, "trials": 521, "tuned_configs": 1}
    written = run("backup", "again.db", "--db", "new.db")
    assert (written.returncode, written.stdout) == (0, "wrote again.db: 2 studies, 521 trials, 1 tuned configs\n")
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
