"""One compiled object as it travels from the machine that compiled it to those that measure.

Says which bytes go where; ``workers.artifacts`` moves them.

    >>> Artifact.of("fa4/stages2/k.o", b"abc").sha256[:8]
    'ba7816bf'
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from tuner.errors import InputError


def check_name(name: str) -> None:
    """Raise InputError unless ``name`` is a plain relative path, written in the one way there is to write it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise InputError(f"artifact name {name!r} leaves the folder of compiled objects; give a relative path")
    if not path.parts or str(path) != name or not name.isprintable():
        raise InputError(f"artifact name {name!r} is not the plain relative path of a file, as fa4/stages2/k.o is")


@dataclass(frozen=True)
class Artifact:
    """``name`` is a POSIX path relative to the folder of compiled objects; ``sha256`` is of the content."""

    name: str
    sha256: str
    size_bytes: int

    def __post_init__(self) -> None:
        check_name(self.name)
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise InputError(f"artifact {self.name}: {self.sha256!r} is no SHA-256 in hexadecimal digits")
        if self.size_bytes < 0:
            raise InputError(f"artifact {self.name}: size is {self.size_bytes}; it cannot be negative")

    @classmethod
    def of(cls, name: str, data: bytes) -> Artifact:
        """Return the artifact that ``data`` is."""
        return cls(name, hashlib.sha256(data).hexdigest(), len(data))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, v: Mapping[str, Any]) -> Artifact:
        return cls(str(v["name"]), str(v["sha256"]), int(v["size_bytes"]))
