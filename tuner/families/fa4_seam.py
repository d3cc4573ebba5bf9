"""Putting something else in FA4's place for the length of a call, where it takes no argument for it.

Entered for every call that is timed, so everything is made before: entering sets some attributes, no more.
"""

from __future__ import annotations

from typing import Any


class Swapped:
    """A with-block, to be entered any number of times, in which attributes have other values.

    ``changes`` are the owner (a module or function), the attribute's name and its value.
    """

    def __init__(self, *changes: tuple[Any, str, Any]) -> None:
        self._changes = changes
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before = [getattr(owner, name) for owner, name, _ in self._changes]
        for owner, name, value in self._changes:
            setattr(owner, name, value)

    def __exit__(self, *_: object) -> None:
        for (owner, name, _value), before in zip(self._changes, self._before, strict=True):
            setattr(owner, name, before)
