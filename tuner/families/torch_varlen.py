"""torch.nn.attention.varlen, PyTorch's own call for packed sequences: FlashAttention-2. Nothing to tune."""

from __future__ import annotations

from typing import Any

from tuner.config import Config
from tuner.families.base import Built, Kernel, Room, Untunable, backward_refused
from tuner.target import BLACKWELL, Target
from tuner.workload import Workload

_ARCHS = ("sm_80", "sm_89", "sm_90a", *BLACKWELL, "sm_120a")  # FlashAttention-2 needs sm_80 or newer


class TorchVarlen(Untunable):
    """varlen_attn as PyTorch ships it."""

    name = "torch_varlen"
    compile_in = "nowhere"
    lab = "tuner.lab_torch:TorchLab"

    def refuses(self, workload: Workload, target: Target) -> str:
        w = workload
        if target.arch not in _ARCHS:
            return f"needs a GPU of sm_80 or newer, the target is {target.arch}"
        if w.layout != "varlen":
            return f"computes the layout varlen, not {w.layout}"
        if w.dtype not in ("bfloat16", "float16"):
            return f"computes bfloat16 and float16, not {w.dtype}"
        if w.head_dim != w.head_dim_v:
            return f"needs head_dim_v equal to head_dim, not {w.head_dim_v} and {w.head_dim}"
        if w.head_dim > 256:
            return f"head_dim goes to 256, not {w.head_dim}"
        if w.pattern.scores:
            return f"has no argument for {' + '.join(map(str, w.pattern.scores))}"
        if w.op != "fwd" and w.deterministic:
            return "sums dq in no fixed order"
        return backward_refused(w)

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        return {}

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        return Built()

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        import inspect

        import torch
        from torch.nn.attention.varlen import varlen_attn

        w = workload
        more: dict[str, Any] = {"window_size": window(w)}
        # The switch is newer than the kernels, which always took grouped heads
        if w.heads_q != w.heads_kv and "enable_gqa" in inspect.signature(varlen_attn).parameters:
            more["enable_gqa"] = True

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Any) -> torch.Tensor:
            offsets = packed.cu_seqlens_q, packed.cu_seqlens_k
            out = varlen_attn(q, k, v, *offsets, w.seqlen_q, w.seqlen_k, **more)
            assert isinstance(out, torch.Tensor)  # the LSE comes with it only if asked for
            return out

        if w.op != "fwd":
            from tuner.families.autograd import Backward, Joint

            return (Backward if w.op == "bwd" else Joint)(attend)
        return lambda inputs: attend(inputs.q, inputs.k, inputs.v, inputs.packed)


def window(workload: Workload) -> tuple[int, int]:
    """Return how many keys before and after its own a query sees, -1 for all, aligned at the sequences' ends."""
    if part := workload.pattern.mask("sliding_window"):
        return int(part["window"]) - 1, 0  # type: ignore[arg-type]
    return (-1, 0) if workload.pattern.mask("causal") else (-1, -1)


FAMILY = TorchVarlen()
