"""FlashAttention-4's forward on Blackwell: tiles, stages, 2-CTA MMAs, schedulers, splits, exp2 and registers.

Owns the tunables and their constraints. What tiles take is in ``fa4_sm100_tiles``, the call in
``fa4_sm100_launch``. Compiled and checked without a GPU; nothing here was measured on a Blackwell yet.

==================  ======================================================================
tunable             meaning (FA4's own names where it has one)
==================  ======================================================================
mask                ``native``: FA4's causal and window arguments; ``block``: a mask_mod with
                    a BlockMask, whose sizes follow the tiles
tile_n              rows of K/V that one step works on; those of Q are 128
q_stage             Q tiles that a thread block works on in turn
kv_stage            depth of the K/V ring; 0: as many as fit, FA4's own choice
two_cta             two thread blocks share each MMA and hold half of K and V each
use_clc_scheduler   the hardware hands out tiles (cluster launch control) instead of a fixed order
num_splits          parts of the keys that run side by side and are combined by a second kernel
ex2_emu_freq        of how many exponentials four are polynomials on the FMA units; 0: none
num_regs            registers of a softmax and of a correction thread, as ``192-72``
q_blocks            BlockMask's Q block in units of q_stage * 128 (``block`` only)
kv_blocks           BlockMask's K/V block in units of tile_n (``block`` only)
pack_gqa            fold the query heads of one K/V head into the rows of a tile
==================  ======================================================================
"""

from __future__ import annotations

from typing import Any

from tuner.config import Config, Param
from tuner.families import fa4_sm100_tiles as tiles
from tuner.families.base import Built, Kernel, Room, Space
from tuner.families.fa4_tiles import mask_refused, uses_block_mask
from tuner.target import BLACKWELL, Target
from tuner.workload import Workload

_SPLITS = (1, 2, 4, 8)
_MOST_SMS = 148  # of a B200: a grid that fills them gains nothing from splitting the keys

# exp2 units against FMA units: none emulated, the two settings FA4 has for head_dim 128, and its rarest.
_EX2_EMU_FREQ = (0, 10, 16, 32)

# What FA4 gives head_dim 128 with and without 2-CTA, narrow heads, and head_dim 256.
_NUM_REGS = ("184-80", "192-72", "200-64", "256-160")

# Worth trying first, all else being FA4's own choice: (tile_n, ex2_emu_freq, num_regs).
_FIRST = (
    (128, 16, "192-72"),
    (128, 10, "184-80"),
    (128, 0, "192-72"),
    (64, 16, "200-64"),
    (96, 16, "192-72"),
)


