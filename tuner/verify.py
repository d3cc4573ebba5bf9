"""Is an output right? A reference in float32 or better, and an error judged beside the stock kernel's.

The error of a config may be a small multiple of the stock kernel's own error against the same
reference on the same inputs; NaN never passes. Both the whole output and the worst single row are
looked at, since one wrong row among a quarter of a million hides in a norm. A backward has three
outputs, dq, dk and dv, and with its forward four: each is held against the stock kernel's error in the same one.

A gradient's rows err by 1% to 15% where scores are large, since dS is a small difference of large
numbers, and by less than 1% where they are not. So each draw of inputs is judged by itself there;
an output's errors are alike in all draws, and their worst is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Reordering a sum in another tile size changes the last bits; FA4's own configs stay within 1.3
# times stock over whole outputs, and the worst of 10^5 rows scatters more.
ERROR_MULTIPLE = 2.0
ROW_ERROR_MULTIPLE = 4.0
FLOOR = 2e-6  # float32 rounding of a long sum, where the stock error is itself that small

# What the stock kernel may show against the reference: a few units in the last place of the output
# dtype (bfloat16 2**-8, float16 2**-11, float32 2**-24), with room for P rounded to 16 bits.
STOCK_LIMIT = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-4}

OUT = "out"  # the name of a forward's output


@dataclass(frozen=True)
class Errors:
    """Relative error of an output: whole, and worst row. NaN where the output has NaN or inf."""

    whole: float
    row: float

    def worst(self, other: Errors) -> Errors:
        """Return the larger of both; NaN wins."""
        return Errors(_max(self.whole, other.whole), _max(self.row, other.row))


def errors(out: Any, ref: Any) -> Errors:
    """Return ||out - ref|| / ||ref||, over everything and for the worst row (the last axis).

    Works on torch tensors and numpy arrays alike. A row is measured against its own norm plus a
    tenth of the mean row norm, so that rows that nearly vanish do not decide.
    """
    square = ((out - ref) ** 2).sum(-1)
    norm = (ref**2).sum(-1)
    whole = (float(square.sum()) / max(float(norm.sum()), 1e-30)) ** 0.5
    floor = 0.1 * float((norm**0.5).mean())
    rows = square**0.5 / (norm**0.5 + max(floor, 1e-30))
    worst = float(rows.max())
    if whole != whole:  # max() of a tensor with NaN may skip it; the sum cannot
        worst = whole
    return Errors(whole, worst)


def judge(found: Errors, stock: Errors) -> str:
    """Return why an output is wrong, or the empty string."""
    if found.whole != found.whole or found.row != found.row or found.whole == float("inf"):
        return "the output has NaN or inf, or was not written everywhere"
    limit = ERROR_MULTIPLE * stock.whole + FLOOR
    if not found.whole <= limit:
        return f"relative error {found.whole:.3g} exceeds {limit:.3g} ({ERROR_MULTIPLE:g} x the stock kernel's)"
    limit = ROW_ERROR_MULTIPLE * stock.row + FLOOR
    if not found.row <= limit:
        return f"worst row's error {found.row:.3g} exceeds {limit:.3g} ({ROW_ERROR_MULTIPLE:g} x the stock kernel's)"
    return ""


def named(outputs: Any) -> Mapping[str, Any]:
    """Return outputs by name: a lab gives one alone, or several in a mapping."""
    return outputs if isinstance(outputs, Mapping) else {OUT: outputs}


def decisive(found: Mapping[str, Errors], stock: Mapping[str, Errors]) -> str:
    """Return the name of the output that is nearest to its limits, or the furthest beyond; NaN is beyond all."""
    return max(found, key=lambda name: _strain(found[name], stock[name]))


def judge_all(found: Mapping[str, Errors], stock: Mapping[str, Errors]) -> str:
    """Return why the decisive one of several outputs is wrong, naming it, or the empty string."""
    name = decisive(found, stock)
    reason = judge(found[name], stock[name])
    return f"{name}: {reason}" if reason and len(found) > 1 else reason


def stock_refused(stock: Mapping[str, Errors], dtype: str) -> str:
    """Return why the stock kernel itself is no measure, or the empty string."""
    limit = STOCK_LIMIT[dtype]  # a gradient of 16-bit P and dS errs no more: 3e-3 in bfloat16, emulated
    for name, its in stock.items():
        if not its.whole <= limit:
            where = "" if name == OUT else f" in {name}"
            return f"the default's relative error{where} is {its.whole:.3g}, above {limit}"
    return ""


def _strain(found: Errors, stock: Errors) -> float:
    """Return the larger share of its limit that an error takes: above 1 is wrong."""
    whole = found.whole / (ERROR_MULTIPLE * stock.whole + FLOOR)
    row = found.row / (ROW_ERROR_MULTIPLE * stock.row + FLOOR)
    return float("inf") if whole != whole or row != row else max(whole, row)


def _max(a: float, b: float) -> float:
    return a if a != a or a >= b else b
