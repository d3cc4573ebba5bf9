"""How busy a GPU is meanwhile, as NVML counts it: the share of time in which some kernel ran."""

from __future__ import annotations

import threading
from typing import Any

from tuner.target import Target

_INTERVAL_S = 0.25  # NVML's own window is 1/6 s to 1 s


class Utilization:
    """Samples the driver's utilization in a thread for the length of a with-block."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._samples: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def share(self) -> float | None:
        """Mean share from 0 to 1; None where nobody says."""
        return sum(self._samples) / len(self._samples) / 100 if self._samples else None

    def __enter__(self) -> Utilization:
        if self._target.is_gpu:
            self._thread = threading.Thread(target=self._sample, name="utilization", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _sample(self) -> None:
        try:
            import pynvml as nvml

            nvml.nvmlInit()
            handle: Any = nvml.nvmlDeviceGetHandleByUUID(self._target.uuid)
            while not self._stop.wait(_INTERVAL_S):
                self._samples.append(int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
            nvml.nvmlShutdown()
        except Exception:  # a figure for people: without it a study is as good
            return
