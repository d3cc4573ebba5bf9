"""One folder compiles, another measures: the compiling child says which files have to travel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from db.store import Store
from tuner.compile import Compiled, CompilePool
from tuner.config import Config
from tuner.errors import DefaultError
from tuner.families import load
from tuner.sandbox import Sandbox
from tuner.target import named
from tuner.trial import TrialStatus
from tuner.workload import Workload
from workers.artifacts import Artifacts, DatabaseArtifacts, FolderArtifacts

FAKE = named("fake")
WORKLOAD = Workload(batch=1, heads_q=8, heads_kv=8, seqlen_q=64, seqlen_k=64, head_dim=64)
STOCK, FIRST, SECOND, BROKEN = (load("fake").stock(WORKLOAD), *(Config.make("fake", 1, variant=n) for n in range(3)))
SCRIPT = json.dumps({"objects": True, "outcomes": {"2": {"does": "compile_error"}}})
CONFIGS = (STOCK, FIRST, SECOND, BROKEN)


def compiled(cache_dir: Path, script: str) -> list[Compiled]:
    with CompilePool(FAKE, cache_dir, workers=1, script=script) as pool:
        return [f.result() for f in [pool.submit(c, WORKLOAD) for c in CONFIGS]]


@pytest.fixture(params=["folder", "database"])
def artifacts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Artifacts]:
    if request.param == "folder":
        yield FolderArtifacts(tmp_path / "shared")
    else:
        with Store.open(f"sqlite:///{tmp_path}/flashtune.db") as store:
            yield DatabaseArtifacts(store)


def objects(cache_dir: Path) -> set[str]:
    return {p.relative_to(cache_dir).as_posix() for p in cache_dir.rglob("*") if p.is_file() and p.suffix != ".log"}


def test_the_child_says_which_files_a_config_needs(tmp_path: Path) -> None:
    found = compiled(tmp_path, SCRIPT)
    assert [c.status for c in found] == [*[TrialStatus.OK] * 3, TrialStatus.COMPILE_ERROR]
    assert [len(c.files) for c in found] == [1, 1, 1, 0]
    assert {name for c in found for name in c.files} == objects(tmp_path)
    assert len(objects(tmp_path)) == 3  # to each its own


def test_without_objects_there_is_nothing_to_travel(tmp_path: Path) -> None:
    assert [c.files for c in compiled(tmp_path, "{}")] == [()] * 4
    assert objects(tmp_path) == set()


def test_compiled_here_measured_there(artifacts: Artifacts, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    stock, first, second, _ = compiled(here, SCRIPT)
    with Sandbox(FAKE, there, script=SCRIPT) as sandbox:
        with pytest.raises(DefaultError, match="no compiled object"):
            sandbox.open(WORKLOAD, STOCK, "wall")
        artifacts.fetch(there, artifacts.publish(here, stock.files))
        bench = sandbox.open(WORKLOAD, STOCK, "wall")

        artifacts.fetch(there, artifacts.publish(here, first.files))
        assert bench.attempt(FIRST, first).status is TrialStatus.OK
        missed = bench.attempt(SECOND, second)
        assert missed.status is TrialStatus.RUN_ERROR
        assert "no compiled object" in missed.error

        (there / second.files[0]).write_bytes((there / first.files[0]).read_bytes())
        assert "it holds something else" in bench.attempt(SECOND, second).error
        artifacts.fetch(there, artifacts.publish(here, second.files))  # puts it right
        assert bench.attempt(SECOND, second).status is TrialStatus.OK
    assert objects(there) == {*stock.files, *first.files, *second.files}


def test_an_object_is_of_one_workload(tmp_path: Path) -> None:
    """Else a test of many workloads would not notice objects that never travelled."""
    stock = compiled(tmp_path, SCRIPT)[0]
    other = Workload(batch=2, heads_q=8, heads_kv=8, seqlen_q=64, seqlen_k=64, head_dim=64)
    with CompilePool(FAKE, tmp_path, workers=1, script=SCRIPT) as pool:
        assert pool.submit(STOCK, other).result().files != stock.files
