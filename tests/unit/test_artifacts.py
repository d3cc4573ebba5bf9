"""Compiled objects between machines: only the right bytes land, whole, and only inside the cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from tuner.artifact import Artifact
from tuner.errors import InputError, MachineError
from workers import artifacts as module
from workers.artifacts import Artifacts, DatabaseArtifacts, FolderArtifacts, open_artifacts
from workers.settings import Settings

ROOT = Path(__file__).parents[2]
NAME, OTHER = "fa4/stages2/k.o", "fa4/shipped/fwd/s.o"
CODE = b"\x7fELF" + bytes(range(256)) * 300


class Memory:
    """The store's two methods; like it, keeps what it has."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def artifacts_put(self, sha256: str, data: bytes) -> None:
        self.held.setdefault(sha256, data)

    def artifacts_get(self, sha256: str) -> bytes | None:
        return self.held.get(sha256)


class Place:
    """One implementation, and the hand that gets at what it holds behind its back."""

    def __init__(self, artifacts: Artifacts, put: Callable[[str, bytes | None], None]) -> None:
        self.artifacts, self.put = artifacts, put


def stored(folder: Path, sha256: str) -> Path:
    return folder / "sha256" / sha256[:2] / sha256


@pytest.fixture(params=["folder", "database"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        folder = tmp_path / "shared" / "objects"

        def put(sha256: str, data: bytes | None) -> None:
            stored(folder, sha256).unlink() if data is None else stored(folder, sha256).write_bytes(data)

        return Place(FolderArtifacts(folder), put)
    memory = Memory()

    def hold(sha256: str, data: bytes | None) -> None:
        memory.held = {sha256: data} if data is not None else {}

    return Place(DatabaseArtifacts(memory), hold)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The cache folder of the machine that compiled."""
    for name, data in ((NAME, CODE), (OTHER, CODE[::-1])):
        (tmp_path / "here" / name).parent.mkdir(parents=True)
        (tmp_path / "here" / name).write_bytes(data)
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The cache folder of the machine that measures; not made yet."""
    return tmp_path / "there"


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_objects_arrive_as_they_were(place: Place, here: Path, there: Path) -> None:
    published = place.artifacts.publish(here, [NAME, OTHER])
    assert published == (
        Artifact(NAME, hashlib.sha256(CODE).hexdigest(), len(CODE)),
        Artifact(OTHER, hashlib.sha256(CODE[::-1]).hexdigest(), len(CODE)),
    )
    place.artifacts.fetch(there, published)
    assert files(there) == {NAME: CODE, OTHER: CODE[::-1]}


def test_nobody_else_may_read_or_write_what_landed(place: Place, here: Path, there: Path) -> None:
    old = os.umask(0)
    try:
        place.artifacts.fetch(there, place.artifacts.publish(here, [NAME]))
    finally:
        os.umask(old)
    assert mode(there / NAME) == 0o600
    assert [mode(p) for p in (there, there / "fa4", there / "fa4/stages2")] == [0o700] * 3


def test_nothing_to_do_is_fine(place: Place, here: Path, there: Path) -> None:
    assert place.artifacts.publish(here, []) == ()
    place.artifacts.fetch(there, ())
    assert not there.exists()


def test_what_is_there_already_is_not_fetched(place: Place, here: Path) -> None:
    published = place.artifacts.publish(here, [NAME])
    inode = (here / NAME).stat().st_ino
    place.put(published[0].sha256, None)  # nowhere to be had any more
    place.artifacts.fetch(here, published)
    assert (here / NAME).stat().st_ino == inode


@pytest.mark.parametrize("wrong", [b"", CODE[:-1], CODE + b"\0", b"\x7fELf" + CODE[4:]])
def test_a_wrong_file_in_the_cache_is_replaced(place: Place, here: Path, there: Path, wrong: bytes) -> None:
    published = place.artifacts.publish(here, [NAME])
    (there / NAME).parent.mkdir(parents=True)
    (there / NAME).write_bytes(wrong)
    place.artifacts.fetch(there, published)
    assert files(there) == {NAME: CODE}


@pytest.mark.parametrize("damage", [b"", CODE[:-1], CODE + b"\0", b"\x7fELf" + CODE[4:]])
def test_a_damaged_object_never_lands(place: Place, here: Path, there: Path, damage: bytes) -> None:
    (published,) = place.artifacts.publish(here, [NAME])
    place.put(published.sha256, damage)
    with pytest.raises(MachineError, match=rf"{NAME} is damaged.*{len(damage)} bytes.*compiled again"):
        place.artifacts.fetch(there, [published])
    assert not there.exists()
    place.put(published.sha256, None)  # as the message says
    place.artifacts.publish(here, [NAME])
    place.artifacts.fetch(there, [published])
    assert files(there) == {NAME: CODE}


def test_a_size_that_does_not_fit_the_digest_is_damage(place: Place, here: Path, there: Path) -> None:
    (published,) = place.artifacts.publish(here, [NAME])
    with pytest.raises(MachineError, match="damaged"):
        place.artifacts.fetch(there, [replace(published, size_bytes=len(CODE) - 1)])
    assert not there.exists()


def test_a_missing_object_says_that_it_is_compiled_again(place: Place, there: Path) -> None:
    lost = Artifact.of(NAME, CODE)
    with pytest.raises(MachineError, match=rf"{NAME} .*{lost.sha256}.* is not in .*compiled again"):
        place.artifacts.fetch(there, [lost])


def test_a_file_that_was_not_compiled_cannot_be_published(place: Place, here: Path, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"fa4/x\.o is not in .*compiled again"):
        place.artifacts.publish(here, ["fa4/x.o"])
    with pytest.raises(MachineError, match=r"k\.o is not in"):
        place.artifacts.publish(tmp_path / "no such folder", ["k.o"])
    with pytest.raises(MachineError, match="fa4/stages2 is not in"):
        place.artifacts.publish(here, ["fa4/stages2"])  # a folder
    os.mkfifo(here / "fa4/pipe.o")
    with pytest.raises(MachineError, match=r"fa4/pipe\.o is not in"):
        place.artifacts.publish(here, ["fa4/pipe.o"])


BAD_NAMES = ["", ".", "..", "../x.o", "fa4/../../x.o", "fa4/..", "/etc/passwd", "fa4//k.o", "./k.o", "fa4/k.o/", "a\0b"]


@pytest.mark.parametrize("name", [*BAD_NAMES, "a\nb", "a\ud800b"])
def test_names_that_leave_the_folder_are_refused(place: Place, here: Path, there: Path, name: str) -> None:
    (here.parent / "x.o").write_bytes(CODE)  # what ../x.o would publish
    with pytest.raises(InputError, match="artifact name"):
        place.artifacts.publish(here, [name])
    with pytest.raises(InputError, match="artifact name"):
        Artifact.of(name, CODE)
    forged = Artifact.of(NAME, CODE)
    object.__setattr__(forged, "name", name)  # past the value's own check
    place.artifacts.publish(here, [NAME])
    with pytest.raises(InputError, match="artifact name"):
        place.artifacts.fetch(there, [forged])
    assert not there.exists()


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "A" * 64, "../" + "0" * 61, "0" * 64 + "\n"])
def test_a_digest_that_is_none_is_refused(digest: str) -> None:
    with pytest.raises(InputError, match="SHA-256"):
        Artifact(NAME, digest, 1)


