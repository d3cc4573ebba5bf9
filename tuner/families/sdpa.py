"""scaled_dot_product_attention: cuDNN's kernels on a GPU, PyTorch's own on a CPU. Nothing to tune."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuner.config import Config
from tuner.families.base import Built, Kernel, Room, Untunable, backward_refused
from tuner.target import BLACKWELL, Target
from tuner.workload import Workload


class Sdpa(Untunable):
    """One backend of F.scaled_dot_product_attention."""

    compile_in = "nowhere"
    lab = "tuner.lab_torch:TorchLab"

    def __init__(self, name: str, device: str) -> None:
        self.name, self._device = name, device

    def refuses(self, workload: Workload, target: Target) -> str:
        if target.device != self._device:
            return f"needs {self._device}, the target is {target.arch}"
        if self._device == "cuda" and target.arch not in ("sm_80", "sm_89", "sm_90a", *BLACKWELL):
            return f"cuDNN's fused attention needs sm_80 or newer, the target is {target.arch}"
        if workload.layout != "dense" and self._device != "cpu":
            return f"has no {workload.layout} layout here"
        if self._device == "cuda" and workload.dtype == "float32":
            return "cuDNN computes bfloat16 and float16, not float32"
        # Newer cuDNN has a few larger pairs in backward; 128 is what every version has
        largest, limit = max(workload.head_dim, workload.head_dim_v), 256 if workload.op == "fwd" else 128
        if self._device == "cuda" and largest > limit:
            return f"cuDNN's head_dim goes to {limit} in {workload.op}, not {largest}"
        if workload.pattern.scores:
            return f"has no argument for {' + '.join(map(str, workload.pattern.scores))}"
        if workload.pattern.mask_names - {"causal"}:
            return f"has no argument for {workload.pattern}"
        if workload.pattern.masks and any(q != k for q, k in workload.sequences):
            return "aligns causal to the top left, which differs where seqlen_q is not seqlen_k"
        return backward_refused(workload)

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        return {}

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        return Built()

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        if self._device == "cuda":
            # Nothing else in the measuring child calls SDPA, so the process-wide switches serve; a
            # context manager would add its own host time to every call.
            torch.backends.cuda.enable_flash_sdp(False)
            torch.backends.cuda.enable_mem_efficient_sdp(False)
            torch.backends.cuda.enable_math_sdp(False)
            torch.backends.cuda.enable_cudnn_sdp(True)
        causal = bool(workload.pattern.masks)
        gqa = workload.heads_q != workload.heads_kv
        if workload.op != "fwd":
            from tuner.families.autograd import Backward, Joint

            return (Backward if workload.op == "bwd" else Joint)(
                _packed(causal, gqa)
                if workload.layout == "varlen"
                else lambda q, k, v: scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=gqa
                ).transpose(1, 2)
            )
        if workload.layout == "varlen":
            attend = _packed(causal, gqa)
            return lambda inputs: attend(inputs.q, inputs.k, inputs.v, inputs.packed)

        def run(inputs: Any) -> torch.Tensor:
            out = scaled_dot_product_attention(
                inputs.q.transpose(1, 2),
                inputs.k.transpose(1, 2),
                inputs.v.transpose(1, 2),
                is_causal=causal,
                enable_gqa=gqa,
            )
            return out.transpose(1, 2)

        return run


def _packed(causal: bool, gqa: bool) -> Callable[..., Any]:
    """Return SDPA over the sequences of varlen inputs, one after the other: it has no call for all of them."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Any) -> torch.Tensor:
        w, outs = packed.workload, []
        for one_q, one_k, one_v in zip(q.split(w.lengths_q), k.split(w.lengths_k), v.split(w.lengths_k), strict=True):
            one_q, one_k, one_v = (t.transpose(0, 1)[None] for t in (one_q, one_k, one_v))
            out = scaled_dot_product_attention(one_q, one_k, one_v, is_causal=causal, enable_gqa=gqa)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    return attend


CUDNN = Sdpa("cudnn", "cuda")
CPU = Sdpa("sdpa_cpu", "cpu")
