"""FlexAttention's Triton backend with its kernel options: the tunable family of any GPU since Ampere.

==================  ======================================================================
tunable             meaning (FlexAttention's and Triton's own names where they have one)
==================  ======================================================================
BLOCK_M, BLOCK_N    rows of Q that a program works on, and of K/V that a step works on
BLOCK_M1, BLOCK_N1  backward, dk and dv: rows of Q of a step, rows of K/V of a program
BLOCK_M2, BLOCK_N2  backward, dq: rows of Q of a program, rows of K/V of a step
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
from tuner.families.base import Built, Kernel, Room, Space, backward_refused
from tuner.target import Target
from tuner.workload import Workload

_DEFAULT_BLOCK = 128  # FlexAttention's BLOCK_SIZE where none is given

# BlockMask sizes. A backward runs its forward as PyTorch ships it, and FlexAttention drops a backward
# whose own default blocks, of up to 128 rows, do not divide the BlockMask's, whatever the options say.
_MASK_BLOCKS = {"fwd": (64, 128, 256), "bwd": (128, 256)}

_TILES = {"fwd": ("BLOCK_M", "BLOCK_N"), "bwd": ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")}

# FlexAttention drops the bounds checks of its kernel where both sequences are multiples of this.
_UNCHECKED_MULTIPLE = 128

# Shared memory that one program can have (CUDA C++ programming guide, compute capabilities): 163, 99 and
# 227 KiB. Consumer Blackwell (sm_120) has what Ada has.
_SMEM_LIMIT_BYTES = {"sm_80": 166_912, "sm_87": 166_912, "sm_90a": 232_448, "sm_100a": 232_448, "sm_103a": 232_448}
_SMEM_LIMIT_ELSEWHERE_BYTES = 101_376

_REGISTERS = 255  # that a thread can address
_IN_TENSOR_MEMORY = ("sm_100a", "sm_103a")  # where accumulators take no registers

# PyTorch's own choices for its head dims, and neighbours: the tiles, num_warps, num_stages.
_FIRST = {
    "fwd": (
        (128, 64, 8, 3),
        (128, 128, 8, 3),
        (128, 128, 4, 3),
        (128, 64, 4, 3),
        (64, 64, 4, 3),
        (128, 32, 4, 3),
        (64, 32, 4, 3),
        (64, 128, 4, 2),
    ),
    "bwd": (
        (64, 128, 128, 64, 8, 3),
        (64, 128, 128, 64, 4, 3),
        (64, 64, 64, 64, 4, 3),
        (64, 64, 64, 64, 4, 2),
        (32, 128, 128, 32, 4, 3),
        (32, 64, 64, 32, 4, 3),
        (64, 64, 64, 64, 8, 1),
    ),
}


class FlexTriton:
    """FlexAttention's Triton kernels with explicit options, forward or backward."""

    name = "flex_triton"
    version = 1
    compile_in = "device"
    lab = "tuner.lab_torch:TorchLab"

    def refuses(self, workload: Workload, target: Target) -> str:
        if not target.is_gpu:
            return f"needs a GPU, the target is {target.arch}"
        if target.arch in ("sm_70", "sm_72", "sm_75"):
            return f"needs sm_80 or newer, for asynchronous copies and bfloat16; the target is {target.arch}"
        if workload.layout != "dense":
            return f"has no {workload.layout} layout"
        if workload.op not in _TILES:
            return (
                f"tunes one direction at a time, not {workload.op}: tune fwd and bwd, with one BlockMask size for both"
            )
        return backward_refused(workload)

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        space: dict[str, tuple[Param, ...]] = {"num_warps": (4, 8), "num_stages": (1, 2, 3, 4)}
        if workload.op == "bwd":
            space |= {"BLOCK_M1": (32, 64), "BLOCK_N1": (32, 64, 128)}
            space |= {"BLOCK_M2": (32, 64, 128), "BLOCK_N2": (32, 64)}
        else:
            few = workload.seqlen_q < 64
            space |= {"BLOCK_M": (16, 32, 64) if few else (32, 64, 128), "BLOCK_N": (16, 32, 64, 128)}
        if workload.pattern.masks:
            blocks = _MASK_BLOCKS[workload.op]
            space |= {"q_block": blocks, "kv_block": blocks, "full_blocks": (True, False)}
        return space

    def first(self, workload: Workload) -> tuple[Config, ...]:
        space, names = self.space(workload), (*_TILES[workload.op], "num_warps", "num_stages")
        masked = {"q_block": 128, "kv_block": 128, "full_blocks": True} if workload.pattern.masks else {}
        configs: dict[Config, None] = {}
        for values in _FIRST[workload.op]:
            # a few queries get the tallest tile that is offered for them
            params = {n: min(v, int(space[n][-1])) for n, v in zip(names, values, strict=True)}
            configs[Config.make(self.name, self.version, **params, **masked)] = None
        return tuple(configs)

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        if config.is_stock:
            return ""
        return (
            _mask_refused(config, workload)
            or (_misaligned(config) if workload.op == "bwd" else "")
            or _spills(config, workload, target)
            or _overflows(config, workload, target)
        )

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        extras: dict[str, Any] = {"kernel_options": _options(config, workload)}
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
        return flex.build(workload, "cuda", _block(config), _options(config, workload), full_blocks=full)


