"""The backward of a forward call, alone or behind it, as autograd runs it: what a model that trains waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tuner.families.base import Kernel

Attend = Callable[..., torch.Tensor]


class Backward:
    """A kernel that returns (dq, dk, dv) by torch.autograd.grad; its forward is not timed.

    ``attend(q, k, v)`` takes (batch, seqlen, heads, head_dim) and returns the output likewise; of varlen
    inputs it also gets ``packed``, where the sequences lie. The forward of each input set runs once, in
    ``prepare``, and its graph is kept. Autograd runs a backward on the stream of its forward: to capture
    one, prepare it on the capturing stream.
    """

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._graphs: dict[Any, tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}

    def prepare(self, inputs: Any) -> None:
        """Run the forward of an input set on the current stream and keep its graph."""
        leaves = tuple(t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
        self._graphs[inputs] = leaves, _attended(self._attend, leaves, inputs)

    def __call__(self, inputs: Any) -> tuple[torch.Tensor, ...]:
        if inputs not in self._graphs:
            self.prepare(inputs)
        leaves, out = self._graphs[inputs]
        return torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


class Forward:
    """A kernel that returns the output of a forward that keeps what its backward will need."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._leaves: dict[Any, tuple[torch.Tensor, ...]] = {}

    def prepare(self, inputs: Any) -> None:
        """Mark an input set as one whose gradients are wanted."""
        self._leaves[inputs] = tuple(t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))

    def with_graph(self, inputs: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Run the forward; returns q, k and v as autograd knows them, and the output with its graph."""
        if inputs not in self._leaves:
            self.prepare(inputs)
        leaves = self._leaves[inputs]
        return leaves, _attended(self._attend, leaves, inputs)

    def __call__(self, inputs: Any) -> torch.Tensor:
        return self.with_graph(inputs)[1].detach()


class Joint:
    """A kernel that runs the forward and, on its graph, the backward: returns (out, dq, dk, dv).

    Captured, both run on the capturing stream, since autograd runs a backward on its forward's. ``parts``
    are the two to be timed apart.
    """

    def __init__(self, attend: Attend) -> None:
        self._forward = Forward(attend)
        self.prepare = self._forward.prepare
        self.parts: Mapping[str, Kernel] = {"fwd": Forward(attend), "bwd": Backward(attend)}

    def __call__(self, inputs: Any) -> tuple[torch.Tensor, ...]:
        leaves, out = self._forward.with_graph(inputs)
        return (out.detach(), *torch.autograd.grad(out, leaves, inputs.dout))


def _attended(attend: Attend, leaves: tuple[torch.Tensor, ...], inputs: Any) -> torch.Tensor:
    return attend(*leaves) if inputs.packed is None else attend(*leaves, inputs.packed)
