"""FlashAttention-4's forward and backward on Blackwell, tuned together for training.

The tunables are those of ``fa4_fwd_sm100`` and ``fa4_bwd_sm100`` under ``fwd_`` and ``bwd_``. Searched are the
forward's K/V tile, Q tiles and sizes of the BlockMask, and the backward's K/V tile, dQ pieces and sizes of it;
what else there is stays as in one of the configs that each family tries first. Compiled and checked, not
measured yet.
"""

from __future__ import annotations

from tuner.families import load
from tuner.families.joint import Direction, Joint

_FORWARD_FREE = frozenset({"tile_n", "q_stage", "q_blocks", "kv_blocks"})
_BACKWARD_FREE = frozenset({"tile_n", "dQ_reduce_ncol", "q_blocks", "kv_blocks"})

FAMILY = Joint(
    "fa4_joint_sm100",
    "sm_100a",
    Direction("fwd", load("fa4_fwd_sm100"), _FORWARD_FREE),
    Direction("bwd", load("fa4_bwd_sm100"), _BACKWARD_FREE),
)
