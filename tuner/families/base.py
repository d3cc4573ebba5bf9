"""What every kernel family offers: the contract that the conformance suite checks.

A family is a module-level object without state. Its methods up to ``extras`` run in any process
and import nothing heavy; ``compile`` runs in the compiling child, ``build`` in the measuring one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from tuner.config import Config, Param
from tuner.target import Target
from tuner.trial import Resources
from tuner.workload import Workload

Space = Mapping[str, tuple[Param, ...]]

# A kernel ready to run: takes one set of inputs, returns the output tensor; a backward returns
# (dq, dk, dv), both together (out, dq, dk, dv). One with a method ``prepare(inputs)`` has that called
# before it is timed on them; one with a mapping ``parts`` is made of kernels that can be timed apart.
Kernel = Callable[[Any], Any]


@dataclass(frozen=True)
class Room:
    """Where a family works: the target it builds for and the folder of its compiled objects."""

    target: Target
    cache_dir: Path
    script: str = ""  # the fake family's script, JSON


@dataclass(frozen=True)
class Built:
    """What compiling one config gave: what its code takes, and where that code lies."""

    resources: Resources = field(default_factory=Resources)
    # Files in the room's cache folder, any of them old: with these there, ``build`` need not compile.
    # None if another machine could not use them, or nothing was compiled.
    files: tuple[Path, ...] = ()


class KernelFamily(Protocol):
    """One implementation line with its own tunables."""

    name: str
    version: int  # part of every config's key: a new tunable bumps it
    compile_in: Literal["cpu", "device", "nowhere"]  # where compiling ahead of measuring happens
    lab: str  # "module:object" of the lab that verifies and measures it

    def refuses(self, workload: Workload, target: Target) -> str:
        """Return why the family cannot compute ``workload`` on ``target``; empty if it can."""
        ...

    def stock(self, workload: Workload) -> Config:
        """Return the config of a user who tunes nothing."""
        ...

    def space(self, workload: Workload) -> Space:
        """Return the tunables and their values; empty if there is nothing to tune."""
        ...

    def first(self, workload: Workload) -> tuple[Config, ...]:
        """Return configs worth trying before any others; infeasible ones are skipped."""
        ...

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        """Return why ``config`` cannot run, each constraint stated once; empty if it may."""
        ...

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        """Return what the caller must build beside the kernel, as the BlockMask's block size."""
        ...

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        """Compile into ``room.cache_dir``, unless it is there already. Raises what the compiler raises."""
        ...

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        """Return the kernel, ready to run on this process's device. Raises what the library raises."""
        ...


class Untunable:
    """What families have in common that have nothing to tune: a rival is its stock config."""

    name: str
    version = 1

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        return {}

    def first(self, workload: Workload) -> tuple[Config, ...]:
        return ()

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        return "" if config.is_stock else "has nothing to tune"


@runtime_checkable
class Enumerates(Protocol):
    """A family whose space is too large to go through: it says itself which configs are searched."""

    def points(self, workload: Workload, target: Target) -> Iterable[Config]:
        """Return feasible configs of the space."""
        ...


def backward_refused(workload: Workload) -> str:
    """Return why a workload with a backward cannot be verified by anybody; empty if it can, or has none."""
    if workload.op != "fwd" and workload.sees_one_key:
        return f"has nothing to verify: every query sees one key under {workload.pattern}, so dq and dk are zero"
    return ""
