"""The kernel families: one implementation line each, with its own tunables.

A registry of ``module:object`` strings, imported on demand, so that listing families costs
nothing. Add a family by writing one module and one line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache

from tuner.errors import ConfigError
from tuner.families.base import KernelFamily
from tuner.target import Target
from tuner.workload import Workload

# In the order of preference as the default: the first that can compute a workload on a target is
# what "PyTorch ships" there, and what everything else must beat.
REGISTRY: dict[str, str] = {
    "flex_flash_stock": "tuner.families.flex_stock:FLASH",
    "flex_flash_sm100_stock": "tuner.families.flex_stock:FLASH_SM100",
    "flex_triton_stock": "tuner.families.flex_stock:TRITON",
    "torch_varlen": "tuner.families.torch_varlen:FAMILY",
    "cudnn": "tuner.families.sdpa:CUDNN",
    "fa4_fwd_sm90": "tuner.families.fa4_fwd_sm90:FAMILY",
    "fa4_bwd_sm90": "tuner.families.fa4_bwd_sm90:FAMILY",
    "fa4_fwd_sm100": "tuner.families.fa4_fwd_sm100:FAMILY",
    "fa4_bwd_sm100": "tuner.families.fa4_bwd_sm100:FAMILY",
    "fa4_joint_sm90": "tuner.families.fa4_joint_sm90:FAMILY",
    "fa4_joint_sm100": "tuner.families.fa4_joint_sm100:FAMILY",
    "flex_triton_autotune": "tuner.families.flex_stock:TRITON_AUTOTUNE",
    "flex_triton": "tuner.families.flex_triton:FAMILY",
    "flex_cpu": "tuner.families.flex_cpu:FAMILY",
    "sdpa_cpu": "tuner.families.sdpa:CPU",
    "fake": "tuner.families.fake:FAMILY",
}

# Compete only where no other family has anything to tune, or if named. Triton's compiles on the GPU, one
# config after the other at about ten seconds each, and FA4's kernels beat it 1.2 to 3 times where they run.
SECOND_CHOICE = ("flex_triton",)

# Compete only if named: torch.compile compiles and times many candidates for each workload.
ONLY_NAMED = ("flex_triton_autotune",)

# Never compete unless named: the instruments of honesty checks.
INSTRUMENTS: dict[str, str] = {
    "decoy": "tuner.families.decoy:FAMILY",
    "decoy_bwd": "tuner.families.decoy:BACKWARD",
}


@cache
def load(name: str) -> KernelFamily:
    """Return a family by name.

    Raises:
        ConfigError: if no family has this name.
    """
    known = REGISTRY | INSTRUMENTS
    if name not in known:
        raise ConfigError(f"unknown kernel family {name!r}; known: {', '.join(REGISTRY)}")
    module, _, attribute = known[name].partition(":")
    family: KernelFamily = getattr(importlib.import_module(module), attribute)
    return family


def able(workload: Workload, target: Target, only: Sequence[str] = ()) -> tuple[list[KernelFamily], dict[str, str]]:
    """Return the families that can compute ``workload`` on ``target``, and why the others cannot.

    ``only`` names the families to consider, in the order of REGISTRY whatever theirs; empty means all.

    Raises:
        ConfigError: if ``only`` names an unknown family.
    """
    can, refused = [], {}
    usual = [n for n in REGISTRY if (n in only if only else n not in ONLY_NAMED)]
    for name in usual + [n for n in only if n not in REGISTRY]:
        family = load(name)
        reason = family.refuses(workload, target)
        if reason:
            refused[name] = reason
        else:
            can.append(family)
    first = [f.name for f in can if f.name not in SECOND_CHOICE and f.space(workload)]
    if first and not only:
        refused |= {
            f.name: f"competes only if named where {' and '.join(first)} can" for f in can if f.name in SECOND_CHOICE
        }
        can = [f for f in can if f.name not in SECOND_CHOICE]
    return can, refused
