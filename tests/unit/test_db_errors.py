"""What a person can do to a database: each gives one line with the place and the next step, and
leaves the file as it was."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event

from db import engine as engines
from db.store import Store
from tuner.config import Config
from tuner.errors import StorageError
from tuner.spec import StudySettings, StudySpec
from tuner.target import Toolchain, named
from tuner.trial import Trial, TrialStatus
from tuner.workload import Workload

SPEC = StudySpec(
    Workload(batch=1, heads_q=1, heads_kv=1, seqlen_q=64, seqlen_k=64, head_dim=64),
    named("fake"),
    Toolchain(),
    "graph",
    ("fake/1",),
)


def trial(tile: int) -> Trial:
    return Trial(Config.make("fake", 1, tile_m=tile), TrialStatus.COMPILE_ERROR, "no " * 1000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A real database with fifty trials in it."""
    path = tmp_path / "folder" / "flashtune.db"
    with Store.open(str(path)) as store:
        study = store.begin_study(SPEC, StudySettings())
        for tile in range(50):
            study.add_trial(trial(tile))
    assert os.listdir(path.parent) == [path.name]
    return path


def refused(place: str | Path, *, create: bool = True, read_only: bool = False) -> str:
    """Return why ``place`` is refused, in one line with a next step."""
    with pytest.raises(StorageError) as caught:
        Store.open(str(place), create=create, read_only=read_only).close()
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message  # what happened, then the next step
    return message


def refused_untouched(path: Path, *, create: bool = True, read_only: bool = False) -> str:
    """The same for a file in a test's own folder, where nothing may change, appear or vanish."""
    before = {p: p.read_bytes() for p in path.parent.iterdir()}
    message = refused(path, create=create, read_only=read_only)
    assert str(path) in message
    assert {p: p.read_bytes() for p in path.parent.iterdir()} == before
    return message


def test_the_folder_is_private(path: Path) -> None:
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_database_is_as_durable_as_promised(path: Path) -> None:
    assert path.read_bytes()[18:20] == b"\x02\x02"  # write-ahead log: sqlite.org/fileformat.html
    seen: set[tuple[int, ...]] = set()

    def look(connection: Connection) -> None:
        pragmas = ("synchronous", "foreign_keys")
        seen.add(tuple(connection.exec_driver_sql(f"PRAGMA {p}").scalar_one() for p in pragmas))

    event.listen(Engine, "begin", look)
    try:
        with Store.open(str(path)) as store:
            store.begin_study(SPEC, StudySettings())
    finally:
        event.remove(Engine, "begin", look)
    assert seen == {(2, 1)}  # FULL, on


@pytest.mark.parametrize("text", ["hello\n", "SQLite format 2\0" + "x" * 5000, "\0" * 4096, "{}"])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_is_no_database(tmp_path: Path, text: str, read_only: bool) -> None:
    path = tmp_path / "notes.db"
    path.write_text(text)
    assert "file is not a database; restore a backup, or move it away" in refused_untouched(path, read_only=read_only)


@pytest.mark.parametrize("size", [7, 16, 50, 100, 4096, 10_000, -1])
def test_a_truncated_database(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    message = refused_untouched(path)
    assert f"the file is truncated ({path.stat().st_size} bytes); restore a backup" in message


@pytest.mark.parametrize("start", [16, 100])
def test_a_damaged_schema(path: Path, start: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:start] + b"\xa5" * (4096 - start) + whole[4096:])
    assert "restore a backup" in refused_untouched(path)


def test_damaged_pages_are_found_when_read(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))
    assert "malformed; restore a backup" in refused_untouched(path)


def test_damage_among_the_trials_fails_those_alone(path: Path) -> None:
    with sqlite3.connect(path) as raw:
        page = raw.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trials'").fetchone()[0]
    raw.close()
    whole = path.read_bytes()
    damaged = whole[: 4096 * (page - 1)] + b"\xa5" * 4096 + whole[4096 * page :]
    path.write_bytes(damaged)
    with Store.open(str(path)) as store:
        study = store.begin_study(SPEC, StudySettings(seed=1))
        assert study.settings["seed"] == 1
        for fail in (study.trials, store.studies, lambda: study.add_trial(trial(99))):
            with pytest.raises(StorageError, match=f"{path}: database disk image is malformed; restore a backup"):
                fail()


def test_the_database_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "bookmarks.db"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE bookmarks (url)")
    raw.close()
    assert "it holds tables of something else (bookmarks); choose another database" in refused_untouched(path)


def test_an_empty_file_becomes_a_database_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    assert "holds no flashtune tables yet" in refused_untouched(path, create=False)
    assert "holds no flashtune tables yet" in refused_untouched(path, read_only=True)
    with Store.open(str(path)) as store:
        assert store.studies() == []


