"""FA4's caches of compiled kernels, put where they say what was compiled and where the objects lie.

FA4 keeps one cache on each function that compiles: ``fwd`` and what puts its splits together
(``fwd_combine``), ``bwd``, and the kernels before and after it (``bwd_pre``, ``bwd_post``). Calls with many
packed sequences first run kernels that say which block works on which (``SCHEDULING``). Those that
hold kernels with FA4's own choices lie where FA4 itself looks in the folder that children get; kernels
that its compile key cannot tell apart lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flash_attn.cute import interface
from flash_attn.cute.cache_utils import JITPersistentCache, _compute_source_fingerprint

compiled_here: list[str] = []  # hashes of kernels that this process compiled, not loaded

SCHEDULING = ("tile_cumsum", "blocks_to_batch")

# The functions that hold a cache, by the name of its folder.
HOLDERS: dict[str, Any] = {
    "fwd": interface._flash_attn_fwd,
    "fwd_combine": interface._flash_attn_fwd_combine,
    "bwd": interface._flash_attn_bwd,
    "bwd_pre": interface._bwd_preprocess,
    "bwd_post": interface._bwd_postprocess_convert,
    "tile_cumsum": interface._compute_tile_cumsum,
    "blocks_to_batch": interface._compute_blocks_to_batch,
}


class Cache(JITPersistentCache):  # type: ignore[misc]
    """FA4's disk cache, which also notes what was compiled. FA4 asks it in every call: keep it that quick."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[Path] = []  # objects that calls needed, where nothing is loaded

    def __setitem__(self, key: Any, fn: Any) -> None:
        compiled_here.append(self._key_to_hash(key))
        super().__setitem__(key, fn)


class Objects(Cache):
    """The cache where nothing runs: an object on disk is enough, and loading one needs a driver.

    One that only memory holds is not: it is the file that travels to the machines that measure.
    """

    def __contains__(self, key: Any) -> bool:
        path = self.cache_path / f"{self._key_to_hash(key)}.o"
        self.asked.append(path)
        there: bool = path.exists() and path.stat().st_size > 0
        return there


_caches: dict[tuple[Path, bool], Cache] = {}


def cache(path: Path, load: bool) -> Cache:
    """Return this process's cache of a folder; without ``load`` objects are files and never run."""
    if (path, load) not in _caches:
        _caches[path, load] = Cache(path) if load else Objects(path)
    return _caches[path, load]


def shipped(cache_dir: Path, name: str) -> Path:
    """Where FA4 itself keeps the kernels of one holder, given the cache folder that children get."""
    return cache_dir / "fa4" / "shipped" / fingerprint() / name


def own(cache_dir: Path, name: str) -> Path:
    """Where kernels lie that FA4's compile key does not tell from its own."""
    return cache_dir / "fa4" / name / fingerprint()


def fingerprint() -> str:
    """Return FA4's digest of its sources and of the versions that its objects depend on."""
    return str(_compute_source_fingerprint())


def note_compiles(cache_dir: Path) -> None:
    """Put noting caches in the place of FA4's own, for stock calls and FlexAttention's FLASH backend."""
    for name, holder in HOLDERS.items():
        holder.compile_cache = cache(shipped(cache_dir, name), load=True)


@contextmanager
def scheduling_objects(cache_dir: Path) -> Iterator[list[Path]]:
    """Compile scheduling kernels to files inside the with-block; the list has those that calls needed."""
    before = {name: HOLDERS[name].compile_cache for name in SCHEDULING}
    caches = [cache(shipped(cache_dir, name), load=False) for name in SCHEDULING]
    needed: list[Path] = []
    for name, its in zip(SCHEDULING, caches, strict=True):
        its.asked.clear()
        HOLDERS[name].compile_cache = its
    try:
        yield needed
    finally:
        needed += [path for its in caches for path in its.asked]
        for name, its in before.items():
            HOLDERS[name].compile_cache = its
