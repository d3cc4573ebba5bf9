"""The protocol of one workload on one device: verify, measure beside the default, run the finals.

Runs in the measuring child, on top of a lab. Every time is taken next to one of the default's, so
that what the machine does meanwhile (clocks, heat, neighbours) falls on both.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuner._child_io import error_text
from tuner.config import Config
from tuner.families.base import Kernel
from tuner.lab import Lab, Timer
from tuner.trial import TrialStatus
from tuner.verify import OUT, Errors, decisive, errors, judge_all, named, stock_refused

PAIRS = 15
_HOPELESS_AFTER, _HOPELESS_RATIO = 3, 0.7  # a config this far behind needs no more pairs
# Successive halving over repeats: after so many pairs a config goes on if it is in the better half of
# those seen so far, or this near to the best. The first few have nobody to be compared with.
_RUNGS, _RUNG_LEAST = {3: 0.10, 7: 0.05}, 4
_WARM_SAMPLES = 40  # the first samples of a cool GPU read up to 7% slow
_REPEATS = 3
_UNREPEATABLE = "two runs on the same inputs differ, and the workload asks for deterministic"
_PART_SAMPLES = 15
_CLOCK_DROP = 0.95  # a round below this share of the median clock is dropped


class BenchError(Exception):
    """The default itself does not run, or is wrong."""


class Bench:
    """One workload with its default, ready to try configs against it."""

    def __init__(
        self,
        lab: Lab,
        default: Config,
        dtype: str,
        policy: str,
        seeds: Sequence[int],
        repeatable: bool = False,
        timed: bool = True,
    ) -> None:
        """Draw inputs, compute references, and verify the default. Raises BenchError.

        With ``repeatable``, only what gives the same bits every time is right. Without ``timed``, the
        bench only verifies.
        """
        self._repeatable = repeatable
        self._lab, self._policy, self._seeds = lab, policy, list(seeds)
        try:
            self._draws = [(inputs, lab.reference(inputs)) for inputs in map(lab.draw, seeds)]
            kernel = lab.build(default)
            self._stock = self._errors(kernel)[0]
            if reason := stock_refused(self._stock, dtype):
                raise BenchError(reason)
            if repeatable and not self._repeats(kernel):
                raise BenchError(_UNREPEATABLE)
            if timed:
                self._default = lab.timer(kernel)
        except BenchError:
            raise
        except Exception as e:
            raise BenchError(error_text(e)) from e
        self._finalists: list[Timer] = []
        self._kernels: list[Kernel] = []  # of the finalists
        self._clocks: list[float] = []
        self._rungs: dict[int, list[float]] = {pairs: [] for pairs in _RUNGS}
        if timed:
            self._warm()
        lab.faults()

    def attempt(
        self,
        config: Config,
        verify: bool = True,
        say: Callable[[dict[str, Any]], None] = lambda event: None,
        *,
        measure: bool = True,
    ) -> dict[str, Any]:
        """Build, verify and measure one config; ``verify`` is False for one that passed before.

        Without ``measure`` it is not timed, and the answer has no measurement. Says every pair, which
        renews the deadline: a slow kernel is no hanging one. Returns status, error, verification,
        measurement, notes, and whether the device is lost.
        """
        verification = None
        try:
            kernel = self._lab.build(config)
            if verify:
                verification = self._verify(kernel)
                if not verification["passed"]:
                    return self._answer(TrialStatus.INCORRECT, verification["reason"], verification)
            measurement = self._pairs(self._lab.timer(kernel), say) if measure else None
        except Exception as e:
            lost = not self._lab.healthy()
            status = TrialStatus.RUN_CRASH if lost else TrialStatus.RUN_ERROR
            return {**self._answer(status, error_text(e)), "lost": lost}
        return self._answer(TrialStatus.OK, "", verification, measurement)

    def prepare_finals(self, configs: Sequence[Config], say: Callable[[dict[str, Any]], None]) -> None:
        """Build the finalists; announces each, so that the parent knows whom to blame for a crash."""
        self._finalists, self._kernels = [], []
        for i, config in enumerate(configs):
            say({"event": "building", "finalist": i})
            kernel = self._lab.build(config)
            self._kernels.append(kernel)
            self._finalists.append(self._lab.timer(kernel))
        say({"event": "building", "finalist": None})

    def parts(self, say: Callable[[dict[str, Any]], None]) -> list[dict[str, float]]:
        """Time the parts of each finalist apart, in turns; median microseconds by name, empty if it has no parts."""
        found = []
        for i, kernel in enumerate(self._kernels):
            say({"event": "measuring", "finalist": i})
            timers = {name: self._lab.timer(part) for name, part in getattr(kernel, "parts", {}).items()}
            samples: dict[str, list[float]] = {name: [] for name in timers}
            for _ in range(_PART_SAMPLES):
                for name, timer in timers.items():
                    samples[name].append(timer())
                    say({"event": "measuring", "finalist": i})
            found.append({name: statistics.median(its) for name, its in samples.items()})
        say({"event": "measuring", "finalist": None})
        return found

    def rounds(self, count: int, seed: int, say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Measure every finalist once a round, in random order.

        Says whom it measures, so that the parent knows whom to blame, and has its deadline renewed.
        Returns ``times`` (rounds x finalists, microseconds) and ``dropped``: rounds that saw
        throttling or a clock drop and were run again. After as many dropped as asked for, the
        machine is what it is, and the rest are kept.
        """
        rng, dropped = random.Random(seed), 0
        times: list[list[float]] = []
        clocks: list[Any] = []
        self._warm()
        while len(times) < count:
            order = list(range(len(self._finalists)))
            rng.shuffle(order)
            row = [0.0] * len(order)
            for i in order:
                say({"event": "measuring", "finalist": i})
                row[i] = self._finalists[i]()
            say({"event": "measuring", "finalist": None})
            conditions = self._lab.conditions()
            if dropped < count and self._disturbed(conditions):
                dropped += 1
                continue
            clocks.append(conditions.get("sm_mhz"))
            times.append(row)
        return {"times": times, "dropped": dropped, "sm_mhz": clocks, "notes": self._lab.faults()}

    def _warm(self) -> None:
        for _ in range(_WARM_SAMPLES):
            self._default()

    def _disturbed(self, conditions: Mapping[str, Any]) -> bool:
        clock = conditions.get("sm_mhz")
        if clock is not None:
            self._clocks.append(clock)
            if clock < _CLOCK_DROP * statistics.median(self._clocks):
                return True
        return bool(conditions["throttled"])

    def _errors(self, kernel: Any) -> tuple[dict[str, Errors], int]:
        """Return the errors of every output over the draws, and how many draws were looked at."""
        worst: dict[str, Errors] = {}
        for n, (inputs, ref) in enumerate(self._draws, start=1):
            found = named(self._lab.run(kernel, inputs))
            for name, right in named(ref).items():
                label = name if name == OUT else f"{name} (draw {n})"
                worst[label] = worst.get(label, Errors(0.0, 0.0)).worst(errors(found[name], right))
            if any(e.whole != e.whole for e in worst.values()):
                return worst, n
        return worst, len(self._draws)

    def _repeats(self, kernel: Any) -> bool:
        """Tell whether a kernel gives the same bits each time, in every output and on every draw."""
        for inputs, _ in self._draws:
            first = copy.deepcopy(named(self._lab.run(kernel, inputs)))
            for _ in range(_REPEATS):
                again = named(self._lab.run(kernel, inputs))
                if not all(bool((again[name] == first[name]).all()) for name in first):
                    return False
        return True

    def _verify(self, kernel: Any) -> dict[str, Any]:
        found, draws = self._errors(kernel)
        reason = judge_all(found, self._stock)
        if not reason and self._repeatable and not self._repeats(kernel):
            reason = _UNREPEATABLE
        output = decisive(found, self._stock)
        return {
            "error": found[output].whole,
            "row_error": found[output].row,
            "stock_error": self._stock[output].whole,
            "stock_row_error": self._stock[output].row,
            "draws": draws,
            "seed": self._seeds[0],
            "passed": not reason,
            "reason": reason,
            "outputs": {
                name: [its.whole, its.row, self._stock[name].whole, self._stock[name].row]
                for name, its in found.items()
                if len(found) > 1
            },
        }

    def _pairs(self, config: Timer, say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        mine: list[float] = []
        beside: list[float] = []
        for i in range(PAIRS):
            if i % 2:
                mine.append(config())
                beside.append(self._default())
            else:
                beside.append(self._default())
                mine.append(config())
            say({"event": "pair", "pair": i})
            if i + 1 in _RUNGS and self._behind(i + 1, _ratio(beside, mine)):
                break
        return {
            "policy": self._policy,
            "samples_us": mine,
            "default_us": beside,
            "ratio": _ratio(beside, mine),
            "median_us": statistics.median(mine),
        }

    def _behind(self, pairs: int, ratio: float) -> bool:
        """Tell whether a config of this ratio after so many pairs needs no more of them."""
        seen = self._rungs[pairs]
        seen.append(ratio)
        if pairs == _HOPELESS_AFTER and ratio < _HOPELESS_RATIO:
            return True
        enough = len(seen) >= _RUNG_LEAST
        return enough and ratio < statistics.median(seen) and ratio < max(seen) * (1 - _RUNGS[pairs])

    def _answer(
        self,
        status: TrialStatus,
        error: str,
        verification: dict[str, Any] | None = None,
        measurement: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "status": str(status),
            "error": error,
            "verification": verification,
            "measurement": measurement,
            "notes": self._lab.faults(),
            "lost": False,
        }


def _ratio(beside: Sequence[float], mine: Sequence[float]) -> float:
    return statistics.median(b / m for b, m in zip(beside, mine, strict=True))