@pytest.mark.parametrize(("create", "read_only"), [(False, False), (True, True)])
def test_a_missing_file_is_not_made_unless_asked(tmp_path: Path, create: bool, read_only: bool) -> None:
    path = tmp_path / "nowhere" / "flashtune.db"
    message = refused(path, create=create, read_only=read_only)
    assert f"{path}: there is no such file; check the path" in message
    assert list(tmp_path.iterdir()) == []


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link.db").symlink_to(tmp_path / "gone" / "x.db")
    os.mkfifo(tmp_path / "pipe.db")
    assert "not a regular file; choose another path" in refused(tmp_path)
    assert "not a regular file" in refused(tmp_path / "pipe.db")
    assert "cannot be made" in refused(tmp_path / "link.db")
    for create in (True, False):
        for below in (tmp_path / "file" / "x.db", tmp_path / "file" / "deeper" / "x.db"):
            assert f"{below}: " in refused(below, create=create)
    for nowhere in ("/proc/flashtune.db", "/proc/flashtune/flashtune.db", f"{tmp_path}/{'n' * 300}.db"):
        assert f"{nowhere}: " in refused(nowhere)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write whatever its permissions say")
def test_permissions(path: Path) -> None:
    path.chmod(0o400)
    assert "it cannot be written; check the permissions" in refused(path)
    path.chmod(0o000)
    with pytest.raises(StorageError, match="check the permissions"):
        Store.open(str(path), read_only=True)
    path.chmod(0o600)
    path.parent.chmod(0o500)
    with pytest.raises(StorageError, match="check the permissions"):
        Store.open(str(path.parent / "new.db"))
    path.parent.chmod(0o700)


def test_reading_leaves_the_folder_as_it_was(path: Path) -> None:
    before = path.read_bytes()
    with Store.open(str(path), read_only=True) as store:
        assert store.studies()[0].trials == 50
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Let no database grow beyond 100 pages: SQLite then says what it says of a full disk."""

    def limit(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA max_page_count = 100")

    event.listen(Engine, "connect", limit)
    yield
    event.remove(Engine, "connect", limit)


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_loses_only_what_did_not_fit(path: Path) -> None:
    with Store.open(str(path)) as store:
        study, tile = store.begin_study(SPEC, StudySettings()), 50
        with pytest.raises(StorageError, match=f"{path}: database or disk is full; free some disk space"):
            for tile in range(50, 1000):
                study.add_trial(trial(tile))
        assert tile > 50
        assert study.trials() == [trial(i) for i in range(tile)]


def test_a_lock_held_while_the_database_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "LOCK_WAIT_S", 0.2)
    path = tmp_path / "new.db"
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("BEGIN EXCLUSIVE")
    assert "locked; another process keeps it locked: wait until that one is done" in refused(path)
    raw.close()
    with Store.open(str(path)) as store:
        assert store.studies() == []


def test_malformed_json(path: Path) -> None:
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE trials SET trial = '{\"config\": ' WHERE id = 7")
    raw.close()
    with Store.open(str(path)) as store, pytest.raises(StorageError, match=r"JSON that cannot be read .*; restore"):
        store.study(store.studies()[0].id).trials()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "would keep nothing; give the path of a file"),
        (":memory:", "':memory:' would keep nothing"),
        ("sqlite://", "would keep nothing"),
        ("sqlite:///:memory:", "would keep nothing"),
        ("sqlite:////srv/x.db?mode=ro", "options after '?'"),
        ("a\0b.db", "NUL character; leave it out"),
        ("sqlite+aiosqlite:///x.db", "'sqlite+aiosqlite', which is not supported; write a file path, or postgresql"),
        ("mysql://u:hunter2@h/db", "'mysql://***@h/db' names 'mysql', which is not supported"),
        ("postgresql+asyncpg://h/db?password=hunter2", "?***' names 'postgresql+asyncpg'"),
        ("postgresql://u:hunter2@h:port/db", "'postgresql://***@h:port/db' cannot be read; write"),
        ("://u:hunter2@h", "cannot be read; write"),
        ("postgresql://u:hun@ter2@h/db", "second @; write an @ in the password as %40"),
    ],
)
def test_urls_that_cannot_be(url: str, said: str) -> None:
    message = refused(url)
    assert said in message
    assert "ter2" not in message


@pytest.mark.parametrize("form", ["postgresql://ann:hunter2@{}/ft", "postgresql+psycopg://{}/ft?password=hunter2"])
def test_a_server_that_does_not_answer(form: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"  # bound, not listening: refused for sure
        message = refused(form.format(host))
    assert f"{host}/ft: " in message
    assert "Connection refused" in message
    assert message.endswith("check the URL, and that the server runs and takes connections")
    assert "hunter2" not in message