class Fa4FwdSm100:
    """FA4 forward on sm_100a and sm_103a."""

    name = "fa4_fwd_sm100"
    version = 1
    compile_in = "cpu"
    lab = "tuner.lab_torch:TorchLab"

    def refuses(self, workload: Workload, target: Target) -> str:
        if workload.op != "fwd":
            return f"computes fwd, not {workload.op}"
        return cannot_on_sm100(workload, target)

    def stock(self, workload: Workload) -> Config:
        return Config.make(self.name, self.version)

    def space(self, workload: Workload) -> Space:
        masks = [m for m in ("native", "block") if not mask_refused(m, workload)]
        blocks = (1, 2) if "block" in masks else (1,)
        grouped = workload.heads_q > workload.heads_kv
        two_q_tiles = tiles.packed_rows(workload, grouped) > tiles.TILE_M and workload.head_dim_v != 256
        return {
            "mask": tuple(masks),
            "tile_n": (64, 96, 128, 160, 192),
            "q_stage": (2, 1) if two_q_tiles else (1,),
            "kv_stage": (0, 2),
            "two_cta": (True, False) if _two_cta_heads(workload) else (False,),
            "use_clc_scheduler": (False, True) if "native" in masks and workload.pattern.masks else (False,),
            "num_splits": _SPLITS if _fills_little(workload) and not _split_heads(workload) else (1,),
            "ex2_emu_freq": _EX2_EMU_FREQ,
            "num_regs": _NUM_REGS,
            "q_blocks": blocks,
            "kv_blocks": blocks,
            "pack_gqa": (True, False) if grouped else (False,),
        }

    def first(self, workload: Workload) -> tuple[Config, ...]:
        space = self.space(workload)
        return tuple(
            self._make(space, mask=mask, tile_n=tile_n, ex2_emu_freq=freq, num_regs=regs, two_cta=two_cta)
            for mask in space["mask"]
            for two_cta in space["two_cta"]
            for tile_n, freq, regs in _FIRST
        )

    def feasible(self, config: Config, workload: Workload, target: Target) -> str:
        if config.is_stock:
            return ""
        return (
            mask_refused(str(config["mask"]), workload)
            or _misplaced(config, workload)
            or (_two_cta_refused(config, workload, target) if config["two_cta"] else "")
            or (_split_refused(config, workload) if config["num_splits"] != 1 else "")
            or _does_not_fit(config, workload)
        )

    def extras(self, config: Config, workload: Workload) -> dict[str, Any]:
        return {"block_size": list(tiles.block_size(config))} if uses_block_mask(config, workload) else {}

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        from tuner.families import fa4_sm100_launch

        return fa4_sm100_launch.compile_fwd(config, workload, room)

    def build(self, config: Config, workload: Workload, room: Room) -> Kernel:
        from tuner.families import fa4_sm100_launch

        return fa4_sm100_launch.build_fwd(config, workload, room)

    def _make(self, space: Space, **params: Param) -> Config:
        """Return a config with the first value of the space for whatever is not named."""
        return Config.make(self.name, self.version, **{k: v[0] for k, v in space.items()} | params)


FAMILY = Fa4FwdSm100()


def cannot_on_sm100(workload: Workload, target: Target) -> str:
    """Return what neither of FA4's directions computes on Blackwell; empty if nothing stands against it."""
    if target.arch not in BLACKWELL:
        return f"needs {' or '.join(BLACKWELL)}, the target is {target.arch}"
    if workload.dtype not in ("bfloat16", "float16"):
        return f"computes bfloat16 and float16, not {workload.dtype}"
    if workload.layout != "dense":
        return f"has no {workload.layout} layout here yet"
    d, dv = workload.head_dim, workload.head_dim_v
    # FA4's kernels share 512 columns of tensor memory among scores and outputs: what is wider than 128 has
    # a schedule of its own, and there are two such
    if max(d, dv) > 128 and (d, dv) not in ((192, 128), (256, 256)):
        return f"computes head_dim to 128, 192 over 128, and 256, not {d} over {dv}"
    return ""


def _two_cta_heads(workload: Workload) -> bool:
    """Tell whether FA4 has 2-CTA MMAs for these heads and masks; for wide heads with a causal mask too."""
    widths = tiles.padded(workload.head_dim), tiles.padded(workload.head_dim_v)
    return widths == (256, 256) or (widths in ((128, 128), (192, 128)) and not workload.pattern.masks)


def _split_heads(workload: Workload) -> str:
    d, dv = workload.head_dim, workload.head_dim_v
    return "" if d == dv else f"FA4 chooses the splits itself where head_dim {d} differs from head_dim_v {dv}"