def test_a_link_in_the_cache_is_not_followed(place: Place, here: Path, there: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    published = place.artifacts.publish(here, [NAME])

    there.mkdir()
    (there / "fa4").symlink_to(outside)  # a folder on the way
    with pytest.raises(MachineError, match=rf"cannot .*{NAME} in .*link"):
        place.artifacts.fetch(there, published)
    assert list(outside.iterdir()) == []

    (there / "fa4").unlink()
    (there / "fa4/stages2").mkdir(parents=True)
    (outside / "victim").write_bytes(b"precious")
    (there / NAME).symlink_to(outside / "victim")  # the name itself: the link goes, its target stays
    place.artifacts.fetch(there, published)
    assert (outside / "victim").read_bytes() == b"precious"
    assert not (there / NAME).is_symlink()
    assert files(there) == {NAME: CODE}

    (there / NAME).unlink()
    (outside / "same").write_bytes(CODE)  # not even where the link's target has the right bytes
    (there / NAME).symlink_to(outside / "same")
    place.artifacts.fetch(there, published)
    assert not (there / NAME).is_symlink()


def test_a_link_is_not_published(place: Place, here: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (here / "link.o").symlink_to(tmp_path / "secret")
    (here / "up").symlink_to(tmp_path)
    for name in ("link.o", "up/secret"):
        with pytest.raises(MachineError, match=name):
            place.artifacts.publish(here, [name])


def test_the_cache_folder_itself_may_be_a_link(place: Place, here: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    place.artifacts.fetch(tmp_path / "cache", place.artifacts.publish(here, [NAME]))
    assert files(tmp_path / "disk") == {NAME: CODE}


def test_what_is_in_the_way_is_said(place: Place, here: Path, there: Path) -> None:
    published = place.artifacts.publish(here, [NAME])
    (there / NAME).mkdir(parents=True)
    with pytest.raises(MachineError, match=rf"cannot write .*{NAME}.*[Dd]irectory"):
        place.artifacts.fetch(there, published)
    assert [p for p in there.rglob("*") if p.is_file()] == []  # and no half file is left
    shutil.rmtree(there)
    there.write_bytes(b"")
    with pytest.raises(MachineError, match="cannot"):
        place.artifacts.fetch(there, published)


def test_an_object_may_take_256_mib_and_no_more(
    place: Place, here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.LIMIT_BYTES == 268_435_456
    monkeypatch.setattr(module, "LIMIT_BYTES", len(CODE))
    published = place.artifacts.publish(here, [NAME])
    place.artifacts.fetch(there, published)
    monkeypatch.setattr(module, "LIMIT_BYTES", len(CODE) - 1)
    with pytest.raises(MachineError, match=f"takes {len(CODE)} bytes"):
        place.artifacts.publish(here, [NAME])
    with pytest.raises(MachineError, match=f"takes {len(CODE)} bytes"):
        place.artifacts.fetch(there / "other", published)
    assert not (there / "other").exists()


def at_once(work: Callable[[], object], threads: int = 8) -> list[object]:
    barrier = Barrier(threads)

    def go() -> object:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(threads) as pool:
        return [f.result() for f in [pool.submit(go) for _ in range(threads)]]


def test_eight_publish_and_fetch_the_same_at_once(here: Path, there: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    artifacts, digest = FolderArtifacts(folder), hashlib.sha256(CODE).hexdigest()
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(there, ignore_errors=True)
        assert set(at_once(lambda: artifacts.publish(here, [NAME]))) == {(Artifact(NAME, digest, len(CODE)),)}
        assert files(folder) == {f"sha256/{digest[:2]}/{digest}": CODE}
        at_once(lambda: artifacts.fetch(there, [Artifact(NAME, digest, len(CODE))]))
        assert files(there) == {NAME: CODE}


def test_publishing_again_mends_the_shared_folder(here: Path, there: Path, tmp_path: Path) -> None:
    artifacts = FolderArtifacts(tmp_path / "shared")
    (published,) = artifacts.publish(here, [NAME])
    stored(tmp_path / "shared", published.sha256).write_bytes(CODE[:-1])
    artifacts.publish(here, [NAME])
    artifacts.fetch(there, [published])
    assert files(there) == {NAME: CODE}


def test_the_shared_folder_is_private_and_written_once(here: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    (published,) = FolderArtifacts(folder).publish(here, [NAME])
    path = stored(folder, published.sha256)
    assert (mode(path), mode(path.parent), mode(path.parent.parent), mode(folder)) == (0o600, 0o700, 0o700, 0o700)
    inode = path.stat().st_ino
    FolderArtifacts(folder).publish(here, [NAME])
    assert path.stat().st_ino == inode


KILLED = """
import os, signal, sys
from pathlib import Path
from tuner.artifact import Artifact
from workers.artifacts import FolderArtifacts

def die(half, name, *, src_dir_fd, dst_dir_fd):
    size = os.stat(half, dir_fd=src_dir_fd).st_size
    print(size, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

os.replace = die
shared, cache, name, do = sys.argv[1:]
artifacts = FolderArtifacts(Path(shared))
if do == "publish":
    artifacts.publish(Path(cache), [name])
else:
    data = Path(do).read_bytes()
    artifacts.fetch(Path(cache), [Artifact.of(name, data)])
"""


def killed(*args: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, *args], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, f"{len(CODE)}\n"), done.stderr


def test_a_kill_before_the_rename_leaves_no_half_file(here: Path, there: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    wanted = Artifact.of(NAME, CODE)
    killed(str(shared), str(here), NAME, "publish")
    assert not stored(shared, wanted.sha256).exists()
    with pytest.raises(MachineError, match="is not in"):
        FolderArtifacts(shared).fetch(there, [wanted])
    FolderArtifacts(shared).publish(here, [NAME])

    killed(str(shared), str(there), NAME, str(here / NAME))
    assert [p.suffix for p in there.rglob("*") if p.is_file()] == [".tmp"]
    FolderArtifacts(shared).fetch(there, [wanted])
    assert (there / NAME).read_bytes() == CODE


def test_a_full_disk_leaves_nothing(here: Path, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = FolderArtifacts(tmp_path / "shared")
    published = artifacts.publish(here, [NAME])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match=r"No space left on device.*free space"):
        artifacts.fetch(there, published)
    assert files(there) == {}


def test_the_settings_choose(here: Path, there: Path, tmp_path: Path) -> None:
    memory = Memory()
    settings = Settings.from_env({"FLASHTUNE_HOME": str(tmp_path / "home")})
    (published,) = open_artifacts(settings, memory).publish(here, [NAME])
    assert memory.held == {published.sha256: CODE}
    in_folder = open_artifacts(replace(settings, artifact_dir=tmp_path / "shared"), memory)
    in_folder.publish(here, [OTHER])
    assert list(memory.held) == [published.sha256]
    assert stored(tmp_path / "shared", hashlib.sha256(CODE[::-1]).hexdigest()).read_bytes() == CODE[::-1]


def test_an_artifact_survives_json() -> None:
    one = Artifact.of(NAME, CODE)
    assert Artifact.from_dict(one.to_dict()) == one
    with pytest.raises(InputError, match="cannot be negative"):
        Artifact.from_dict({**one.to_dict(), "size_bytes": -1})
