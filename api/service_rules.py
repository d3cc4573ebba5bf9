"""What asking over HTTP and asking the database share: patience."""

from __future__ import annotations

import random
import time

from tuner.errors import Unavailable

FOLLOW_S = 120.0  # how long following a job outlasts a service that is away: restarts and failovers are shorter


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
