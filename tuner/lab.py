"""The lab: what the measuring child can do with kernels on one device.

``bench`` runs the protocol (verify, pair, finals) on top of a lab and knows nothing of torch; a lab
knows the device and nothing of the protocol. Labs: ``lab_torch`` for CUDA and CPU, and the fake
family's, whose clock is virtual.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tuner.config import Config
from tuner.families import load
from tuner.families.base import Kernel, Room
from tuner.workload import Workload

# Takes one sample: microseconds a call, from a batch of calls long enough for the clock.
Timer = Callable[[], float]


class Lab(Protocol):
    """One device with one workload on it. Every method may raise what the library raises."""

    def draw(self, seed: int) -> Any:
        """Return one set of fresh random inputs."""
        ...

    def reference(self, inputs: Any) -> Any:
        """Return the right output, in float32 or better; several outputs as a mapping by name."""
        ...

    def build(self, config: Config) -> Kernel:
        """Return a config's kernel."""
        ...

    def run(self, kernel: Kernel, inputs: Any) -> Any:
        """Run once, over poisoned output memory, and return what ``reference`` does, in its dtype."""
        ...

    def timer(self, kernel: Kernel) -> Timer:
        """Return a timer by the lab's policy, over rotating inputs that do not fit the cache."""
        ...

    def conditions(self) -> Mapping[str, Any]:
        """Return ``throttled`` and ``sm_mhz`` (None where nobody says)."""
        ...

    def healthy(self) -> bool:
        """Tell whether the device still works after an error."""
        ...

    def faults(self) -> list[str]:
        """Return and clear what went wrong on our side, as a kernel compiled while measuring."""
        ...


def open_lab(config: Config, workload: Workload, room: Room, policy: str) -> Lab:
    """Return the lab of a config's family."""
    module, _, attribute = load(config.family).lab.partition(":")
    lab: Lab = getattr(importlib.import_module(module), attribute)(workload, room, policy)
    return lab
