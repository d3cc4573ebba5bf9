"""What the tests of Hopper's kernels share: the GPU, a folder of compiled kernels, the child that owns the GPU.

Each module makes its own ``pool``, which begins with all that the module will ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.compile import CompilePool
from tuner.sandbox import Sandbox
from tuner.target import Target, probe


@pytest.fixture(scope="module")
def target() -> Target:
    target = probe("cuda")
    if target.arch != "sm_90a":
        pytest.skip(f"needs a Hopper GPU, this is {target.arch}")
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="module")
def sandbox(target: Target, pool: CompilePool, folder: Path) -> Iterator[Sandbox]:
    with Sandbox(target, folder, visible_devices=target.uuid) as sandbox:
        yield sandbox
