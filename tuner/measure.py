"""Time a kernel by a stated policy: CUDA-graph replay or a caller's wait, always with a cold cache.

A kernel with a method ``prepare(inputs)`` has work that is not to be timed, as a backward has its
forward: it is done once for every input set, on the stream that will be timed.

``graph`` is kernel time: a CUDA graph of calls that rotate over input sets larger than the L2
cache, replayed between two events. ``eager`` is what a Python caller waits for: the wall time of
calls in a row and one synchronization, host time included. Samples are microseconds a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tuner.families.base import Kernel
from tuner.lab import Timer

# One sample lasts at least this long, so that the clock's step (0.5 us of a CUDA event) is lost in it.
_GRAPH_SAMPLE_US = 1500.0
_EAGER_SAMPLE_US = {"cuda": 2500.0, "cpu": 20_000.0}
_WARM_UP_CALLS = 2


def timer(kernel: Kernel, sets: Sequence[Any], policy: str, device: str) -> Timer:
    """Return a timer for ``kernel`` over the input sets; raises what the kernel raises."""
    return _graph_timer(kernel, sets) if policy == "graph" else _eager_timer(kernel, sets, device)


def _prepare(kernel: Kernel, sets: Sequence[Any]) -> None:
    prepare = getattr(kernel, "prepare", None)
    if prepare is not None:
        for inputs in sets:
            prepare(inputs)


def _graph_timer(kernel: Kernel, sets: Sequence[Any]) -> Timer:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # capture wants a warm kernel on a stream of its own
        _prepare(kernel, sets)
        for i in range(_WARM_UP_CALLS):
            kernel(sets[i % len(sets)])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for inputs in sets:
            kernel(inputs)
    replays = _Replays(graph, kernel, sets)
    replays.sample(1)
    times = max(1, -int(-_GRAPH_SAMPLE_US // (replays.sample(1) * len(sets))))
    return lambda: replays.sample(times)


class _Replays:
    """A captured graph, with everything whose memory it reads.

    A graph holds addresses, not tensors: without the kernel's own tensors (block lists, document
    numbers, LSE) kept alive here, it would read and write memory that belongs to others by then.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, kernel: Kernel, sets: Sequence[Any]) -> None:
        self._graph, self._kernel, self._sets = graph, kernel, sets
        self._begin: Any = torch.cuda.Event(enable_timing=True)
        self._end: Any = torch.cuda.Event(enable_timing=True)

    def sample(self, times: int) -> float:
        """Replay the graph ``times`` times; microseconds a call."""
        self._begin.record()
        for _ in range(times):
            self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1000.0 / (times * len(self._sets))


def _eager_timer(kernel: Kernel, sets: Sequence[Any], device: str) -> Timer:
    _prepare(kernel, sets)
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None
    position = 0

    def call(times: int) -> float:
        nonlocal position
        wait()
        start = time.perf_counter()
        for i in range(times):
            kernel(sets[(position + i) % len(sets)])
        wait()
        position += times
        return (time.perf_counter() - start) * 1e6 / times

    call(_WARM_UP_CALLS)
    times = max(1, -int(-_EAGER_SAMPLE_US[device] // call(1)))
    return lambda: call(times)
