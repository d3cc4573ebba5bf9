"""The killable child that owns the device, seen from the parent.

Whatever a config does to the child, the caller gets a status; the next request starts a fresh
child and opens the workload again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.children import Child, ChildFailure
from tuner.compile import Compiled, child_env
from tuner.config import Config
from tuner.errors import DefaultError
from tuner.target import Target
from tuner.trial import Measurement, Trial, TrialStatus, Verification
from tuner.workload import Workload

_OPEN_TIMEOUT_S = 300.0  # imports, inputs, references, and a default that may have to compile
_FAILURE_STATUS = {
    "crash": TrialStatus.RUN_CRASH,
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
    """One device's measuring child. Not for use by several threads at once."""

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
        self._target, self._cache_dir, self._script = target, cache_dir, script
        self._timeout_s = run_timeout_s
        log = cache_dir / "logs" / f"measure-{target.device}-{target.device_index}.log"
        self._child = Child("_sandbox_child.py", child_env(target, cache_dir, visible_devices), log)
        self._opened: dict[str, Any] | None = None
        self._opened_in: int | None = None
        self.busy_s = 0.0  # time in which the child worked for us

    def open(self, workload: Workload, default: Config, policy: str) -> None:
        """Make the workload's inputs and references, and verify and time its default.

        Raises:
            DefaultError: if the default does not run or is wrong here.
        """
        self._opened = {
            "op": "open",
            "workload": workload.to_dict(),
            "default": default.to_dict(),
            "policy": policy,
            "target": self._target.to_dict(),
            "cache_dir": str(self._cache_dir),
            "script": self._script,
        }
        self._opened_in = None
        self._ensure_open()

    def attempt(self, config: Config, compiled: Compiled) -> Trial:
        """Verify and measure one compiled config; every failure of it is the trial's status."""
        start = time.monotonic()
        self._ensure_open()
        try:
            answer = self._request({"op": "attempt", "config": config.to_dict()})
        except ChildFailure as e:
            return self._trial(config, compiled, start, {"status": _FAILURE_STATUS[e.kind], "error": str(e)})
        if answer.get("lost"):
            self._child.kill()
        return self._trial(config, compiled, start, answer)

    def start_finals(self, configs: Sequence[Config]) -> None:
        """Build the finalists side by side.

        Raises:
            FinalistFailed: naming the one that cannot be built any more.
        """
        self._ensure_open()
        building: list[int | None] = [None]

        def note(event: dict[str, Any]) -> None:
            building[0] = event["finalist"]

        request = {"op": "finals", "configs": [c.to_dict() for c in configs]}
        try:
            answer = self._request(request, on_event=note)
        except ChildFailure as e:
            raise FinalistFailed(configs[building[0] or 0], _FAILURE_STATUS[e.kind], str(e)) from None
        if not answer["ok"]:
            self._child.kill()
            raise FinalistFailed(configs[building[0] or 0], TrialStatus.RUN_ERROR, answer["error"])

    def rounds(self, count: int, seed: int) -> Rounds:
        """Run paired rounds of the finalists. Raises ChildFailure if the child does not survive them."""
        answer = self._request({"op": "rounds", "count": count, "seed": seed}, timeout_s=self._timeout_s * 5)
        return Rounds(answer["times"], answer["dropped"], answer["sm_mhz"], answer["notes"])

    def close(self) -> None:
        """Kill the child."""
        self._child.kill()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ensure_open(self) -> None:
        if self._opened is None:
            raise DefaultError("no workload is open")
        if self._child.running and self._opened_in == self._child.starts:
            return
        try:
            answer = self._request(self._opened, timeout_s=_OPEN_TIMEOUT_S)
        except ChildFailure as e:
            raise DefaultError(f"the default {self._opened['default']['family']} did not survive here: {e}") from None
        if not answer["ok"]:
            family = self._opened["default"]["family"]
            raise DefaultError(f"the default {family} does not work here: {answer['error']}; see `flashtune doctor`")
        self._opened_in = self._child.starts

    def _request(
        self, message: dict[str, Any], *, timeout_s: float | None = None, on_event: Any = None
    ) -> dict[str, Any]:
        start = time.monotonic()
        try:
            return self._child.request(message, timeout_s=timeout_s or self._timeout_s, on_event=on_event)
        finally:
            self.busy_s += time.monotonic() - start

    def _trial(self, config: Config, compiled: Compiled, start: float, answer: dict[str, Any]) -> Trial:
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
