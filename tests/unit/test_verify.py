"""Correctness: what must be refused on a real-sized output, what must pass, and the same numbers everywhere."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tuner.verify import (
    ERROR_MULTIPLE,
    FLOOR,
    STOCK_LIMIT,
    Errors,
    decisive,
    errors,
    judge,
    judge_all,
    named,
    stock_refused,
)

Array = npt.NDArray[np.float64]

ROWS, KEYS, DIM = 100_000, 96, 16
KINDS = ("numpy", "torch")


def as_kind(values: Array, kind: str) -> Array | torch.Tensor:
    return torch.from_numpy(values.copy()) if kind == "torch" else values


def blocked(p: Array, v: Array, tile_n: int) -> Array:
    """P @ V as a kernel does it: bfloat16 P, float32 sums one tile of keys after the other, bfloat16 out."""
    rounded = torch.from_numpy(p).bfloat16().float()
    values = torch.from_numpy(v).bfloat16().float()
    total = torch.zeros(len(p), v.shape[1])
    for start in range(0, KEYS, tile_n):
        total = total + rounded[:, start : start + tile_n] @ values[start : start + tile_n]
    return total.bfloat16().double().numpy()


@pytest.fixture(scope="module")
def attention() -> dict[str, Array]:
    """The right output of 10^5 rows, the stock kernel's, and one that sums in another order."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((ROWS, KEYS))
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    v = torch.from_numpy(rng.standard_normal((KEYS, DIM))).bfloat16().double().numpy()
    return {"ref": p @ v, "stock": blocked(p, v, 32), "reordered": blocked(p[:, ::-1].copy(), v[::-1].copy(), 16)}


