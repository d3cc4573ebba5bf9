"""Verification of a backward on this CPU: three gradients, each beside the stock kernel's error in the same."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tuner.bench import Bench, BenchError
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import load
from tuner.families.base import Room
from tuner.lab_torch import BackwardInputs, TorchLab, make_inputs
from tuner.pattern import parse
from tuner.target import named
from tuner.trial import Verification
from tuner.workload import Workload

CPU = named("cpu")
BREAKS = {"0": "wrong_dk", "1": "nan", "2": "swapped", "3": "unwritten", "4": "unrepeatable"}


def workload(**changes: Any) -> Workload:
    shape = {"batch": 1, "heads_q": 2, "heads_kv": 2, "seqlen_q": 128, "seqlen_k": 128, "head_dim": 32}
    return Workload(**{**shape, "dtype": "float32", "op": "bwd", "pattern": parse("causal"), **changes})


def variant(number: int) -> Config:
    return Config.make("decoy_bwd", 1, variant=number)


def bench(w: Workload, folder: Path) -> Bench:
    lab = TorchLab(w, Room(CPU, folder, json.dumps({"breaks": BREAKS})), "eager")
    return Bench(lab, load("sdpa_cpu").stock(w), w.dtype, "eager", [5, 6], w.deterministic)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(workload(), tmp_path_factory.mktemp("room"))


def test_a_right_backward_passes_and_every_gradient_of_every_draw_is_told(plain: Bench) -> None:
    answer = plain.attempt(variant(9))
    assert (answer["status"], answer["error"]) == ("ok", "")
    found = Verification(**answer["verification"])
    assert sorted(found.outputs) == [f"{g} (draw {n})" for g in ("dk", "dq", "dv") for n in (1, 2)]
    for error, row_error, stock_error, stock_row_error in found.outputs.values():
        assert (error, row_error) == (stock_error, stock_row_error)  # the same kernel on the same inputs
        assert 1e-8 < error < 1e-5  # float32
        assert error <= row_error
    assert [found.error, found.row_error, found.stock_error, found.stock_row_error] in found.outputs.values()
    assert Verification(**json.loads(json.dumps(found.to_dict()))).outputs == found.outputs


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, r"dk \(draw [12]\): relative error"),
        (1, r"dv \(draw 1\): the output has NaN or inf"),
        (2, r"d[kv] \(draw [12]\): relative error"),
        (3, r"dv \(draw 1\): the output has NaN or inf, or was not written everywhere"),
    ],
    ids=list(BREAKS.values())[:4],
)
def test_a_defect_in_one_gradient_is_found_and_named(plain: Bench, number: int, words: str) -> None:
    answer = plain.attempt(variant(number))
    assert answer["status"] == "incorrect"
    assert answer["measurement"] is None
    assert answer["verification"]["passed"] is False

    assert re.match(words, answer["error"]), answer["error"]


def test_only_the_gradient_that_is_wrong_shows_an_error(plain: Bench) -> None:
    outputs = plain.attempt(variant(0))["verification"]["outputs"]
    for name, (error, row_error, stock_error, stock_row_error) in outputs.items():
        if name.startswith("dk"):
            assert row_error > 0.3  # the row lost half of itself
        else:
            assert (error, row_error) == (stock_error, stock_row_error)


def test_last_bits_that_differ_matter_only_to_deterministic_workloads(plain: Bench, tmp_path: Path) -> None:
    assert plain.attempt(variant(4))["status"] == "ok"
    strict = bench(workload(deterministic=True), tmp_path)
    answer = strict.attempt(variant(4))
    assert (answer["status"], answer["error"].partition(",")[0]) == ("incorrect", "two runs on the same inputs differ")
    assert strict.attempt(variant(9))["status"] == "ok"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_bits_differ_in_every_dtype(tmp_path: Path, dtype: str) -> None:
    w = workload(dtype=dtype)
    kernel = load("decoy_bwd").build(variant(4), w, Room(CPU, tmp_path, json.dumps({"breaks": BREAKS})))
    inputs = make_inputs(w, "cpu", 1)
    (one, *_), (two, *_) = (tuple(t.clone() for t in kernel(inputs)) for _ in range(2))
    assert not torch.equal(one, two)
    assert torch.allclose(one, two, rtol=2 * torch.finfo(one.dtype).eps, atol=0)


def test_a_defect_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    room = Room(CPU, tmp_path, json.dumps({"breaks": {"7": "assert"}}))
    with pytest.raises(ConfigError, match="breaks a variant by 'assert'; write one of wrong_dk"):
        load("decoy_bwd").build(variant(4), workload(), room)


def test_grouped_heads_fewer_queries_and_another_head_dim_v_are_verified(tmp_path: Path) -> None:
    w = workload(heads_q=4, heads_kv=2, seqlen_q=64, head_dim_v=16, pattern=parse("full"))
    answer = bench(w, tmp_path).attempt(variant(9))
    assert (answer["status"], answer["error"]) == ("ok", "")
    assert bench(w, tmp_path).attempt(variant(0))["status"] == "incorrect"


def test_a_wrong_default_is_no_measure(tmp_path: Path) -> None:
    w = workload()
    lab = TorchLab(w, Room(CPU, tmp_path, json.dumps({"breaks": {"stock": "swapped"}})), "eager")
    with pytest.raises(BenchError, match=r"the default's relative error in d[kv] \(draw 1\) is 1\.\d+, above 0.0001"):
        Bench(lab, load("decoy_bwd").stock(w), w.dtype, "eager", [5, 6])


def test_inputs_hold_what_the_forward_left(tmp_path: Path) -> None:
    w = workload(pattern=parse("causal + softcap(3)"), seqlen_q=40)
    i = make_inputs(w, "cpu", 3)
    assert isinstance(i, BackwardInputs)
    scores = torch.einsum("bihd,bjhd->bhij", i.q.double(), i.k.double()) / math.sqrt(w.head_dim)
    keep = torch.arange(128) <= torch.arange(40)[:, None] + 88
    scores = (3 * torch.tanh(scores / 3)).masked_fill(~keep, -math.inf)
    assert torch.allclose(i.lse.double(), scores.logsumexp(-1), atol=1e-5)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), i.v.double())
    assert torch.allclose(i.out.double(), out, atol=1e-5)
    assert i.dout.shape == i.out.shape
    assert i.dout.std() == pytest.approx(1, abs=0.05)
    assert [t.shape for t in i.outputs] == [i.q.shape, i.k.shape, i.v.shape]


def test_a_backward_is_prepared_once_for_each_set_before_it_is_timed(tmp_path: Path) -> None:
    w = workload(seqlen_q=64, seqlen_k=64)
    lab = TorchLab(w, Room(CPU, tmp_path), "eager")
    kernel = load("sdpa_cpu").build(load("sdpa_cpu").stock(w), w, Room(CPU, tmp_path))
    forwards: list[int] = []
    attend = kernel._attend  # type: ignore[attr-defined]
    kernel._attend = lambda q, k, v: (forwards.append(1), attend(q, k, v))[1]  # type: ignore[attr-defined]
    sample = lab.timer(kernel)
    prepared = len(forwards)
    assert prepared == len(lab._sets) > 1
    for _ in range(3):
        assert sample() > 0
    assert len(forwards) == prepared