def _fills_little(workload: Workload) -> bool:
    """Tell whether the grid without splits is smaller than the GPU, so that splitting the keys can pay."""
    rows = -(-workload.seqlen_q // (2 * tiles.TILE_M))
    return workload.batch * workload.heads_q * rows < _MOST_SMS


def _misplaced(config: Config, workload: Workload) -> str:
    """Return which tunable has nothing to act on."""
    native = config["mask"] == "native"
    if native and (config["q_blocks"], config["kv_blocks"]) != (1, 1):
        return "q_blocks and kv_blocks size a BlockMask, and mask=native has none"
    if config["pack_gqa"] and workload.heads_q == workload.heads_kv:
        return "pack_gqa needs more query heads than K/V heads"
    rows = tiles.packed_rows(workload, bool(config["pack_gqa"]))
    if config["q_stage"] == 2 and rows <= tiles.TILE_M:
        return f"a second Q tile would be empty: {rows} rows fill one of {tiles.TILE_M}"
    if config["use_clc_scheduler"] and (not native or not workload.pattern.masks):
        return "FA4 turns cluster launch control off where no native mask makes tiles uneven"
    if config["use_clc_scheduler"] and config["two_cta"] and workload.head_dim == 256:
        return "cluster launch control maps the 2-CTA tiles of head_dim 256 wrongly"
    return ""


def _two_cta_refused(config: Config, workload: Workload, target: Target) -> str:
    """Return why FA4 would fall back to one block a tile, which is the same config with two_cta=False."""
    if not _two_cta_heads(workload):
        return f"FA4 has no 2-CTA kernel for {workload.pattern} at head_dim {workload.head_dim}"
    if config["mask"] != "native":
        return "a BlockMask's lists are of one thread block's tiles, and 2-CTA tiles span two"
    if config["num_splits"] != 1:
        return "FA4 does not split the keys of 2-CTA tiles"
    pack, group = bool(config["pack_gqa"]), workload.heads_q // workload.heads_kv
    rows = tiles.packed_rows(workload, pack)
    # For head_dim 256 FA4 pairs a tile of queries with an empty one where the pairs still fit one wave:
    # each block then loads half of K and V
    pairs = 2 * workload.batch * (workload.heads_kv if pack else workload.heads_q)
    one_wave = workload.head_dim == 256 and pairs <= target.num_sms
    if rows <= int(config["q_stage"]) * tiles.TILE_M and not one_wave:
        return f"{rows} rows fill one thread block's tiles: there is no second block to pair it with"
    if pack and tiles.TILE_M % group:
        return f"{group} packed heads do not divide a tile of {tiles.TILE_M} rows"
    return ""


def _split_refused(config: Config, workload: Workload) -> str:
    if reason := _split_heads(workload):
        return reason
    columns = -(-workload.seqlen_k // int(config["tile_n"]))
    if int(config["num_splits"]) > columns:
        return f"{columns} tiles of keys cannot be split {config['num_splits']} ways"
    return ""


def _does_not_fit(config: Config, workload: Workload) -> str:
    tile_n = int(config["tile_n"])
    if tile_n % 32 or tile_n > 256:
        return f"tile_n {tile_n} is not a multiple of 32 up to 256: exp2 works on 32 columns, an MMA on up to 256"
    columns = tiles.tmem_columns(config, workload)
    if columns > tiles.TMEM_COLUMNS:
        return f"takes {columns} columns of tensor memory and {tiles.TMEM_COLUMNS} exist"
    softmax, correction, other = tiles.forward_registers(config)
    if softmax < tiles.LAUNCH_REGISTERS or min(correction, other) < tiles.FEWEST_REGISTERS:
        return (
            f"num_regs {config['num_regs']} leaves {other} registers to a thread that loads; setmaxnreg raises softmax "
            f"from {tiles.LAUNCH_REGISTERS} and lowers the others to no less than {tiles.FEWEST_REGISTERS}"
        )
    fit = tiles.kv_stages_that_fit(config, workload)
    if fit < 2:
        return f"{fit} stages of K and V fit beside Q and O, and a K waits for no V with 2 at least"
    if config["kv_stage"] and int(config["kv_stage"]) >= fit:
        return f"{fit} stages of K and V fit: kv_stage={config['kv_stage']} is no other kernel than kv_stage=0"
    smem = tiles.smem_bytes(config, workload)
    if smem > tiles.SMEM_LIMIT_BYTES:
        return f"takes {smem} bytes of shared memory and {tiles.SMEM_LIMIT_BYTES} exist: the launch would fail"
    return ""
