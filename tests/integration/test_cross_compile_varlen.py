"""FA4's Hopper kernels for packed sequences compile without a GPU, and the measuring call finds them.

The measuring call is made here too, on fake tensors and with other lengths than were compiled for: what
it asks the cache for must all be there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.cross import in_child
from tuner import lengths
from tuner.config import Config
from tuner.families import load
from tuner.target import named, version_of
from tuner.workload import Workload

pytestmark = [
    pytest.mark.skipif(not version_of("flash-attn-4"), reason="flash-attn-4 is not installed"),
    pytest.mark.slow,
]

H200 = named("sm_90a")

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tuner.config import Config
from tuner.families import fa4_cache, fa4_launch, load
from tuner.families.base import Room
from tuner.lab_torch import BackwardInputs, Inputs, Packed
from tuner.target import named
from tuner.workload import Workload

room, answers = Room(named("sm_90a"), Path(sys.argv[1])), []
jobs = [(Config.from_dict(c), *map(Workload.from_dict, both)) for c, *both in json.loads(sys.argv[2])]
for config, workload, _ in jobs:
    built = load(config.family).compile(config, workload, room)
    files = [path.relative_to(room.cache_dir).as_posix() for path in built.files]
    answers.append({"files": files, **built.resources.to_dict()})
compiled = len(fa4_cache.compiled_here)

# As the measuring process has it, but for its caches: those would load the objects, which needs a driver
original = fa4_cache.cache
fa4_cache.cache = lambda path, load: original(path, False)
fa4_cache.note_compiles(room.cache_dir)
for config, workload, other in jobs:
    with FakeTensorMode():
        q, k, v, out, lse = fa4_launch.tensors(other)
        offsets = (torch.empty(other.batch + 1, dtype=torch.int32, device="cuda") for _ in range(2))
        packed = Packed(other, *offsets)
        inputs = Inputs(q, k, v, out, packed=packed)
        if workload.op == "bwd":
            rest = (torch.empty_like(t) for t in (out, q, k, v))
            inputs = BackwardInputs(q, k, v, out, lse, *rest, packed=packed)
        load(config.family).build(config, workload, room)(inputs)
print(json.dumps([answers, compiled, fa4_cache.compiled_here[compiled:]]))
"""


def job(family: str, shape: dict[str, Any], **params: Any) -> tuple[Config, Workload, Workload]:
    """Return a config, its workload, and the workload of other inputs to verify with."""
    base = {"heads_q": 16, "heads_kv": 16, "head_dim": 128, "op": "bwd" if "bwd" in family else "fwd"}
    workload = Workload.from_dict({**base, **shape})
    config = Config.make(family, 1, **params)
    assert load(family).refuses(workload, H200) == ""
    assert load(family).feasible(config, workload, H200) == ""
    other_q, other_k = lengths.ragged(workload.lengths_q, workload.lengths_k, bool(workload.pattern.masks), 7)
    return config, workload, workload.with_(lengths_q=other_q, lengths_k=other_k)


TILES = {"mma_pv_is_rs": True, "intra_wg_overlap": True, "num_stages": 2, "q_blocks": 1, "mask": "native"}
DECODE = {"heads_kv": 2, "lengths_q": "1*300", "lengths_k": "8192,300*299"}
RAGGED = {"lengths": "2048,1,777,0,1500", "pattern": "causal"}
JOBS = {
    "stock": job("fa4_fwd_sm90", RAGGED),
    "grouped": job("fa4_fwd_sm90", {**RAGGED, "heads_kv": 2}, **TILES, tile_m=128, tile_n=96, pack_gqa=True),
    "decode": job("fa4_fwd_sm90", DECODE, **TILES, tile_m=64, tile_n=128, pack_gqa=True),
    "alibi": job(
        "fa4_fwd_sm90",
        {"lengths_q": [64, 7], "lengths_k": [512, 90], "pattern": "sliding_window(100) + softcap(20) + alibi"},
        **TILES,
        tile_m=128,
        tile_n=128,
        pack_gqa=False,
    ),
    "backward": job("fa4_bwd_sm90", RAGGED),
    "grouped backward": job("fa4_bwd_sm90", {**RAGGED, "heads_kv": 2, "pattern": "causal + alibi"}),
}


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("artifacts")
    order = [(c.to_dict(), w.to_dict(), other.to_dict()) for c, w, other in JOBS.values()]
    return in_child(SCRIPT, folder, H200, order)


@pytest.fixture(scope="module")
def built(answer: Any) -> dict[str, dict[str, Any]]:
    return dict(zip(JOBS, answer[0], strict=True))


def test_packed_kernels_compile_and_spill_nothing(built: dict[str, dict[str, Any]]) -> None:
    assert len({a["files"][0] for a in built.values()}) == len(JOBS)
    assert {name: a["spill_bytes"] for name, a in built.items()} == dict.fromkeys(JOBS, 0)
    assert all(a["registers"] > 0 for a in built.values())


def test_the_files_are_all_that_a_call_needs(built: dict[str, dict[str, Any]]) -> None:
    kinds = {name: [Path(file).parent.name for file in a["files"]] for name, a in built.items()}
    # above 256 sequences FA4 first finds out which block works on which
    assert [("tile_cumsum" in k, "blocks_to_batch" in k) for k in (kinds["decode"], kinds["stock"])] == [
        (True, True),
        (False, False),
    ]
    assert [kinds[n].count("bwd_post") for n in ("backward", "grouped backward")] == [1, 2]


def test_the_measuring_call_compiles_nothing_whatever_the_lengths(answer: Any) -> None:
    _, compiled, fresh = answer
    assert compiled > len(JOBS)  # what is compiled is noticed
    assert fresh == []
