"""The lab for real kernels, on CUDA or on the CPU. Lives in the measuring child.

Inputs are standard normal; q, k and v are stored (batch, seqlen, heads, head_dim), as FA4 wants
them and as a model's projections leave them. A backward also gets dout, drawn likewise, and what its
forward left: out and the log-sum-exp of the scores, computed by the reference and rounded. Of a varlen
workload the sequences lie one behind the other, and their offsets come with the inputs. Both directions
together get out and the log-sum-exp, too, and overwrite them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, ClassVar

import torch

from tuner import lengths, measure, reference
from tuner.config import Config
from tuner.families import load
from tuner.families.base import Kernel, Room
from tuner.lab import Timer
from tuner.target import FA4_ARCHES
from tuner.workload import Workload

# Rotating inputs: beyond twice the largest L2 (B200: 126 MB) and a server's last-level cache.
_COLD_BYTES = {"cuda": 256 << 20, "cpu": 96 << 20}
_MAX_SETS = 64

# Every second draw to verify with has queries this much larger: scores then reach past a softcap of
# 20 and make the softmax peaked, which standard normal ones (|score| < 6) do not.
_LOUD = 3.0

# The NVML reasons that mean the GPU is not itself: too hot, or the board's power brake. The software
# power cap is not among them: it is how a GPU runs heavy kernels, and it holds for all alike.
_THROTTLE_NAMES = (
    "nvmlClocksEventReasonSwThermalSlowdown",
    "nvmlClocksThrottleReasonHwSlowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
)


@dataclass(eq=False)
class Packed:
    """Where the sequences of a set of varlen inputs lie: ``workload`` has their lengths.

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are int32 (batch + 1,): each sequence's first row, and the end.
    """

    workload: Workload
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


@dataclass(eq=False)
class Inputs:
    """One set of tensors of a call; ``out`` is for kernels that write where they are told."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    packed: Packed | None = field(default=None, kw_only=True)  # of varlen

    returns: ClassVar[tuple[str, ...]] = ("out",)  # the names of what a kernel returns, in order

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """What a kernel may write to."""
        return (self.out,)

    @property
    def bytes(self) -> int:
        values = [getattr(self, f.name) for f in fields(self)]
        return sum(t.numel() * t.element_size() for t in values if isinstance(t, torch.Tensor))


@dataclass(eq=False)
class BackwardInputs(Inputs):
    """One set of tensors of a backward call.

    ``out`` is an input here, and ``lse`` is (batch, heads_q, seqlen_q), float32; dq, dk and dv are for
    kernels that write where they are told.
    """

    lse: torch.Tensor
    dout: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    returns: ClassVar[tuple[str, ...]] = ("dq", "dk", "dv")

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.dq, self.dk, self.dv


class JointInputs(BackwardInputs):
    """One set of tensors of a forward and its backward, which reads the ``out`` and ``lse`` that the forward wrote."""

    returns: ClassVar[tuple[str, ...]] = ("out", "dq", "dk", "dv")

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.out, self.lse, self.dq, self.dk, self.dv


