"""Forward and backward of one training step, tuned as one: a family made of two.

A joint config holds both directions' tunables, ``fwd_`` and ``bwd_`` before their names. Each direction
keeps its own family's constraints and its own kernels; what is new is stated here once: a model builds
one BlockMask, which both directions read, so both must ask for the same.

    >>> joint.split(config, workload)            # a config of the forward's family, one of the backward's
    >>> joint.join(forward, backward, workload)  # and back
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tuner.config import DIRECTIONS, Config
from tuner.families.base import Built, Kernel, KernelFamily, Room, Space
from tuner.target import Target, named
from tuner.trial import Resources
from tuner.workload import JOINT_OP, Workload

_Q_BLOCKS = (1, 2, 3, 4)  # a BlockMask's Q block must be a multiple of both directions' tiles


@dataclass(frozen=True)
class Direction:
    """One half of a joint family. Of its tunables those that are not ``free`` stay as in one of its first configs."""

    name: str  # fwd or bwd
    family: KernelFamily
    free: frozenset[str]

    def of(self, config: Config, workload: Workload) -> Config:
        """Return this direction's config of a joint one."""
        if config.is_stock:
            return self.family.stock(self.workload(workload))
        start = f"{self.name}_"
        mine = {k.removeprefix(start): v for k, v in config.params if k.startswith(start)}
        return Config.make(self.family.name, self.family.version, **mine)

    def workload(self, workload: Workload) -> Workload:
        return workload.with_(op=self.name)

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        reason = self.family.feasible(config, self.workload(workload), target)
        return f"{self.name}: {reason}" if reason else ""

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        return self.family.extras(config, self.workload(workload))

    def block(self, config: Config, workload: Workload) -> tuple[int, int]:
        """Return the (q, kv) block of the BlockMask; zeros if it reads none."""
        q, kv = self.extras(config, workload).get("block_size", (0, 0))
        return q, kv

    def first(self, workload: Workload, target: Target) -> list[Config]:
        """Return the family's first configs that are feasible; FA4's own arguments instead of lists where it can."""
        found = self.family.first(self.workload(workload))
        masks = [c.get("mask") for c in found]
        plain = [c for c in found if c.get("mask") in (None, "native") or "native" not in masks]
        return [c for c in plain if not self.feasible(c, workload, target)]

    def points(self, workload: Workload, target: Target) -> list[Config]:
        """Return the feasible configs that differ from a first one in free tunables alone."""
        space = self.family.space(self.workload(workload))
        free = [k for k in space if k in self.free]
        found: dict[Config, None] = {}
        for bound in {tuple((k, v) for k, v in c.params if k not in self.free): None
                      for c in self.first(workload, target)}:  # fmt: skip
            for values in _products(space, free):
                config = Config.make(self.family.name, self.family.version, **dict(bound), **values)
                if not self.feasible(config, workload, target):
                    found[config] = None
        return list(found)


