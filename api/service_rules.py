"""What asking over HTTP and asking the database share: patience, and how ids and keys are spelt."""

from __future__ import annotations

import random
import re
import time

from db.values import JobState
from tuner.errors import InputError, NotFound, Unavailable

FOLLOW_S = 120.0  # how long following a job outlasts a service that is away: restarts and failovers are shorter
_LAST_KINDS = frozenset(str(s) for s in JobState if s.ended)  # the kind of a job's last event


class Patience:
    """Waits between tries, longer each time, until nothing but failure came for ``for_s`` seconds.

    Where the other side says how long to wait, it is given ``told_s`` seconds in all.
    """

    def __init__(self, for_s: float, told_s: float = 60.0) -> None:
        self._for_s, self._told_s = for_s, max(for_s, told_s)
        self.renew()

    def renew(self) -> None:
        """Begin anew after a success."""
        self._since, self._pause_s = time.monotonic(), 0.1

    def wait(self, error: Unavailable, told_s: float | None = None) -> None:
        """Sleep before the next try; ``told_s`` is what the other side asked for. Raises ``error`` if that is too long.

        The pause is drawn at random, so that clients cut off together do not come back together.
        """
        pause_s = self._pause_s * random.uniform(0.5, 1.0) if told_s is None else told_s
        if time.monotonic() - self._since + pause_s > (self._for_s if told_s is None else self._told_s):
            raise error
        time.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, 5.0)


def checked_ref(ref: str) -> str:
    """Return a job's id, or its beginning, in its one spelling. Raises NotFound if it can be none."""
    wanted = ref.strip().lower()
    if not re.fullmatch(r"[0-9a-f]{1,12}", wanted):
        raise NotFound(f"{ref!r:.60} is no job id (up to 12 hexadecimal digits); see `flashtune jobs`")
    return wanted


def checked_key(key: str) -> str:
    """Return an Idempotency-Key that fits into an HTTP header. Raises InputError."""
    if not re.fullmatch(r"[!-~]{1,255}", key):
        raise InputError(
            f"idempotency key {key!r:.60} is no text of 1 to 255 printable ASCII characters without blanks"
        )
    return key


def is_last(kind: str) -> bool:
    """Tell whether no event of a job follows one of this kind."""
    return kind in _LAST_KINDS
