"""FlexAttention's Triton backend with its kernel options: the tunable family of any GPU since Ampere.

==================  ======================================================================
tunable             meaning (FlexAttention's and Triton's own names where they have one)
==================  ======================================================================
BLOCK_M, BLOCK_N    rows of Q that a program works on, and of K/V that a step works on
num_warps           warps of a program
num_stages          depth of Triton's load pipeline
q_block, kv_block   BlockMask size (only where something is masked)
full_blocks         list blocks that nothing hides apart, and skip the mask there
==================  ======================================================================

Compiling needs the GPU: Inductor asks the device what it has, and Triton's limits are the driver's.
Some configs do not compile at all (a BlockMask of 64x64 on torch 2.11); that is a trial's result.
"""

from __future__ import annotations

from typing import Any

from tuner.config import Config, Param
from tuner.families.base import Built, Kernel, Room, Space
from tuner.target import Target
from tuner.workload import Workload

_MASK_BLOCKS = (64, 128, 256)
_DEFAULT_BLOCK = 128  # FlexAttention's BLOCK_SIZE where none is given

# FlexAttention drops the bounds checks of its kernel where both sequences are multiples of this.
_UNCHECKED_MULTIPLE = 128

# Shared memory that one program can have (CUDA C++ programming guide, compute capabilities): 163, 99 and
# 227 KiB. Consumer Blackwell (sm_120) has what Ada has.
_SMEM_LIMIT_BYTES = {"sm_80": 166_912, "sm_87": 166_912, "sm_90a": 232_448, "sm_100a": 232_448, "sm_103a": 232_448}
_SMEM_LIMIT_ELSEWHERE_BYTES = 101_376

_REGISTERS = 255  # that a thread can address
_IN_TENSOR_MEMORY = ("sm_100a", "sm_103a")  # where accumulators take no registers

# PyTorch's own choices for its head dims, and neighbours: (BLOCK_M, BLOCK_N, num_warps, num_stages).
_FIRST = (
    (128, 64, 8, 3),
    (128, 128, 8, 3),
    (128, 128, 4, 3),
    (128, 64, 4, 3),
    (64, 64, 4, 3),
    (128, 32, 4, 3),
    (64, 32, 4, 3),
    (64, 128, 4, 2),
)


class FlexTriton:
    """FlexAttention's Triton forward with explicit kernel options."""

    name = "flex_triton"
    version = 1
    compile_in = "device"
    lab = "tuner.lab_torch:TorchLab"

    def refuses(self, workload: Workload, target: Target) -> str:
        if not target.is_gpu:
            return f"needs a GPU, the target is {target.arch}"
        if target.arch in ("sm_70", "sm_72", "sm_75"):
            return f"needs sm_80 or newer, for asynchronous copies and bfloat16; the target is {target.arch}"
        if workload.op != "fwd":
            return f"computes fwd here, not {workload.op}: its four backward blocks are not tuned yet"
        if workload.layout != "dense":
            return f"has no {workload.layout} layout"
        return ""

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        short = workload.seqlen_q < 64
        space: dict[str, tuple[Param, ...]] = {
            "BLOCK_M": (16, 32, 64) if short else (32, 64, 128),
            "BLOCK_N": (16, 32, 64, 128),
            "num_warps": (4, 8),
            "num_stages": (1, 2, 3, 4),
        }
        if workload.pattern.masks:
            space |= {"q_block": _MASK_BLOCKS, "kv_block": _MASK_BLOCKS, "full_blocks": (True, False)}
        return space

    def first(self, workload: Workload) -> tuple[Config, ...]:
        space = self.space(workload)
        masked = {"q_block": 128, "kv_block": 128, "full_blocks": True} if workload.pattern.masks else {}
        rows = max(int(m) for m in space["BLOCK_M"])
        tiles = {(min(m, rows), n, warps, stages): None for m, n, warps, stages in _FIRST}
        return tuple(
            Config.make(self.name, self.version, BLOCK_M=m, BLOCK_N=n, num_warps=warps, num_stages=stages, **masked)
            for m, n, warps, stages in tiles
        )

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        if config.is_stock:
            return ""
        return (
            _mask_refused(config, workload) or _spills(config, workload, target) or _overflows(config, workload, target)
        )

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        extras: dict[str, Any] = {"kernel_options": _options(config)}
        if workload.pattern.masks:
            extras["block_size"] = list(_block(config))
            if not config.get("full_blocks", True):
                extras["full_blocks"] = False
        return extras

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        from tuner.lab_torch import first_call

        first_call(self.build(config, workload, room), workload, "cuda")
        return Built()

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        from tuner.families import flex

        full = bool(config.get("full_blocks", True))
        return flex.build(workload, "cuda", _block(config), _options(config), full_blocks=full)