class Joint:
    """Two families, one for each direction, as one family that computes ``fwd+bwd``."""

    compile_in: Literal["cpu", "device", "nowhere"] = "cpu"
    lab = "tuner.lab_torch:TorchLab"

    def __init__(self, name: str, arch: str, forward: Direction, backward: Direction) -> None:
        self.name, self._arch = name, arch
        self.forward, self.backward = forward, backward
        # both only grow, and so does their sum
        self.version = forward.family.version + backward.family.version - 1

    def refuses(self, workload: Workload, target: Target) -> str:
        if workload.op != JOINT_OP:
            return f"computes {JOINT_OP}, not {workload.op}"
        for half in self._halves:
            if reason := half.family.refuses(half.workload(workload), target):
                return reason
        if reason := self._masks_differ(self.stock(workload), workload):
            return f"{reason}, as FA4 ships them"
        return ""

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        """Return the bounds of each tunable; ``points`` says which combinations are searched."""
        space: dict[str, Any] = {}
        for half in self._halves:
            for name, values in half.family.space(half.workload(workload)).items():
                more = _Q_BLOCKS if name == "q_blocks" and len(values) > 1 else values
                space[f"{half.name}_{name}"] = more
        return space

    def points(self, workload: Workload, target: Target) -> list[Config]:
        """Return the combinations that are searched, a few thousand: both halves' points that share a BlockMask.

        The whole product has millions. Left out are, in each direction, combinations of tunables that are
        not free which no first config has, and lists where FA4 has an argument for the mask.
        """
        keys_of = [(self.backward.block(c, workload)[1], c) for c in self.backward.points(workload, target)]
        found: dict[Config, None] = {}
        for mine in self.forward.points(workload, target):
            keys = self.forward.block(mine, workload)[1]
            for others, theirs in keys_of:
                if 0 in (keys, others) or keys == others:  # most pairs differ in this
                    config = self.join(mine, theirs, workload)
                    if config is not None:
                        found[config] = None
        return list(found)

    def first(self, workload: Workload) -> tuple[Config, ...]:
        """Return pairs of both families' first configs, each of them once, with the first that shares its BlockMask."""
        target = named(self._arch)
        mine, theirs = (half.first(workload, target) for half in self._halves)
        ranked = sorted((i + j, i, j) for i in range(len(mine)) for j in range(len(theirs)))
        seen: set[Config] = set()
        found: dict[Config, None] = {}
        for _, i, j in ranked:
            config = self.join(mine[i], theirs[j], workload)
            if config is not None and not {mine[i], theirs[j]} <= seen:
                found[config] = None
                seen |= {mine[i], theirs[j]}
        return tuple(found)

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        if config.is_stock:
            return ""
        for half in self._halves:
            if reason := half.feasible(half.of(config, workload), workload, target):
                return reason
        return self._masks_differ(config, workload)

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        """Return the one BlockMask to build, and each direction's config under its name."""
        mine, theirs = self.split(config, workload)
        mask = self.forward.extras(mine, workload) | self.backward.extras(theirs, workload)
        return mask | {self.forward.name: mine.to_dict(), self.backward.name: theirs.to_dict()}

    def split(self, config: Config, workload: Workload) -> tuple[Config, Config]:
        """Return the forward's and the backward's config."""
        return self.forward.of(config, workload), self.backward.of(config, workload)

    def join(self, mine: Config, theirs: Config, workload: Workload) -> Config | None:
        """Return the joint config of two, their BlockMasks' Q blocks made one; None if they cannot share a mask,
        or are of another version of their families.

        Where their Q blocks differ, it is the least of whole tiles of both directions, which may be more than
        either asked for.
        """
        current = all((c.family, c.version) == (half.family.name, half.family.version)
                      for half, c in zip(self._halves, (mine, theirs), strict=True))  # fmt: skip
        if not current:
            return None
        if mine.is_stock or theirs.is_stock:
            return self.stock(workload) if mine.is_stock and theirs.is_stock else None
        pair = {self.forward: mine, self.backward: theirs}
        q_of = {half: half.block(c, workload)[0] for half, c in pair.items()}
        if all(q_of.values()) and len(set(q_of.values())) > 1:
            tiles = {half: q // int(pair[half]["q_blocks"]) for half, q in q_of.items()}
            q_block = math.lcm(*tiles.values())
            if any(q_block // tile not in _Q_BLOCKS for tile in tiles.values()):
                return None
            pair = {half: _changed(c, q_blocks=q_block // tiles[half]) for half, c in pair.items()}
        params = {f"{half.name}_{name}": value for half, c in pair.items() for name, value in c.params}
        config = Config.make(self.name, self.version, **params)
        return None if self._masks_differ(config, workload) else config

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        """Compile both directions; of each figure the larger is told, of the code the sum."""
        built = [half.family.compile(half.of(config, workload), half.workload(workload), room) for half in self._halves]
        return Built(_larger(*(b.resources for b in built)), tuple(dict.fromkeys(f for b in built for f in b.files)))

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        """Return a kernel that runs the forward and then the backward on what that left: out, dq, dk, dv."""
        forward, backward = (
            half.family.build(half.of(config, workload), half.workload(workload), room) for half in self._halves
        )
        return JointKernel(forward, backward)

    @property
    def _halves(self) -> tuple[Direction, Direction]:
        return self.forward, self.backward

    def _masks_differ(self, config: Config, workload: Workload) -> str:
        """Return why no single BlockMask serves both directions; empty if one does, or only one reads any.

        FA4's lists are of blocks of queries by blocks of keys. On Hopper the key block is the tile of keys, in
        either direction; the query block is a multiple of either's tile of queries (b36, ``block_sparsity.py``).
        """
        mine, theirs = self.split(config, workload)
        one, other = self.forward.extras(mine, workload), self.backward.extras(theirs, workload)
        if not one or not other or one == other:
            return ""
        return f"the forward wants a BlockMask of {_mask_text(one)} and the backward one of {_mask_text(other)}"


class JointKernel:
    """A forward kernel and a backward one behind it, which reads the out and LSE that the forward wrote.

    ``parts`` are the two to be timed apart; the backward's inputs are then what a forward left before.
    """

    def __init__(self, forward: Kernel, backward: Kernel) -> None:
        self._forward, self._backward = forward, backward
        self.parts: Mapping[str, Kernel] = dict(zip(DIRECTIONS, (forward, _After(forward, backward)), strict=True))

    def __call__(self, inputs: Any) -> tuple[Any, ...]:
        out = self._forward(inputs)
        return (out, *self._backward(inputs))


class _After:
    """A backward kernel whose forward runs once for each set of inputs, before anything is timed."""

    def __init__(self, forward: Kernel, backward: Kernel) -> None:
        self.prepare, self._backward = forward, backward

    def __call__(self, inputs: Any) -> Any:
        return self._backward(inputs)


def _products(space: Space, names: list[str]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*(space[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _changed(config: Config, **params: int) -> Config:
    return Config.make(config.family, config.version, **dict(config.params) | params)


def _larger(a: Resources, b: Resources) -> Resources:
    def larger(x: int | None, y: int | None) -> int | None:
        return max((n for n in (x, y) if n is not None), default=None)

    both = {name: larger(value, b.to_dict()[name]) for name, value in a.to_dict().items()}
    code = (a.code_bytes or 0) + (b.code_bytes or 0)
    return Resources(**{**both, "code_bytes": code or None})


def _mask_text(extras: Mapping[str, Any]) -> str:
    q, kv = extras["block_size"]
    return f"{q} queries by {kv} keys" + ("" if extras.get("full_blocks", True) else " in lists of partial blocks")
