"""What a config puts in FA4's place is there inside the block, and FA4 is as it was after it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tuner.families.fa4_seam import Swapped


def test_a_block_can_be_entered_again_and_always_leaves_what_was_there() -> None:
    owner = SimpleNamespace(stages=2, tile=128)
    seam = Swapped((owner, "stages", 1), (owner, "tile", 64))
    for before in (2, 3):
        owner.stages = before
        with seam:
            assert (owner.stages, owner.tile) == (1, 64)
        assert (owner.stages, owner.tile) == (before, 128)
    with pytest.raises(ZeroDivisionError), seam:
        owner.stages = 1 // 0
    assert (owner.stages, owner.tile) == (3, 128)
