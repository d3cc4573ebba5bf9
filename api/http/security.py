"""Who may ask: API keys with scopes, and on loopback the Host header against DNS rebinding.

>>> @router.get("/v1/fleet", dependencies=[needs("read")])  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from api.http.limits import Rates
from api.http.problems import Problem
from db.keys import is_key
from db.store import Store
from db.values import ApiKey

OPEN_PATHS = ("/healthz", "/readyz")
KEY_KNOWN_S = 3.0  # how long a key is believed without asking the database: a revoked one ends by then
_REMEMBERED = 10_000
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_CHALLENGE = {"www-authenticate": 'Bearer realm="flashtune"'}
SCOPE_KEY = "flashtune.key"  # in the ASGI scope: the ApiKey, or None where none is needed


class Guard:
    """Admits requests. Belongs to one event loop; asks the store in threads."""

    def __init__(self, store: Store, *, require_key: bool, loopback: bool, rate_per_minute: int | None) -> None:
        self._store, self._loopback, self._rate = store, loopback, rate_per_minute
        self._always = require_key
        self._keys: OrderedDict[str, tuple[ApiKey | None, float]] = OrderedDict()
        self._any, self._any_until = False, 0.0
        self._rates = Rates()

    async def admit(self, path: str, headers: Mapping[bytes, bytes]) -> ApiKey | None:
        """Return the key of a request; None if none is needed.

        Raises:
            Problem: 400 for a foreign Host, 401 without a valid key, 429 for too many requests.
        """
        if self._loopback and not _LOOPBACK.fullmatch(headers.get(b"host", b"").decode("latin-1")):
            raise Problem(400, "the Host header names another machine; ask for localhost", slug="foreign-host")
        if path in OPEN_PATHS or not await self.required():
            return None
        key = await self.find(_token(headers))
        if key is None:
            detail = "this needs a key: send Authorization: Bearer ft_..., made by `flashtune keys create`"
            raise Problem(401, detail, headers=_CHALLENGE)
        rate = key.rate_per_minute or self._rate
        if rate:
            self._rates.take(key.id, rate)
        return key

    async def required(self) -> bool:
        """Tell whether requests need a key: always beyond loopback, and where one exists."""
        if self._always:
            return True
        if time.monotonic() > self._any_until:
            self._any = await run_in_threadpool(self._store.keys.any)
            self._any_until = time.monotonic() + KEY_KNOWN_S
        return self._any

    async def find(self, text: str) -> ApiKey | None:
        """Return the key with this text, at most KEY_KNOWN_S old; None if unknown or revoked."""
        if not is_key(text):
            return None
        digest = hashlib.sha256(text.encode()).hexdigest()  # so that no secret stays in memory here
        keys = self._keys
        known = keys.get(digest)
        if known is not None and time.monotonic() < known[1]:
            return known[0]
        asked = time.monotonic()  # before the answer: one revoked meanwhile must not live longer
        key = await run_in_threadpool(self._store.keys.find, text)
        keys.pop(digest, None)
        keys[digest] = (key, asked + KEY_KNOWN_S)
        if len(keys) > _REMEMBERED:
            keys.popitem(last=False)
        return key

    async def still_valid(self, headers: Mapping[bytes, bytes]) -> bool:
        """Tell whether a request that was admitted would be admitted now: for long streams."""
        return not await self.required() or await self.find(_token(headers)) is not None

    def forget(self) -> None:
        """Ask the database again: a key was made or revoked here. Any thread may call it."""
        self._keys = OrderedDict()
        self._any_until = 0.0


def needs(scope: str) -> Any:
    """Return a dependency that refuses keys without ``scope`` (403)."""

    async def check(request: Request) -> None:
        key: ApiKey | None = request.scope[SCOPE_KEY]
        if key is not None and not key.allows(scope):
            raise Problem(403, f"this needs a key with scope {scope}; this one has {', '.join(key.scopes)}")

    return Depends(check)


def _token(headers: Mapping[bytes, bytes]) -> str:
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1").strip()
