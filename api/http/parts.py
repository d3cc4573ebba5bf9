"""What the routes of one app share."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
from fastapi import Request

from api.http.limits import Streams
from api.http.metrics import Metrics
from api.http.security import Guard
from api.http.winners import Winners
from db.store import Store


@dataclass(frozen=True)
class Parts:
    """One app's store, and what stands around it."""

    store: Store
    guard: Guard
    winners: Winners
    metrics: Metrics = field(default_factory=Metrics)
    streams: Streams = field(default_factory=Streams)
    # Lookups and streams have threads of their own, so that many of them leave some for the other routes.
    lookups: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(2))
    followers: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(8))


def parts_of(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts
