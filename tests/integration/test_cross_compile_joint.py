"""Both directions of FA4 compiled as one config for GPUs that are not here, and found again by another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.cross import architectures, in_child
from tuner.compile import Compiled, CompilePool
from tuner.config import Config
from tuner.families import load
from tuner.families.joint import Joint
from tuner.pattern import parse
from tuner.target import Target, named, version_of
from tuner.trial import TrialStatus
from tuner.workload import Workload

pytestmark = [
    pytest.mark.skipif(not version_of("flash-attn-4"), reason="flash-attn-4 is not installed"),
    pytest.mark.slow,
]

SM_90A = named("sm_90a")
CAUSAL = Workload(
    batch=2, heads_q=16, heads_kv=4, seqlen_q=4096, seqlen_k=4096, head_dim=128, op="fwd+bwd", pattern=parse("causal")
)
DOCUMENTS = CAUSAL.with_(pattern=parse("document(mean=512) + softcap(20)"))

# Compiles a joint config, then each direction alone, as whoever tunes one direction does.
AGAIN = """
import json, sys
from pathlib import Path
from tuner.config import Config
from tuner.families import fa4_cache, load
from tuner.families.base import Room
from tuner.target import named
from tuner.workload import Workload

room = Room(named(json.loads(sys.argv[2])), Path(sys.argv[1]))

def names(built):
    return [path.relative_to(room.cache_dir).as_posix() for path in built.files]

found = []
for c, w in json.loads(sys.argv[3]):
    config, workload = Config.from_dict(c), Workload.from_dict(w)
    joint = load(config.family)
    alone = [
        names(half.family.compile(half.of(config, workload), half.workload(workload), room))
        for half in (joint.forward, joint.backward)
    ]
    found.append([names(joint.compile(config, workload, room)), *alone])
print(json.dumps([found, fa4_cache.compiled_here]))
"""


def again(folder: Path, target: Target, *jobs: tuple[Config, Workload]) -> tuple[Any, Any]:
    order = [(c.to_dict(), w.to_dict()) for c, w in jobs]
    found, fresh = in_child(AGAIN, folder, target, target.arch, order)
    return found, fresh


def both(folder: Path, target: Target, *jobs: tuple[Config, Workload]) -> list[Compiled]:
    with CompilePool(target, folder, workers=1) as pool:
        futures = [pool.submit(c, w) for c, w in jobs]
        return [f.result() for f in futures]


def tuned(joint: Joint, workload: Workload, target: Target) -> Config:
    """Return a config that is neither direction's own choice: the last of those to try first."""
    return [c for c in joint.first(workload) if not joint.feasible(c, workload, target)][-1]


def test_one_compile_makes_all_that_measuring_both_directions_loads(tmp_path: Path) -> None:
    joint = load("fa4_joint_sm90")
    assert isinstance(joint, Joint)
    jobs = [(joint.stock(CAUSAL), CAUSAL), *((tuned(joint, w, SM_90A), w) for w in (CAUSAL, DOCUMENTS))]
    compiled = both(tmp_path, SM_90A, *jobs)
    assert [(c.status, c.error) for c in compiled] == [(TrialStatus.OK, "")] * 3
    found, fresh = again(tmp_path, SM_90A, *jobs)
    assert fresh == []  # nothing is left to compile for another process, in either direction
    for its, (files, forward, backward) in zip(compiled, found, strict=True):
        assert list(its.files) == files == [*forward, *backward]
        kinds = [Path(file).parent.name for file in backward]
        assert (len(forward), kinds.count("bwd_pre"), kinds.count("bwd_post")) == (1, 1, 2)  # grouped heads: dk, dv too
        for file in files:
            assert architectures((tmp_path / file).read_bytes()) == [90]
        assert (its.resources.registers or 0) >= 160
        assert (its.resources.code_bytes or 0) > 30_000
    assert compiled[0].resources.smem_bytes is None  # FA4 chose the tiles
    assert all(0 < (c.resources.smem_bytes or 0) <= 232_448 for c in compiled[1:])


def test_it_compiles_for_blackwell(tmp_path: Path) -> None:
    joint, target = load("fa4_joint_sm100"), named("sm_100a")
    assert isinstance(joint, Joint)
    job = (tuned(joint, DOCUMENTS, target), DOCUMENTS)
    (compiled,) = both(tmp_path, target, job)
    assert (compiled.status, compiled.error) == (TrialStatus.OK, "")
    ((files, forward, backward),), fresh = again(tmp_path, target, job)
    assert fresh == []
    assert list(compiled.files) == files == [*forward, *backward]
    assert 0 < (compiled.resources.tmem_columns or 0) <= 512
