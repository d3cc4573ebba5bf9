"""FA4's calls on Blackwell, with the seams that its tunables are reached through.

What a call takes as an argument is passed; the rest is put in its place for the length of one call:
two questions that FA4 answers from environment variables, its heuristic's result, and the kernel's class.
FA4's compile key holds the first three. What only the class knows is in the cache folder's name instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import cutlass
from flash_attn.cute import interface, tile_scheduler, utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from torch._subclasses.fake_tensor import FakeTensorMode

from tuner.config import Config
from tuner.families import cubin, fa4_cache, fa4_launch
from tuner.families import fa4_sm100_tiles as tiles
from tuner.families.base import Built, Kernel, Room
from tuner.families.fa4_seam import Swapped
from tuner.families.fa4_tiles import uses_block_mask
from tuner.trial import Resources
from tuner.workload import Workload

_EX2_EMU_START_FRG = 1  # the first 32 columns of a row always use the exp2 units: FA4's choice but for one head


class Seam(Swapped):
    """A with-block in which FA4 works with caches of ours, and with other things put in its own's place.

    ``parts`` says for each of FA4's caches the folder to use; the empty string is where FA4 itself looks.
    ``caches`` are in this order, as if they had not been asked for an object yet.
    """

    def __init__(self, room: Room, load: bool, parts: dict[str, str], *changes: tuple[Any, str, Any]) -> None:
        self.caches: list[fa4_cache.Cache] = []
        for part, name in parts.items():
            # FA4's keys do not hold the number of SMs, and some not even the architecture: the folder does
            path = fa4_cache.own(room.cache_dir, f"{room.target.arch}-{room.target.num_sms}/{name}")
            cache = fa4_cache.cache(path if name else fa4_cache.shipped(room.cache_dir, part), load)
            cache.asked.clear()
            self.caches.append(cache)
        ours = [(fa4_cache.HOLDERS[p], "compile_cache", c) for p, c in zip(parts, self.caches, strict=True)]
        super().__init__(*ours, *changes, *([] if load else _no_hardware(room)))


class _Hardware:
    """The target, where FA4 and CuTe ask the driver what GPU is here: a persistent grid is as large as that."""

    def __init__(self, num_sms: int) -> None:
        self._num_sms = num_sms

    def get_device_multiprocessor_count(self) -> int:
        return self._num_sms

    def get_max_active_clusters(self, cluster_size: int, stream: object = None) -> int:
        return self._num_sms // cluster_size


def _no_hardware(room: Room) -> Iterator[tuple[Any, str, Any]]:
    for module in (cutlass.utils, tile_scheduler):
        yield module, "HardwareInfo", lambda device_id=0: _Hardware(room.target.num_sms)


def _forward(config: Config, room: Room, load: bool) -> Seam:
    """Return the with-block in which FA4's forward builds and finds a config's kernels."""
    if config.is_stock:
        return Seam(room, load, {"fwd": ""})
    variant = f"fwd_kv{config['kv_stage']}_ex{config['ex2_emu_freq']}_{config['num_regs']}"
    two_cta, clc = bool(config["two_cta"]), bool(config["use_clc_scheduler"])
    registers = tiles.forward_registers(config)
    kernel = _forward_kernel(int(config["kv_stage"]), int(config["ex2_emu_freq"]), *registers)
    return Seam(
        room,
        load,
        {"fwd": variant, "fwd_combine": "fwd_combine"},
        (utils, "_get_disable_2cta_default", lambda is_fwd=False: not two_cta),
        (utils, "_get_use_clc_scheduler_default", lambda: clc),
        (interface, "FlashAttentionForwardSm100", kernel),
        (interface, "_get_fwd_config", _with_q_stage(config)),
    )


def _with_q_stage(config: Config) -> Callable[..., Any]:
    original, q_stage = interface._get_fwd_config, int(config["q_stage"])
    return lambda **kw: replace(original(**kw), q_stage=q_stage)


@cache
def _forward_kernel(kv_stage: int, ex2_emu_freq: int, softmax: int, correction: int, other: int) -> type:
    """Return FA4's forward kernel with what its constructor decides by itself decided here."""

    class Tuned(interface.FlashAttentionForwardSm100):  # type: ignore[misc]
        def __init__(self, *args: Any, **kw: Any) -> None:
            super().__init__(*args, **kw)
            self._tune = {"ex2_emu_freq": ex2_emu_freq, "ex2_emu_start_frg": _EX2_EMU_START_FRG}
            self.enable_ex2_emu = ex2_emu_freq > 0
            self.num_regs_softmax, self.num_regs_correction, self.num_regs_other = softmax, correction, other

        def _setup_attributes(self) -> None:
            super()._setup_attributes()
            if kv_stage:
                self.kv_stage, self.uneven_kv_smem, self.uneven_kv_smem_offset = kv_stage, False, 0

    return Tuned


def compile_fwd(config: Config, workload: Workload, room: Room) -> Built:
    """Compile one config into the room's cache without a GPU, and read its figures from the cubin."""
    seam = _forward(config, room, load=False)
    with FakeTensorMode(), seam:
        q, k, v, out, lse = fa4_launch.tensors(workload)
        interface._flash_attn_fwd(q, k, v, out=out, lse=lse, **_forward_arguments(config, workload, fake=True))
    if config.is_stock:
        return built(seam.caches)
    return built(seam.caches, tiles.smem_bytes(config, workload), tiles.tmem_columns(config, workload))


def built(caches: list[fa4_cache.Cache], smem: int | None = None, columns: int | None = None) -> Built:
    """Return the figures of the first cache's object, and every object that a call would load."""
    files = tuple(dict.fromkeys(needed for c in caches for needed in c.asked))
    found = cubin.resources(files[0])
    return Built(Resources(found.registers, found.spill_bytes, smem, found.code_bytes, columns), files)


def build_fwd(config: Config, workload: Workload, room: Room) -> Kernel:
    """Return the kernel on this process's GPU, loaded from the room's cache."""
    arguments = _forward_arguments(config, workload, fake=False)
    return fa4_launch.kernel(config, workload, arguments, _forward(config, room, load=True))


def _forward_arguments(config: Config, workload: Workload, *, fake: bool) -> dict[str, Any]:
    arguments = fa4_launch.pattern_arguments(config, workload, _block_lists(config, workload, fake=fake))
    if not config.is_stock:
        arguments["tile_mn"] = (tiles.TILE_M, config["tile_n"])
        arguments["num_splits"] = config["num_splits"]
        arguments["pack_gqa"] = config["pack_gqa"]
    return arguments


def _block_lists(config: Config, workload: Workload, *, fake: bool) -> BlockSparseTensorsTorch | None:
    if not uses_block_mask(config, workload):
        return None
    return (fa4_launch.fake_lists if fake else fa4_launch.real_lists)(workload, tiles.block_size(config))
