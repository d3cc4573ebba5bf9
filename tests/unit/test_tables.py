"""Recorded tables: what is read, what a bad one is told, and T4 there and back."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner import t4, tables
from tuner.config import Config
from tuner.errors import InputError
from tuner.pattern import parse
from tuner.tables import Cell, Row
from tuner.target import named
from tuner.trial import Measurement, Trial, TrialStatus
from tuner.workload import Workload

ROOT = Path(__file__).parents[2]
SWEEP = ROOT / "tests/fixtures/h200_fa4_fwd_sweep.jsonl"
STUDIES = ROOT / "benchmarks/results/2026-12-01-h200/trials-run3.jsonl.gz"
W = Workload(batch=2, heads_q=4, heads_kv=2, seqlen_q=512, seqlen_k=512, head_dim=64, pattern=parse("causal"))
H200 = named("sm_90a")


def config(tile: int, **more: Any) -> Config:
    return Config.make("fam", 3, tile=tile, **({"flag": True, "word": "a-b"} | more))


ROWS = (
    Row(config(16), TrialStatus.OK, 100.125, (100.0, 100.25), 1.5),
    Row(config(32), TrialStatus.OK, 80.0),
    *(Row(config(64 + i), s, None, (), 0.1 * i, f"why {s}") for i, s in enumerate(TrialStatus) if s != "ok"),
)
CELL = Cell("a cell", W, H200, ROWS, 90.0, "eager")


def test_the_sweep_has_eight_cells_and_its_default_is_the_twins_time() -> None:
    cells = {c.name: c for c in tables.read([SWEEP])}
    assert sum(len(c.rows) for c in cells.values()) == 572
    first = cells["full b16 h16 s1024 d128"]
    # its line says 237.344 for config null, measured first, and 241.216 for 128x128
    assert first.default_us == first.least_us == pytest.approx(241.216)
    # 128x128 is FA4's choice for head_dim 128, and 192x128 for 64
    assert cells["causal b2 h16 s8192 d128"].default_us == pytest.approx(844.432, abs=0.1)
    slow = cells["causal b16 h16 s1024 d64"]
    assert slow.best.config.label == "128x128 overlap native rs stages=3"
    assert slow.default_us and slow.default_us / slow.least_us == pytest.approx(1.0781, abs=1e-4)


def test_a_studys_trials_become_a_cell_a_family_with_times_beside_the_default() -> None:
    def trial(family: str, ratio: float | None, **params: int) -> Trial:
        made = Config.make(family, 1, **params)
        if ratio is None:
            return Trial(made, TrialStatus.RUN_ERROR, "no")
        return Trial(made, TrialStatus.OK, measurement=Measurement("graph", (7.0,), (50.0, 52.0, 54.0), ratio, 7.0))

    trials = [trial("rival", 2.0), trial("fam", 0.8), trial("fam", 1.3, tile=1), trial("fam", None, tile=2)]
    (cell,) = tables.from_trials(W, H200, [*trials, trial("other", None, tile=1)])
    assert cell.default_us == pytest.approx(52.0 / 0.8)
    assert [r.time_us for r in cell.rows] == [pytest.approx(40.0), None]
    assert (cell.least_us, cell.rows[1].status) == (pytest.approx(40.0), TrialStatus.RUN_ERROR)


def test_the_trials_of_a_whole_run_are_read() -> None:
    cells = tables.read([STUDIES])
    assert len(cells) == 24
    assert {c.family for c in cells} == {("fa4_fwd_sm90", 1)}
    assert len({c.workload for c in cells}) == 24
    softcap = next(c for c in cells if c.name.startswith("causal + softcap(cap=30.0) b2 h16 s8192 d128"))
    # 1.675x over FLASH and stock FA4 0.92x of it, by the README's table
    assert softcap.default_us and softcap.default_us / softcap.least_us == pytest.approx(1.675 / 0.9225, rel=0.01)


@pytest.mark.parametrize(
    "workload",
    [
        W,
        W.with_(pattern=parse("causal & document(mean=64) + softcap(30)"), deterministic=True),
        W.with_(lengths_q=[7, 7, 0], lengths_k=[7, 7, 0], pattern=parse("causal")),
        W.with_(lengths_q=[1] * 64, lengths_k=[300] * 63 + [8192]),
    ],
)
def test_a_workload_is_read_back_from_its_key(workload: Workload) -> None:
    assert tables.workload_of_key(workload.key) == workload


@pytest.mark.parametrize(
    "key",
    [
        "",
        "w1",
        W.key.replace("w1", "w0"),
        W.key.replace("hq4", "q4"),
        W.key + "|",
        W.key.replace("dense", "varlen(5"),
        "x" * 900,
    ],
)
def test_what_is_no_workloads_key(key: str) -> None:
    with pytest.raises(InputError):
        tables.workload_of_key(key)


ROW: dict[str, Any] = {
    **{"head_dim": 64, "causal": True, "batch": 1, "seqlen": 512, "heads": 4, "median_ms": 0.5},
    "config": {"tile_m": 64, "tile_n": 64, "mma_pv_is_rs": True, "intra_wg_overlap": True, "num_stages": 2},
}


def without(name: str) -> dict[str, Any]:
    return {k: v for k, v in ROW.items() if k != name}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no rows"),
        ('{"about": "nothing else"}', "holds no rows"),
        (json.dumps(without("median_ms")), "line 1 lacks the field 'median_ms'"),
        (json.dumps(without("config")), "line 1 lacks the field 'config'"),
        (json.dumps({**ROW, "median_ms": float("nan")}), "median_ms is nan"),
        (json.dumps({**ROW, "median_ms": float("inf")}), "median_ms is inf"),
        (json.dumps({**ROW, "median_ms": -1}), "median_ms is -1"),
        (json.dumps({**ROW, "median_ms": "fast"}), "median_ms is 'fast'"),
        (json.dumps({**ROW, "median_ms": None}), "median_ms is None"),
        (json.dumps({**ROW, "config": {"tile_m": 64}}), "config is {'tile_m': 64}; a sweep's has tile_m, tile_n"),
        (json.dumps({**ROW, "config": {**ROW["config"], "warp": 1}}), "a sweep's has"),
        (json.dumps({**ROW, "config": None}), "none of its 0 configs has a time"),
        (json.dumps(ROW) + "\n" + json.dumps(ROW), "is there twice"),
        (json.dumps({**ROW, "head_dim": 63}), "head_dim is 63"),
        (json.dumps(ROW) + "\n[1]", "line 2 is [1]"),
        (json.dumps(ROW) + "\n{", "line 2 is not JSON"),
        (json.dumps({"workload": W.key, "config": 3}), "line 1"),
        (json.dumps({"workload": "w9|x", **Trial(config(1), TrialStatus.OK).to_dict()}), "no tuned config"),
    ],
)
def test_a_bad_table_gets_one_clear_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    if said == "no tuned config":
        path.write_text(json.dumps({"workload": "w9|x", **CELL.trial(ROWS[1], 90.0).to_dict()}))
        said = "workload is 'w9|x'"
    with pytest.raises(InputError) as e:
        tables.read([path])
    assert said in str(e.value)
    assert str(path) in str(e.value)
    assert "\n" not in str(e.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "no.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(b"x" * 999)[:15])
    (tmp_path / "corrupt.jsonl.gz").write_bytes(gzip.compress(b"x")[:10] + b"\xff" * 9)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    for name in ("no.jsonl.gz", "half.jsonl.gz", "corrupt.jsonl.gz", "bytes.jsonl", "missing.jsonl", "."):
        with pytest.raises(InputError, match="cannot read the table"):
            tables.read([tmp_path / name])


def test_t4_there_and_back_is_the_same_cell() -> None:
    assert t4.loads(t4.dumps(CELL), "file") == CELL
    for cell in (*tables.read([SWEEP]), *tables.read([STUDIES])):
        back = t4.loads(t4.dumps(cell), "file")
        assert back.name == cell.name
        assert back.workload == cell.workload
        assert [r.config for r in back.rows] == [r.config for r in cell.rows]
        assert [r.status for r in back.rows] == [r.status for r in cell.rows]
        for a, b in zip(back.rows, cell.rows, strict=True):
            assert a.time_us == (None if b.time_us is None else pytest.approx(b.time_us, rel=1e-12))
        assert back.default_us == pytest.approx(cell.default_us, rel=1e-12)


def test_t4_is_what_the_schema_asks_for() -> None:
    """By results-schema.json 1.0.0 of kernel_tuner 1.5.0: types, the required fields and the enumeration."""
    document = json.loads(t4.dumps(CELL))
    assert document["schema_version"] == "1.0.0"
    invalid = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}
    for result, row in zip(document["results"], ROWS, strict=True):
        assert result.keys() >= {"configuration", "times", "invalidity", "correctness"}
        assert result["invalidity"] in invalid
        assert isinstance(result["correctness"], int)
        assert isinstance(result["objectives"], list)
        assert all(isinstance(m["value"], (int, float, str, list)) for m in result["measurements"])
        assert result["times"].keys() <= {"compilation_time", "runtimes", "framework", "search_algorithm", "validation"}
        assert (result["invalidity"] == "correct") is (row.status is TrialStatus.OK)
    first = document["results"][0]
    assert first["configuration"] == {"tile": 16, "flag": True, "word": "a-b"}
    assert first["measurements"][0] == {"name": "time", "value": 0.100125, "unit": "ms"}
    assert first["times"] == {"runtimes": [0.1, 0.10025], "compilation_time": 1500.0}
    statuses = {r["measurements"][-2]["value"]: r["invalidity"] for r in document["results"][2:]}
    assert statuses["compile_crash"] == "compile"
    assert statuses["run_timeout"] == statuses["compile_timeout"] == "timeout"
    assert statuses["incorrect"] == "correctness"


FOREIGN: dict[str, Any] = {
    "schema_version": "1.0.0",
    "metadata": {"timeunit": "milliseconds"},
    "results": [
        {
            "configuration": {"block_size_x": 32, "tile": 1.0 if i == 9 else i},
            "times": {"compilation": 3.0, "runtimes": [0.5]},
            "invalidity": "correct" if i else "compile",
            "correctness": 1,
            "objectives": ["time"],
            "measurements": [{"name": "time", "value": 0.5 + i, "unit": "ms"}] if i else [],
        }
        for i in range(3)
    ],
}


def test_a_file_of_another_tuner_is_a_cell_without_a_workload() -> None:
    cell = t4.loads(json.dumps(FOREIGN), "theirs")
    assert (cell.name, cell.workload, cell.default_us) == ("theirs", None, None)
    assert [r.time_us for r in cell.rows] == [None, 1500.0, 2500.0]
    assert [r.status for r in cell.rows] == [TrialStatus.COMPILE_ERROR, TrialStatus.OK, TrialStatus.OK]
    assert cell.rows[0].compile_s == pytest.approx(0.003)
    seconds = {**FOREIGN, "metadata": {"timeunit": "seconds"}}
    assert t4.loads(json.dumps(seconds), "theirs").rows[1].time_us == 1.5e6


def changed(position: int, **changes: Any) -> dict[str, Any]:
    results = [dict(r) for r in FOREIGN["results"]]
    results[position] = {k: v for k, v in {**results[position], **changes}.items() if v != "gone"}
    return {**FOREIGN, "results": results}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "no list of results"),
        ({}, "no list of results"),
        ({**FOREIGN, "results": []}, "results is empty"),
        ({**FOREIGN, "schema_version": "7.0.0"}, "schema_version is '7.0.0'"),
        ({**FOREIGN, "metadata": {"timeunit": "fortnights"}}, "timeunit is 'fortnights'"),
        ({**FOREIGN, "metadata": {"timeunit": []}}, "timeunit is []"),
        ({**FOREIGN, "metadata": [1]}, "metadata is [1]"),
        (changed(1, configuration="gone"), "results[1] lacks the field configuration"),
        (changed(2, invalidity="gone"), "results[2] lacks the field invalidity"),
        (changed(1, invalidity="tired"), "invalidity is 'tired'"),
        (changed(1, measurements=[]), "measurements have no time"),
        (changed(1, measurements=[{"name": "time", "value": float("nan")}]), "time is nan"),
        (changed(1, measurements=[{"name": "time", "value": 0}]), "time is 0"),
        (changed(1, configuration={"tile": 1.5, "block_size_x": 1}), "tile=1.5 has no canonical form"),
        (changed(1, configuration={"tile": 1}), "has not the tunables of the others"),
        (changed(1, configuration={"tile": 2, "block_size_x": 32}), "is there twice"),
        (changed(1, configuration=3), "results[1] cannot be read"),
        ({**FOREIGN, "metadata": {"flashtune": {"family": "x", "version": 1}}}, "metadata.flashtune cannot be read"),
        ({**FOREIGN, "results": FOREIGN["results"][:1]}, "none of its 1 configs has a time"),
    ],
)
def test_bad_t4_gets_one_clear_error(tmp_path: Path, document: Any, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError) as e:
        tables.read([path])
    assert said in str(e.value)
    assert str(path) in str(e.value)


def test_t4_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        tables.read([tmp_path / "x.json"])


def test_a_cell_needs_something_that_worked() -> None:
    with pytest.raises(InputError, match="none of its 8 configs has a time"):
        replace(CELL, rows=ROWS[2:])
