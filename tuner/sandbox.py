"""The killable child that owns the device, seen from the parent.

Whatever a config does to the child, the caller gets a status; the next request starts a fresh
child and opens the workload again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.children import KILLS, Child, ChildFailure
from tuner.compile import Compiled, child_env
from tuner.config import Config
from tuner.errors import DefaultError, MachineError
from tuner.target import Target
from tuner.trial import Measurement, Trial, TrialStatus, Verification
from tuner.workload import Workload

_OPEN_TIMEOUT_S = 300.0  # imports, inputs, references, and a default that may have to compile
_DRAWS = 2  # sets of fresh inputs that a config is verified on while tuning
_PRELOAD = {"cuda": "tuner.lab_torch", "cpu": "tuner.lab_torch"}
_FAILURE_STATUS = {
    "crash": TrialStatus.RUN_CRASH,
    "killed": TrialStatus.RUN_CRASH,
    "memory": TrialStatus.RUN_CRASH,
    "timeout": TrialStatus.RUN_TIMEOUT,
}


class FinalistFailed(Exception):
    """A finalist crashed, hung or failed in the finals: its trial says ok no longer."""

    def __init__(self, config: Config, status: TrialStatus, error: str) -> None:
        super().__init__(error)
        self.config, self.status, self.error = config, status, error


@dataclass(frozen=True)
class Rounds:
    """Times of the finals: one row a round, one column a finalist, microseconds."""

    times: list[list[float]]
    dropped: int
    sm_mhz: list[float | None]
    notes: list[str]


class Sandbox:
    """One device's measuring child, with a bench for every open workload.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        target: Target,
        cache_dir: Path,
        *,
        run_timeout_s: float = 60.0,
        script: str = "",
        visible_devices: str = "",
    ) -> None:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._room = {"target": target.to_dict(), "cache_dir": str(cache_dir), "script": script}
        self._timeout_s = run_timeout_s
        log = cache_dir / "logs" / f"measure-{target.device}-{target.device_index}.log"
        env = child_env(target, cache_dir, visible_devices)
        self._child = Child("_sandbox_child.py", env, log, preload=_PRELOAD.get(target.device, ""))
        self.busy_s = 0.0  # time in which the child worked for us

    @property
    def generation(self) -> int:
        """Counts the children so far: a bench lives in one of them. 0 while none runs."""
        return self._child.starts if self._child.running else 0

    def start(self) -> None:
        """Start the child ahead of its first request."""
        self._child.start()

    def open(
        self, workload: Workload, default: Config, policy: str, *, draws: int = _DRAWS, timed: bool = True
    ) -> Bench:
        """Make the workload's inputs and references, and verify and time its default.

        A bench that is not ``timed`` only verifies, on as many ``draws`` of inputs as asked for.

        Raises:
            DefaultError: if the default does not run or is wrong here.
            MachineError: if somebody else kills the child again and again.
        """
        bench = Bench(self, workload, default, policy, {**self._room, "draws": draws, "timed": timed})
        bench.ensure_open()
        return bench

    def request(
        self,
        message: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        start: bool = False,
    ) -> dict[str, Any]:
        """Ask the child that runs, or with ``start`` a new one if none does; count the time. Raises ChildFailure."""
        began = time.monotonic()
        try:
            seconds = timeout_s or self._timeout_s
            return self._child.request(message, timeout_s=seconds, on_event=on_event, start=start)
        finally:
            self.busy_s += time.monotonic() - began

    def close(self) -> None:
        """Kill the child; the next request starts another."""
        self._child.kill()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Bench:
    """One workload in the sandbox. Opens itself again after a child was lost."""

    def __init__(
        self, sandbox: Sandbox, workload: Workload, default: Config, policy: str, room: Mapping[str, Any]
    ) -> None:
        self._sandbox, self._default = sandbox, default
        self._key = "\n".join((workload.key, default.key, policy))  # one workload may be open by both policies
        self._open = {
            "op": "open",
            "bench": self._key,
            "workload": workload.to_dict(),
            "default": default.to_dict(),
            "policy": policy,
            **room,
        }
        self._generation = 0
        self._finalists: list[Config] = []

    def attempt(self, config: Config, compiled: Compiled, *, verify: bool = True, measure: bool = True) -> Trial:
        """Verify and measure one compiled config, or only the one; every failure of it is the trial's status."""
        start = time.monotonic()
        for kill in range(1, KILLS + 1):
            self.ensure_open()
            try:
                answer = self._ask("attempt", config=config.to_dict(), verify=verify, measure=measure)
                break
            except ChildFailure as e:
                if e.kind != "killed" or kill == KILLS:
                    return _trial(config, compiled, start, {"status": _FAILURE_STATUS[e.kind], "error": str(e)})
        if answer["lost"]:
            self._sandbox.close()
        return _trial(config, compiled, start, answer)

    def start_finals(self, configs: Sequence[Config]) -> None:
        """Build the finalists side by side.

        Raises:
            FinalistFailed: naming the one that cannot be built any more.
        """
        self.ensure_open()
        self._finalists = list(configs)
        self._ask_finalists("finals", configs=[c.to_dict() for c in configs])

    def rounds(self, count: int, seed: int) -> Rounds:
        """Run paired rounds of the finalists.

        Raises:
            FinalistFailed: naming the one that was measured when the child died or hung.
            ChildFailure: if it was none of them.
        """
        answer = self._ask_finalists("rounds", count=count, seed=seed)
        return Rounds(answer["times"], answer["dropped"], answer["sm_mhz"], answer["notes"])

    def parts(self) -> list[dict[str, float]]:
        """Time the finalists' parts apart: for each, median microseconds by name. Raises as ``rounds`` does."""
        found: list[dict[str, float]] = self._ask_finalists("parts")["parts"]
        return found

    def close(self) -> None:
        """Free the workload's memory."""
        if self._generation and self._generation == self._sandbox.generation:
            with contextlib.suppress(ChildFailure):  # a dead child holds no memory
                self._ask("close")

    def ensure_open(self) -> None:
        """Open the workload in the child that runs now. Raises DefaultError, MachineError."""
        if self._generation and self._generation == self._sandbox.generation:
            return
        family = self._default.family
        for kill in range(1, KILLS + 1):
            try:
                answer = self._sandbox.request(self._open, timeout_s=_OPEN_TIMEOUT_S, start=True)
                break
            except ChildFailure as e:
                if e.kind != "killed":
                    raise DefaultError(f"the default {family} did not survive here: {e}") from None
                if kill == KILLS:
                    raise MachineError(f"the measuring child was killed {kill} times while it began: {e}") from None
        if not answer["ok"]:
            raise DefaultError(f"the default {family} does not work here: {answer['error']}; see `flashtune doctor`")
        self._generation = self._sandbox.generation

    def _ask_finalists(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Ask for something that the finalists are run for; blame the one that the child said last."""
        current: Config | None = None

        def note(event: dict[str, Any]) -> None:
            nonlocal current
            current = None if event["finalist"] is None else self._finalists[event["finalist"]]

        request = {"op": operation, "bench": self._key, **fields}
        try:
            answer = self._sandbox.request(request, on_event=note)
        except ChildFailure as e:
            if current is None or e.kind == "killed":
                raise
            raise FinalistFailed(current, _FAILURE_STATUS[e.kind], str(e)) from None
        if "error" in answer:
            self._sandbox.close()  # what the error left of the device is anybody's guess
            raise FinalistFailed(current or self._finalists[0], TrialStatus.RUN_ERROR, answer["error"])
        return answer

    def _ask(self, operation: str, **fields: Any) -> dict[str, Any]:
        return self._sandbox.request({"op": operation, "bench": self._key, **fields})


def _trial(config: Config, compiled: Compiled, start: float, answer: dict[str, Any]) -> Trial:
    verification, measurement = answer.get("verification"), answer.get("measurement")
    if measurement:
        measurement = {**measurement, **{k: tuple(measurement[k]) for k in ("samples_us", "default_us")}}
    return Trial(
        config=config,
        status=TrialStatus(answer["status"]),
        error=answer["error"],
        compile_s=compiled.seconds,
        run_s=time.monotonic() - start,
        resources=compiled.resources,
        verification=Verification(**verification) if verification else None,
        measurement=Measurement(**measurement) if measurement else None,
        notes=tuple(answer.get("notes", ())),
    )
