"""The run-time client: what it finds, what it refuses, and what stays when a file is bad."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tuner import runtime
from tuner.config import Config
from tuner.errors import SnapshotError, WorkloadError
from tuner.lookup import Entry, find
from tuner.runtime.snapshot import Snapshot
from tuner.target import Target, Toolchain
from tuner.trial import TunedConfig, Verdict
from tuner.workload import Workload

H200 = Target("NVIDIA H200", "sm_90a", 132, 700)
TOOLS = Toolchain("580.1", "13.0", "2.11.0", "3.6.0", "4.8.1", "4.0.0b36:0123456789ab", "3.12")
STOCK = Config.make("fa4_fwd_sm90", 1)


def workload(**changes: Any) -> Workload:
    base = {"batch": 4, "heads_q": 16, "heads_kv": 4, "seqlen_q": 2048, "seqlen_k": 2048, "head_dim": 128}
    return Workload.from_dict({**base, "pattern": "causal", **changes})


def entry(w: Workload, tile_m: int = 128, policy: str = "graph", target: Target = H200) -> Entry:
    config = Config.make("fa4_fwd_sm90", 1, tile_m=tile_m)
    tuned = TunedConfig(config, STOCK, Verdict.PUBLISHED, 1.2, 1.1, 1.3, 0.95, 0.02, (), (), None, "faster", 0, 0)
    return Entry(w, target, TOOLS, policy, tuned, f"s{tile_m}", 1)


def some(n: int, seed: int) -> list[Workload]:
    rng = random.Random(seed)
    return [
        workload(
            batch=rng.randint(1, 9),
            seqlen_q=rng.choice([512, 1000, 1024, 2048]),
            head_dim=rng.choice([64, 128]),
            pattern=rng.choice(["full", "causal & softcap(30)", "sliding_window(256)", "sliding_window(1000)"]),
        )
        for _ in range(n)
    ]


@pytest.fixture(autouse=True)
def _unloaded() -> Iterator[None]:
    yield
    runtime.unload()


def load(path: Path, entries: list[Entry], **how: Any) -> bool:
    path.write_bytes(Snapshot.of(entries).data)
    return runtime.load(path, target=H200, toolchain=TOOLS, **how)


def test_find_agrees_with_the_rules_of_lookup(tmp_path: Path) -> None:
    rng = random.Random(1)
    others = [H200, Target("NVIDIA B200", "sm_100a", 148)]
    for seed in range(20):
        entries = [
            entry(w, 64 + i, rng.choice(["graph", "eager"]), rng.choice(others)) for i, w in enumerate(some(12, seed))
        ]
        assert load(tmp_path / "s", entries)
        for w in some(40, 1000 + seed):
            ours, rule = runtime.find(w), find(w, H200, TOOLS, "graph", entries)
            assert (ours.kind, ours.config, ours.distance) == (rule.kind, rule.config, rule.distance)
            assert ours.warnings == rule.warnings
            assert runtime.find(w) is ours


def test_plain_arguments_are_the_workload_that_they_name(tmp_path: Path) -> None:
    load(tmp_path / "s", [entry(workload(heads_kv=16), 192)])
    plain = {"batch": 4, "heads_q": 16, "seqlen_q": 2048, "head_dim": 128, "pattern": "causal"}
    assert runtime.find(**plain) is runtime.find(workload(heads_kv=16))
    assert runtime.find(**plain).kind == "exact"
    assert runtime.stats()["answers"] == {"exact": 3, "bucket": 0, "nearest": 0, "default": 0}
    with pytest.raises(WorkloadError, match="batch is 0"):
        runtime.find(**{**plain, "batch": 0})
    with pytest.raises(WorkloadError, match=r"batch is \[4\]"):
        runtime.find(**{**plain, "batch": [4]})


def test_a_refresh_takes_the_new_file_and_outlives_a_bad_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    load(path, [entry(workload(), 64)], refresh_s=0.01)
    path.write_bytes(b"rubbish")
    for tile_m in (128, 192):
        new = tmp_path / "new"
        new.write_bytes(Snapshot.of([entry(workload(), tile_m)]).data)
        assert runtime.find(workload()).config is not None
        new.replace(path)
        until = time.monotonic() + 30
        while (config := runtime.find(workload()).config) is not None and config["tile_m"] != tile_m:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_the_same_entries_in_any_order_are_the_same_file() -> None:
    entries = [entry(w, i) for i, w in enumerate(some(9, 3))]
    assert Snapshot.of(entries).data == Snapshot.of(entries[::-1]).data


def test_a_flipped_bit_or_a_cut_anywhere_is_refused() -> None:
    data = Snapshot.of([entry(workload())]).data
    for i in range(len(data)):
        bad = bytearray(data)
        bad[i] ^= 1 << (i % 8)
        with pytest.raises(SnapshotError):
            Snapshot.read(bytes(bad))
        with pytest.raises(SnapshotError):
            Snapshot.read(data[:i])


def test_a_bad_file_is_one_warning_and_the_one_before_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    load(path, [entry(workload())])
    path.write_bytes(b"PK\x03\x04 something else")
    assert not runtime.load(path, target=H200, toolchain=TOOLS)
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "no flashtune snapshot" in caplog.text
    assert runtime.find(workload()).kind == "exact"
    with pytest.raises(SnapshotError, match="cannot be read"):
        runtime.load(tmp_path / "none", target=H200, toolchain=TOOLS, strict=True)


def test_another_architecture_gets_the_default_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path / "s", [entry(workload(), target=Target("NVIDIA B200", "sm_100a", 148))])
    for w in some(5, 1):
        assert runtime.find(w).kind == "default"
    assert len(caplog.records) == 1 and "sm_100a" in caplog.text
