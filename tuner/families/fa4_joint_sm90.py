"""FlashAttention-4's forward and backward on Hopper, tuned together for training.

The tunables are those of ``fa4_fwd_sm90`` and ``fa4_bwd_sm90`` under ``fwd_`` and ``bwd_``. Searched are the
tiles and register flags of the forward, and the tiles and stages of the backward in each of the
layouts of its five products that its family tries first.
"""

from __future__ import annotations

from tuner.families import load
from tuner.families.joint import Direction, Joint

_FORWARD_FREE = frozenset({"tile_m", "tile_n", "mma_pv_is_rs", "intra_wg_overlap"})
_BACKWARD_FREE = frozenset({"m_block_size", "n_block_size", "num_stages_Q", "num_stages_dO", "num_stages_PdS"})

FAMILY = Joint(
    "fa4_joint_sm90",
    "sm_90a",
    Direction("fwd", load("fa4_fwd_sm90"), _FORWARD_FREE),
    Direction("bwd", load("fa4_bwd_sm90"), _BACKWARD_FREE),
)
