"""A forward with its backward on this CPU: right against the reference, defects found, both parts timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tuner.bench import Bench
from tuner.config import Config
from tuner.families import load
from tuner.families.base import Kernel, Room
from tuner.lab_torch import JointInputs, TorchLab, make_inputs
from tuner.pattern import parse
from tuner.reference import attention, gradients
from tuner.target import named
from tuner.workload import Workload

CPU = named("cpu")
BREAKS = {"0": "wrong_dk", "1": "nan", "2": "wrong", "3": "unwritten", "4": "unrepeatable"}
GRADIENTS = ("dq", "dk", "dv")


def workload(**changes: Any) -> Workload:
    shape = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 96, "seqlen_k": 96, "head_dim": 32}
    return Workload(**{**shape, "dtype": "float32", "op": "fwd+bwd", "pattern": parse("causal"), **changes})


def sdpa(w: Workload, folder: Path) -> Kernel:
    return load("sdpa_cpu").build(load("sdpa_cpu").stock(w), w, Room(CPU, folder))


def bench(w: Workload, folder: Path) -> Bench:
    lab = TorchLab(w, Room(CPU, folder, json.dumps({"breaks": BREAKS})), "eager")
    return Bench(lab, load("sdpa_cpu").stock(w), w.dtype, "eager", [5, 6], w.deterministic)


@pytest.mark.parametrize(
    "changes", [{}, {"pattern": parse("full"), "seqlen_q": 40, "head_dim_v": 16}], ids=["causal", "fewer queries"]
)
def test_outputs_and_gradients_are_those_of_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    w = workload(**changes)
    inputs = make_inputs(w, "cpu", 7)
    found = sdpa(w, tmp_path)(inputs)
    right = [attention(inputs.q, inputs.k, inputs.v, w)]
    right += gradients(inputs.q, inputs.k, inputs.v, inputs.dout, w).values()  # type: ignore[attr-defined]
    assert [t.shape for t in found] == [t.shape for t in right]
    for name, mine, reference in zip(("out", *GRADIENTS), found, right, strict=True):
        assert not mine.requires_grad
        assert ((mine - reference).norm() / reference.norm()).item() < 2e-6, name


def test_nothing_that_a_forward_writes_is_there_before_it_ran(tmp_path: Path) -> None:
    w = workload()
    lab = TorchLab(w, Room(CPU, tmp_path), "eager")
    seen: list[bool] = []

    def kernel(inputs: Any) -> tuple[torch.Tensor, ...]:
        seen.extend(bool(t.isnan().all()) for t in (inputs.out, inputs.lse, inputs.dq, inputs.dk, inputs.dv))
        return inputs.out, inputs.dq, inputs.dk, inputs.dv

    inputs = lab.draw(1)
    assert isinstance(inputs, JointInputs)
    found = lab.run(kernel, inputs)
    assert seen == [True] * 5
    assert list(found) == list(lab.reference(inputs)) == ["out", *GRADIENTS]


def test_every_output_is_told_beside_the_stock_kernels_error(tmp_path: Path) -> None:
    answer = bench(workload(), tmp_path).attempt(Config.make("decoy_bwd", 1, variant=9))
    assert (answer["status"], answer["error"]) == ("ok", "")
    outputs = answer["verification"]["outputs"]
    assert sorted(outputs) == sorted(["out", *(f"{g} (draw {n})" for g in GRADIENTS for n in (1, 2))])
    for error, row_error, stock_error, stock_row_error in outputs.values():
        assert (error, row_error) == (stock_error, stock_row_error)  # the same kernel on the same inputs
        assert 1e-8 < error < 1e-5


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "dk (draw "), (1, "dv (draw 1): the output has NaN"), (2, "out: relative error"), (3, "dv (draw 1): the ")],
    ids=list(BREAKS.values())[:4],
)
def test_a_defect_in_any_output_is_found_and_named(number: int, words: str, tmp_path: Path) -> None:
    answer = bench(workload(), tmp_path).attempt(Config.make("decoy_bwd", 1, variant=number))
    assert answer["status"] == "incorrect"
    assert answer["error"].startswith(words)
    assert answer["measurement"] is None


def test_last_bits_matter_to_deterministic_workloads(tmp_path: Path) -> None:
    strict = bench(workload(deterministic=True), tmp_path)
    answer = strict.attempt(Config.make("decoy_bwd", 1, variant=4))
    assert (answer["status"], answer["error"].partition(",")[0]) == ("incorrect", "two runs on the same inputs differ")
    assert strict.attempt(Config.make("decoy_bwd", 1, variant=9))["status"] == "ok"


def test_each_call_runs_the_forward_and_the_timed_backward_alone_does_not(tmp_path: Path) -> None:
    w = workload()
    lab = TorchLab(w, Room(CPU, tmp_path), "eager")
    kernel = sdpa(w, tmp_path)
    forwards: list[int] = []
    attend = kernel._forward._attend  # type: ignore[attr-defined]

    def counting(*tensors: torch.Tensor) -> torch.Tensor:
        forwards.append(1)
        out: torch.Tensor = attend(*tensors)
        return out

    for part in (kernel._forward, *kernel.parts.values()):  # type: ignore[attr-defined]
        part._attend = counting
    whole = lab.timer(kernel)
    begun = len(forwards)
    assert whole() > 0
    calls = len(forwards) - begun
    assert calls >= 1
    backward = lab.timer(kernel.parts["bwd"])  # type: ignore[attr-defined]
    prepared = len(forwards)
    assert prepared - begun - calls == len(lab._sets)
    assert backward() > 0
    assert len(forwards) == prepared


def test_the_finals_time_both_parts_of_who_has_them(tmp_path: Path) -> None:
    made = bench(workload(), tmp_path)
    made.prepare_finals([load("sdpa_cpu").stock(workload()), Config.make("decoy_bwd", 1, variant=4)], lambda e: None)
    said: list[Any] = []
    parts, broken = made.parts(lambda event: said.append(event["finalist"]))
    assert parts.keys() == {"fwd", "bwd"}
    assert min(parts.values()) > 0
    assert broken == {}  # a kernel with a defect behind it is not made of parts
    assert (said[0], said[-1]) == (0, None)
    assert 1 in said
