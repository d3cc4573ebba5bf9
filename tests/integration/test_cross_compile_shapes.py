"""FA4's Hopper forward compiles over the shapes that people run: wide heads, grouped heads, a few queries.

Compiled in one process without a GPU; whether the numbers are right is asked on one (tests/gpu).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.cross import in_child
from tuner.config import Config
from tuner.families import load
from tuner.pattern import parse
from tuner.target import named, version_of
from tuner.workload import Workload

pytestmark = [
    pytest.mark.skipif(not version_of("flash-attn-4"), reason="flash-attn-4 is not installed"),
    pytest.mark.slow,
]

H200 = named("sm_90a")

COMPILE = """
import json, sys
from pathlib import Path
from tuner.config import Config
from tuner.families import load
from tuner.families.base import Room
from tuner.target import named
from tuner.workload import Workload

room, answers = Room(named("sm_90a"), Path(sys.argv[1])), []
for config, workload in json.loads(sys.argv[2]):
    built = load("fa4_fwd_sm90").compile(Config.from_dict(config), Workload.from_dict(workload), room)
    answers.append({"files": [path.name for path in built.files], **built.resources.to_dict()})
print(json.dumps(answers))
"""


def job(pattern: str, tile_m: int, tile_n: int, shape: dict[str, Any], **params: Any) -> tuple[Config, Workload]:
    base = {"batch": 4, "heads_q": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128}
    workload = Workload(**{**base, **shape}, pattern=parse(pattern))
    rest = {"mask": "native", "mma_pv_is_rs": True, "intra_wg_overlap": True, "num_stages": 2, "q_blocks": 1}
    config = Config.make("fa4_fwd_sm90", 1, **{**rest, "pack_gqa": False, **params}, tile_m=tile_m, tile_n=tile_n)
    assert load("fa4_fwd_sm90").refuses(workload, H200) == ""
    assert load("fa4_fwd_sm90").feasible(config, workload, H200) == ""
    return config, workload


LATENT = {"head_dim": 192, "head_dim_v": 128, "heads_kv": 4}
DECODE = {"seqlen_q": 1, "heads_q": 32, "heads_kv": 4, "seqlen_k": 8192}
JOBS = [
    job("causal", 128, 80, {"head_dim": 256}),
    job("causal", 128, 96, LATENT, pack_gqa=True),
    job("causal", 128, 96, LATENT),
    job("full", 64, 128, DECODE, pack_gqa=True),
    job("causal", 64, 128, {**DECODE, "seqlen_q": 16}),
    job("document(mean=512)", 128, 128, {"head_dim": 64, "heads_kv": 4}, mask="block", pack_gqa=True, q_blocks=2),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("artifacts")
    order = [(c.to_dict(), w.to_dict()) for c, w in JOBS]
    answers: list[dict[str, Any]] = in_child(COMPILE, folder, H200, order)
    return answers


def test_every_shape_compiles_to_a_kernel_of_its_own_that_spills_nothing(built: list[dict[str, Any]]) -> None:
    assert len({a["files"][0] for a in built}) == len(JOBS)
    for (config, _), a in zip(JOBS, built, strict=True):
        groups = int(config["tile_m"]) // 64 + 1  # of 128 threads: one for each 64 rows, one that loads
        assert 0 < a["registers"] * groups * 128 <= 65536
        assert a["spill_bytes"] == 0
        assert a["smem_bytes"] <= 227 * 1024
        assert a["tmem_columns"] is None