def verdict(attention: dict[str, Array], out: Array, kind: str) -> str:
    ref = as_kind(attention["ref"], kind)
    stock = errors(as_kind(attention["stock"], kind), ref)
    return judge(errors(as_kind(out, kind), ref), stock)


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_of_summation_passes(attention: dict[str, Array], kind: str) -> None:
    assert (attention["reordered"] != attention["stock"]).any()
    assert verdict(attention, attention["reordered"], kind) == ""
    assert verdict(attention, attention["stock"], kind) == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [0, ROWS // 2, ROWS - 1])
def test_a_single_nan_or_inf_never_passes(attention: dict[str, Array], value: float, row: int, kind: str) -> None:
    out = attention["stock"].copy()
    out[row, DIM - 1] = value
    assert verdict(attention, out, kind) == "the output has NaN or inf, or was not written everywhere"


@pytest.mark.parametrize("kind", KINDS)
def test_an_unwritten_output_never_passes(attention: dict[str, Array], kind: str) -> None:
    assert "not written" in verdict(attention, np.full((ROWS, DIM), math.nan), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_row_in_a_hundred_thousand_is_seen(attention: dict[str, Array], kind: str) -> None:
    out = attention["stock"].copy()
    out[ROWS // 3] *= 1.1
    ref = as_kind(attention["ref"], kind)
    stock, found = errors(as_kind(attention["stock"], kind), ref), errors(as_kind(out, kind), ref)
    assert found.whole < 1.05 * stock.whole  # the norm does not see it
    assert judge(found, stock).startswith("worst row's error 0.0")


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_in_anothers_place_is_seen(attention: dict[str, Array], kind: str) -> None:
    out = attention["stock"].copy()
    out[77] = out[78]
    assert verdict(attention, out, kind) != ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.02, 0.98, 0.0, -1.0])
def test_a_scaled_output_is_refused(attention: dict[str, Array], scale: float, kind: str) -> None:
    assert verdict(attention, attention["stock"] * scale, kind).startswith("relative error")


def test_the_errors_are_those_of_the_definition() -> None:
    ref = np.array([[3.0, 4.0], [6.0, 8.0], [0.0, 0.0]])
    out = np.array([[3.0, 4.5], [6.0, 8.0], [0.1, 0.0]])
    floor = 0.1 * (5 + 10 + 0) / 3  # a tenth of the mean row norm
    expected = Errors(math.sqrt((0.25 + 0.01) / 125), max(0.5 / (5 + floor), 0.1 / floor))
    for kind in KINDS:
        found = errors(as_kind(out, kind), as_kind(ref, kind))
        assert (found.whole, found.row) == pytest.approx((expected.whole, expected.row), rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_and_numpy_give_the_same_numbers(attention: dict[str, Array], dtype: str) -> None:
    out, ref = (attention[n].astype(dtype).reshape(10, 100, 100, DIM) for n in ("reordered", "ref"))
    a, b = errors(out, ref), errors(torch.from_numpy(out), torch.from_numpy(ref))
    assert (a.whole, a.row) == pytest.approx((b.whole, b.row), rel=1e-4 if dtype == "float32" else 1e-12)


def test_an_exact_output_passes_beside_an_exact_stock_kernel() -> None:
    ref = np.random.default_rng(1).standard_normal((50, 8))
    exact = errors(ref, ref)
    assert exact == Errors(0.0, 0.0)
    assert judge(exact, exact) == ""
    assert judge(errors(ref * (1 + FLOOR / 2), ref), exact) == ""
    assert judge(errors(ref * (1 + FLOOR * 2), ref), exact) != ""


def test_the_refusal_names_the_error_and_its_limit() -> None:
    assert judge(Errors(0.5, 0.5), Errors(0.1, 0.1)) == "relative error 0.5 exceeds 0.2 (2 x the stock kernel's)"
    assert judge(Errors(0.1, 0.5), Errors(0.1, 0.1)) == "worst row's error 0.5 exceeds 0.4 (4 x the stock kernel's)"


@pytest.mark.parametrize(
    ("a", "b"), [(Errors(0.1, 0.5), Errors(0.2, 0.3)), (Errors(math.nan, 0.1), Errors(0.2, math.nan))]
)
def test_the_worst_of_several_draws_is_kept_and_nan_wins(a: Errors, b: Errors) -> None:
    for worst in (a.worst(b), b.worst(a)):
        for name in ("whole", "row"):
            values = [getattr(a, name), getattr(b, name)]
            expected = math.nan if any(map(math.isnan, values)) else max(values)
            assert getattr(worst, name) == pytest.approx(expected, nan_ok=True)


def test_the_stock_limit_holds_a_rounding_and_no_more(attention: dict[str, Array]) -> None:
    """A stock kernel in bfloat16 passes; one that is as wrong as a missing scale factor does not."""
    good = errors(attention["stock"], attention["ref"]).whole
    assert good < STOCK_LIMIT["bfloat16"] / ERROR_MULTIPLE
    assert errors(attention["stock"] * 1.05, attention["ref"]).whole > STOCK_LIMIT["bfloat16"]
    assert STOCK_LIMIT["float32"] < STOCK_LIMIT["float16"] < STOCK_LIMIT["bfloat16"]


STOCK = {"dq": Errors(3e-3, 1e-1), "dk": Errors(2e-3, 1e-2), "dv": Errors(1e-3, 5e-3)}


@pytest.mark.parametrize(
    ("name", "found", "words"),
    [
        ("dq", Errors(5e-3, 3e-1), ""),  # below 2 and 4 times the stock kernel's
        ("dq", Errors(7e-3, 1e-1), "dq: relative error 0.007 exceeds 0.006"),
        ("dk", Errors(2e-3, 5e-2), "dk: worst row's error 0.05 exceeds 0.04"),  # less than what dq may show
        ("dv", Errors(3e-3, 5e-3), "dv: relative error 0.003 exceeds 0.002"),  # dq's own would be right
        ("dv", Errors(math.nan, math.nan), "dv: the output has NaN or inf, or was not written everywhere"),
    ],
)
def test_each_gradient_is_held_against_the_stock_kernels_error_in_the_same(
    name: str, found: Errors, words: str
) -> None:
    reason = judge_all({**STOCK, name: found}, STOCK)
    assert reason.startswith(words)
    assert bool(reason) == bool(words)
    assert decisive({**STOCK, name: found}, STOCK) == name  # the others are at half and a quarter of their limits


def test_the_nearest_to_its_limit_decides_and_nan_is_beyond_all() -> None:
    found = {"dq": Errors(2.9e-2, 1e-1), "dk": Errors(3e-3, 1e-2), "dv": Errors(math.nan, 0.0)}
    assert decisive(found, STOCK) == "dv"
    assert decisive({"dq": found["dq"], "dk": found["dk"]}, STOCK) == "dq"


def test_one_output_is_called_out_and_its_refusal_has_no_name() -> None:
    assert list(named(np.zeros(2))) == ["out"]
    assert named({"dq": 1}) == {"dq": 1}
    assert judge_all({"out": Errors(0.5, 0.5)}, {"out": Errors(0.1, 0.1)}).startswith("relative error 0.5")


def test_a_stock_kernel_that_is_wrong_in_one_gradient_is_no_measure() -> None:
    assert stock_refused(STOCK, "bfloat16") == ""
    wrong = {**STOCK, "dk": Errors(0.7, 1.0)}
    assert stock_refused(wrong, "bfloat16") == "the default's relative error in dk is 0.7, above 0.02"
    assert (
        stock_refused({"out": Errors(math.nan, 0.0)}, "float32") == "the default's relative error is nan, above 0.0001"
    )
