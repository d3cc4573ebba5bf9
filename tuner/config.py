"""One point of a family's tunables, frozen, with a canonical key.

A config without parameters is the family's stock behaviour: the call that a user makes who tunes
nothing.

    >>> Config.make("fa4_fwd_sm90", 1, tile_m=128, tile_n=96, mma_pv_is_rs=True).key
    'fa4_fwd_sm90/1:mma_pv_is_rs=1,tile_m=128,tile_n=96'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.errors import ConfigError

Param = int | str | bool

DIRECTIONS = ("fwd", "bwd")  # before the names of tunables, where a config holds those of both

_PAIRS = (
    ("tile_m", "tile_n"),
    ("m_block_size", "n_block_size"),
    ("BLOCK_M", "BLOCK_N"),
    ("BLOCK_M1", "BLOCK_N1"),
    ("BLOCK_M2", "BLOCK_N2"),
    ("q_block", "kv_block"),
)
_UNSAID = (
    ("q_blocks", 1),
    ("kv_blocks", 1),
    ("num_wg", 2),
    ("kv_stage", 0),
    ("num_splits", 1),
    ("dQ_reduce_ncol", 0),
)
_SHORT = {
    "mma_pv_is_rs": "rs",
    "intra_wg_overlap": "overlap",
    "num_stages": "stages",
    "num_warps": "warps",
    "two_cta": "2cta",
    "use_clc_scheduler": "clc",
    "num_splits": "splits",
    "ex2_emu_freq": "ex2",
    "num_regs": "regs",
    "num_stages_Q": "Q",
    "num_stages_dO": "dO",
    "num_stages_PdS": "PdS",
    "AtomLayoutMSdP": "MSdP",
    "AtomLayoutNdKV": "NdKV",
    "AtomLayoutMdQ": "MdQ",
    "num_wg": "wg",
}


@dataclass(frozen=True)
class Config:
    """A family's name and version with its parameters, sorted by name."""

    family: str
    version: int
    params: tuple[tuple[str, Param], ...] = ()

    @classmethod
    def make(cls, family: str, version: int, **params: Param) -> Config:
        """Build a config; raises ConfigError for a value that has no canonical text."""
        for name, value in params.items():
            # a word that reads as a number would share its key with that number
            word = isinstance(value, str) and re.fullmatch(r"(?!-?\d+$)[\w.\-]+", value)
            if not name.isidentifier() or not (isinstance(value, int) or word):
                raise ConfigError(f"{family} parameter {name}={value!r} has no canonical form; use int, bool or a word")
        return cls(family, version, tuple(sorted(params.items())))

    @property
    def key(self) -> str:
        inside = ",".join(f"{k}={int(v) if isinstance(v, bool) else v}" for k, v in self.params)
        return f"{self.family}/{self.version}:{inside}"

    @property
    def is_stock(self) -> bool:
        return not self.params

    @property
    def label(self) -> str:
        """Short text for tables, as ``128x96 native rs stages=2``; ``stock`` without parameters."""
        params, words = dict(self.params), []
        for direction in DIRECTIONS:
            start = f"{direction}_"
            mine = {name.removeprefix(start): params.pop(name) for name in list(params) if name.startswith(start)}
            words += [direction, *_words(mine)] if mine else []
        return " ".join([*_words(params), *words]) or "stock"

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.params).get(name, default)

    def __getitem__(self, name: str) -> Param:
        return dict(self.params)[name]

    def to_dict(self) -> dict[str, Any]:
        return {"family": self.family, "version": self.version, "params": dict(self.params)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        try:
            return cls.make(values["family"], values["version"], **values["params"])
        except (KeyError, TypeError) as e:
            raise ConfigError(f"not a config: {values!r} ({e})") from None


def _words(params: dict[str, Param]) -> list[str]:
    """Return the words of a label; takes the parameters that it names in pairs out of ``params``."""
    words = [f"{params.pop(a)}x{params.pop(b)}" for a, b in _PAIRS if a in params and b in params]
    for name, value in params.items():
        if value is True:
            words.append(_SHORT.get(name, name))
        elif isinstance(value, str):
            words.append(f"{_SHORT[name]}={value}" if name in _SHORT else value)
        elif value is not False and (name, value) not in _UNSAID:
            words.append(f"{_SHORT.get(name, name)}={value}")
    return words
