"""The backward of a forward call, as autograd runs it: what a model that trains waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Attend = Callable[..., torch.Tensor]


class Backward:
    """A kernel that returns (dq, dk, dv) by torch.autograd.grad; its forward is not timed.

    ``attend(q, k, v)`` takes (batch, seqlen, heads, head_dim) and returns the output likewise. The
    forward of each input set runs once, in ``prepare``, and its graph is kept. Autograd runs a backward
    on the stream of its forward: to capture one, prepare it on the capturing stream.
    """

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._graphs: dict[Any, tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}

    def prepare(self, inputs: Any) -> None:
        """Run the forward of an input set on the current stream and keep its graph."""
        leaves = tuple(t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
        self._graphs[inputs] = leaves, self._forward(leaves, inputs)

    def _forward(self, leaves: tuple[torch.Tensor, ...], inputs: Any) -> torch.Tensor:
        return self._attend(*leaves)

    def __call__(self, inputs: Any) -> tuple[torch.Tensor, ...]:
        if inputs not in self._graphs:
            self.prepare(inputs)
        leaves, out = self._graphs[inputs]
        return torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


class PackedBackward(Backward):
    """The same of a varlen forward: ``attend(q, k, v, packed)`` also gets where the sequences lie."""

    def _forward(self, leaves: tuple[torch.Tensor, ...], inputs: Any) -> torch.Tensor:
        return self._attend(*leaves, inputs.packed)