class TorchLab:
    """A device and a workload's inputs on it."""

    def __init__(self, workload: Workload, room: Room, policy: str) -> None:
        self._workload, self._room, self._policy = workload, room, policy
        self._device = room.target.device
        self._nvml = _nvml_handle(room.target.uuid) if self._device == "cuda" else None
        if self._device == "cuda":
            torch.cuda.init()
            if room.target.arch in FA4_ARCHES:
                self._note_fa4_compiles()
        self._draws = 0
        one = make_inputs(workload, self._device, 0)
        count = min(_MAX_SETS, max(2, -(-_COLD_BYTES[self._device] // one.bytes)))
        self._sets = [one] + [make_inputs(workload, self._device, i) for i in range(1, count)]

    def draw(self, seed: int) -> Inputs:
        workload, loud = self._workload, 1.0
        if self._draws % 2:
            workload, loud = _ragged(workload, seed), _LOUD
        self._draws += 1
        return make_inputs(workload, self._device, seed, loud)

    def reference(self, inputs: Inputs) -> torch.Tensor | dict[str, torch.Tensor]:
        i, w = inputs, inputs.packed.workload if inputs.packed else self._workload
        gradients = reference.gradients(i.q, i.k, i.v, i.dout, w) if isinstance(i, BackwardInputs) else {}
        if "out" not in i.returns:
            return gradients
        out = reference.attention(i.q, i.k, i.v, w)
        return {"out": out, **gradients} if gradients else out

    def build(self, config: Config) -> Kernel:
        return load(config.family).build(config, self._workload, self._room)

    def run(self, kernel: Kernel, inputs: Inputs) -> torch.Tensor | dict[str, torch.Tensor]:
        for output in inputs.outputs:
            output.fill_(float("nan"))
        # Kernels that allocate their outputs get these blocks back from the caching allocator.
        poison = [torch.full_like(output, float("nan")) for output in inputs.outputs]
        del poison
        found = kernel(inputs)
        wide = self._widened([found] if isinstance(found, torch.Tensor) else found)
        if self._device == "cuda":
            torch.cuda.synchronize()
        return wide[0] if len(wide) == 1 else dict(zip(inputs.returns, wide, strict=True))

    def _widened(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [t.to(torch.float64 if self._device == "cpu" else torch.float32) for t in outputs]

    def timer(self, kernel: Kernel) -> Timer:
        return measure.timer(kernel, self._sets, self._policy, self._device)

    def conditions(self) -> Mapping[str, Any]:
        if self._nvml is None:
            return {"throttled": False, "sm_mhz": None}
        nvml, handle = self._nvml
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        bad = [n for n in _THROTTLE_NAMES if reasons & getattr(nvml, n, 0)]
        return {
            "throttled": bool(bad),
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        }

    def healthy(self) -> bool:
        if self._device == "cpu":
            return True
        try:
            torch.cuda.synchronize()
            return bool(torch.ones(8, device="cuda").sum().item() == 8)
        except Exception:  # an illegal access sticks: every later call fails
            return False

    def faults(self) -> list[str]:
        if self._device != "cuda" or self._room.target.arch not in FA4_ARCHES:
            return []
        from tuner.families import fa4_cache

        found = [f"compiled while measuring: {h[:12]}" for h in fa4_cache.compiled_here]
        fa4_cache.compiled_here.clear()
        return found

    def _note_fa4_compiles(self) -> None:
        try:
            from tuner.families import fa4_cache
        except ImportError:  # FA4 is not installed: its families will say so
            return
        fa4_cache.note_compiles(self._room.cache_dir)


def make_inputs(workload: Workload, device: str, seed: int, loud: float = 1.0) -> Inputs:
    """Draw standard normal q, k, v, and dout of a backward, from a seed of their own; q times ``loud``."""
    w, dtype = workload, getattr(torch, workload.dtype)
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch.float32).to(dtype)

    packed = _packed(w, device) if w.layout == "varlen" else None
    rows_q, rows_k = ((w.total_q,), (w.total_k,)) if packed else ((w.batch, w.seqlen_q), (w.batch, w.seqlen_k))
    q = normal(*rows_q, w.heads_q, w.head_dim).mul_(loud)
    k = normal(*rows_k, w.heads_kv, w.head_dim)
    v = normal(*rows_k, w.heads_kv, w.head_dim_v)
    if w.op == "fwd":
        out = torch.empty(*rows_q, w.heads_q, w.head_dim_v, device=device, dtype=dtype)
        return Inputs(q, k, v, out, packed=packed)
    return (BackwardInputs if w.op == "bwd" else JointInputs)(
        q,
        k,
        v,
        out=reference.attention(q, k, v, w).to(dtype),
        lse=reference.log_sum_exp(q, k, v, w).float(),
        dout=normal(*rows_q, w.heads_q, w.head_dim_v),
        dq=torch.empty_like(q),
        dk=torch.empty_like(k),
        dv=torch.empty_like(v),
        packed=packed,
    )


def _packed(workload: Workload, device: str) -> Packed:
    def offsets(given: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(given)], dtype=torch.int32, device=device)

    return Packed(workload, offsets(workload.lengths_q), offsets(workload.lengths_k))


def _ragged(workload: Workload, seed: int) -> Workload:
    """Return a varlen workload with other lengths, since a kernel may be right for those it was timed on alone."""
    w = workload
    if w.layout == "dense":
        return w
    other_q, other_k = lengths.ragged(w.lengths_q, w.lengths_k, bool(w.pattern.masks), seed)
    return w.with_(lengths_q=other_q, lengths_k=other_k)


def first_call(kernel: Kernel, workload: Workload, device: str) -> None:
    """Call a kernel once, so that whatever compiles on the first call has compiled."""
    kernel(make_inputs(workload, device, 0))
    if device == "cuda":
        torch.cuda.synchronize()


def _nvml_handle(uuid: str) -> tuple[Any, Any] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # without NVML the rounds go unchecked, and say so with sm_mhz None
        return None
