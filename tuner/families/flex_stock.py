"""FlexAttention on a GPU as PyTorch ships it: what a user has today, with nothing to tune."""

from __future__ import annotations

from typing import Any

from tuner.config import Config
from tuner.families.base import Built, Kernel, Room, Untunable, backward_refused
from tuner.families.fa4_bwd_tiles import stock_dq_refused
from tuner.families.fa4_fwd_sm100 import cannot_on_sm100
from tuner.target import BLACKWELL, Target
from tuner.workload import Workload

_DEFAULT_BLOCK = 128  # FlexAttention's BLOCK_SIZE where none is given


class FlexStock(Untunable):
    """One backend of FlexAttention, with its default BlockMask and options."""

    compile_in = "device"  # Inductor compiles and FA4 JITs on the first call, which needs a GPU
    lab = "tuner.lab_torch:TorchLab"

    def __init__(
        self,
        name: str,
        backend: str,
        arches: tuple[str, ...],
        max_head_dim: int,
        mode: str | None = None,
        q_block: int = _DEFAULT_BLOCK,
    ) -> None:
        self.name = name
        self._mode = mode  # torch.compile's
        self._backend, self._arches, self._max_head_dim, self._q_block = backend, arches, max_head_dim, q_block

    def refuses(self, workload: Workload, target: Target) -> str:
        if not target.is_gpu:
            return f"needs a GPU, the target is {target.arch}"
        if self._arches and target.arch not in self._arches:
            return f"needs {' or '.join(self._arches)}, the target is {target.arch}"
        if workload.layout != "dense":
            return f"has no {workload.layout} layout"
        if workload.dtype == "float32" and self._backend == "FLASH":
            return "computes bfloat16 and float16, not float32"
        if max(workload.head_dim, workload.head_dim_v) > self._max_head_dim:
            return f"head_dim goes to {self._max_head_dim}, not {max(workload.head_dim, workload.head_dim_v)}"
        if self._backend == "FLASH" and target.arch in BLACKWELL and (reason := cannot_on_sm100(workload, target)):
            return reason
        if workload.op != "fwd" and self._backend == "FLASH" and (reason := _flash_bwd_refused(workload, target)):
            return reason
        return backward_refused(workload)

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        extras: dict[str, Any] = {"kernel_options": {"BACKEND": self._backend}}
        if workload.pattern.masks:
            extras["block_size"] = list(self._block(workload))
        return extras

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        from tuner.lab_torch import first_call

        first_call(self.build(config, workload, room), workload, "cuda")
        return Built()

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        from tuner.families import flex

        options = {"BACKEND": self._backend}
        return flex.build(workload, "cuda", self._block(workload), options, mode=self._mode)

    def _block(self, workload: Workload) -> tuple[int, int]:
        """Return the BlockMask's (q, kv) block: FlexAttention's own, or the least that FA4 takes on Blackwell.

        There the forward works on two tiles of 128 queries in turn, and the backward of wide heads on pairs of
        key tiles: other blocks end in a ValueError (flash-attn-4 4.0.0b36, ``cute/block_sparsity.py``).
        """
        wide = self._q_block != _DEFAULT_BLOCK and workload.op != "fwd" and workload.head_dim > 128
        return self._q_block, 2 * _DEFAULT_BLOCK if wide else _DEFAULT_BLOCK


def _flash_bwd_refused(workload: Workload, target: Target) -> str:
    """Return why FlexAttention's FLASH backend has no right backward for a workload."""
    w = workload
    if w.deterministic:
        return "adds to dq in the order in which blocks arrive, which is not deterministic"
    if w.heads_q != w.heads_kv and w.head_dim != w.head_dim_v:
        return f"sums over grouped heads only where head_dim_v equals head_dim, not {w.head_dim_v} and {w.head_dim}"
    if target.arch in BLACKWELL and w.head_dim == 256 and (w.pattern.masks or w.pattern.scores):
        return f"has no BlockMask and no score modification in FA4's backward for head_dim 256: not {w.pattern}"
    if target.arch != "sm_90a":
        return ""
    if w.pattern.masks and w.head_dim > 128:
        return f"has no backward tile of FlexAttention's 128 keys for head_dim {w.head_dim}, over 128, on sm_90"
    return stock_dq_refused(w, bool(w.pattern.masks))


FLASH = FlexStock("flex_flash_stock", "FLASH", ("sm_90a",), 256)
FLASH_SM100 = FlexStock("flex_flash_sm100_stock", "FLASH", BLACKWELL, 256, q_block=2 * _DEFAULT_BLOCK)
TRITON = FlexStock("flex_triton_stock", "TRITON", (), 512)
# What a user of torch.compile can ask for: Inductor times some configs of FlexAttention's Triton kernel on its
# first call. Without CUDA graphs of its own, since the policy says whether a graph is replayed.
TRITON_AUTOTUNE = FlexStock("flex_triton_autotune", "TRITON", (), 512, "max-autotune-no-cudagraphs")