FAMILY = FlexTriton()


def smem_bytes(config: Config, workload: Workload, target: Target) -> int:
    """Return the least shared memory that Triton takes: the K and V tiles that its pipeline loads ahead.

    Of ``num_stages`` stages one computes. Hopper's and Blackwell's MMAs read Q from shared memory too.
    """
    element = 4 if workload.dtype == "float32" else 2
    d, dv = _power_of_two(workload.head_dim), _power_of_two(workload.head_dim_v)
    ahead = int(config["num_stages"]) - 1
    # without a pipeline V can take K's place
    columns = ahead * (d + dv) if ahead else max(d, dv)
    q = int(config["BLOCK_M"]) * d if target.arch in ("sm_90a", *_IN_TENSOR_MEMORY) else 0
    return element * (int(config["BLOCK_N"]) * columns + q)


def accumulator_registers(config: Config, workload: Workload) -> int:
    """Count the float32 registers a thread holds of scores and output, spread over all warps' threads."""
    columns = int(config["BLOCK_N"]) + _power_of_two(workload.head_dim_v)
    return int(config["BLOCK_M"]) * columns // (32 * int(config["num_warps"]))


def _mask_refused(config: Config, workload: Workload) -> str:
    if not workload.pattern.masks:
        return ""
    for block, tile, seqlen in (
        ("q_block", "BLOCK_M", workload.seqlen_q),
        ("kv_block", "BLOCK_N", workload.seqlen_k),
    ):
        if int(config[block]) % int(config[tile]):
            return f"{tile} {config[tile]} does not divide the BlockMask's {block} {config[block]}"
        if not _checks_bounds(workload) and seqlen % int(config[block]):
            return (
                f"{block} {config[block]} does not divide the sequence of {seqlen}, and FlexAttention checks no bounds "
                f"where both are multiples of {_UNCHECKED_MULTIPLE}: it would read what lies behind"
            )
    return ""


def _checks_bounds(workload: Workload) -> bool:
    return bool(workload.seqlen_q % _UNCHECKED_MULTIPLE or workload.seqlen_k % _UNCHECKED_MULTIPLE)


def _spills(config: Config, workload: Workload, target: Target) -> str:
    if target.arch in _IN_TENSOR_MEMORY:
        return ""
    registers = accumulator_registers(config, workload)
    if registers > _REGISTERS:
        return f"accumulators take {registers} registers a thread and {_REGISTERS} exist: the kernel would spill"
    return ""


def _overflows(config: Config, workload: Workload, target: Target) -> str:
    limit = _SMEM_LIMIT_BYTES.get(target.arch, _SMEM_LIMIT_ELSEWHERE_BYTES)
    smem = smem_bytes(config, workload, target)
    if smem > limit:
        return f"takes {smem} bytes of shared memory at least and {limit} exist: Triton would refuse to launch it"
    return ""


def _options(config: Config) -> dict[str, Any]:
    """Return FlexAttention's kernel_options, those of the forward with its prefix."""
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    own = {} if config.is_stock else {f"fwd_{name}": config[name] for name in names}
    return {"BACKEND": "TRITON", **own}


def _block(config: Config) -> tuple[int, int]:
    return int(config.get("q_block", _DEFAULT_BLOCK)), int(config.get("kv_block", _DEFAULT_BLOCK))


def _power_of_two(head_dim: int) -> int:
    """Return the head dimension as Triton pads it."""
    return 1 << (head_dim - 1).bit_length()