FAMILY = FlexTriton()


def smem_bytes(config: Config, workload: Workload, target: Target) -> int:
    """Return the least shared memory that Triton takes: the tiles that its pipeline loads ahead.

    Of ``num_stages`` stages one computes; without a pipeline one tile can take another's place. Forward:
    K and V, and Q where MMAs read it from shared memory (Hopper, Blackwell). Backward: Q and dO for dk and
    dv, or K and V for dq, whichever is more; the kernel holds both parts.
    """
    element = 4 if workload.dtype == "float32" else 2
    d, dv = _power_of_two(workload.head_dim), _power_of_two(workload.head_dim_v)
    ahead = int(config["num_stages"]) - 1
    columns = ahead * (d + dv) if ahead else max(d, dv)
    if workload.op == "bwd":
        return element * max(int(config["BLOCK_M1"]), int(config["BLOCK_N2"])) * columns
    q = int(config["BLOCK_M"]) * d if target.arch in ("sm_90a", *_IN_TENSOR_MEMORY) else 0
    return element * (int(config["BLOCK_N"]) * columns + q)


def accumulator_registers(config: Config, workload: Workload) -> int:
    """Count the float32 registers a thread holds of scores and sums, spread over all warps' threads.

    Forward: the scores and the output. Backward: dk and dv, or dq, each beside the scores and their gradients.
    """
    d, dv = _power_of_two(workload.head_dim), _power_of_two(workload.head_dim_v)
    if workload.op == "fwd":
        values = int(config["BLOCK_M"]) * (int(config["BLOCK_N"]) + dv)
    else:
        m1, n1, m2, n2 = (int(config[name]) for name in _TILES["bwd"])
        values = max(n1 * (d + dv + 2 * m1), m2 * (d + 2 * n2))
    return values // (32 * int(config["num_warps"]))


def _mask_refused(config: Config, workload: Workload) -> str:
    if not workload.pattern.masks:
        return ""
    for block, letter, seqlen in (("q_block", "M", workload.seqlen_q), ("kv_block", "N", workload.seqlen_k)):
        for tile in (t for t in _TILES[workload.op] if t.startswith(f"BLOCK_{letter}")):
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


def _misaligned(config: Config) -> str:
    """Return which static assertion of FlexAttention's backward kernel would fail: steps divide programs."""
    for program, step in (("BLOCK_N1", "BLOCK_M1"), ("BLOCK_M2", "BLOCK_N2")):
        if int(config[program]) % int(config[step]):
            return f"{step} {config[step]} does not divide {program} {config[program]}, as the backward kernel asserts"
    return ""


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


def _options(config: Config, workload: Workload) -> dict[str, Any]:
    """Return FlexAttention's kernel_options, with the prefix that keeps them to one direction."""
    names = () if config.is_stock else (*_TILES[workload.op], "num_warps", "num_stages")
    return {"BACKEND": "TRITON", **{f"{workload.op}_{name}": config[name] for name in names}}


def _block(config: Config) -> tuple[int, int]:
    return int(config.get("q_block", _DEFAULT_BLOCK)), int(config.get("kv_block", _DEFAULT_BLOCK))


def _power_of_two(head_dim: int) -> int:
    """Return the head dimension as Triton pads it."""
    return 1 << (head_dim - 1).bit_length()
