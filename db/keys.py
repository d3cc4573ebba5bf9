"""API keys: made, found by what a request carries, revoked. Only the SHA-256 of a key is kept."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select, update

from db.models import ApiKeyModel
from db.session import Database
from db.values import SCOPES, ApiKey
from tuner.errors import InputError, NotFound, StorageError

_PREFIX = "ft_"
_TOUCH_EVERY = timedelta(minutes=1)  # last_used_at is for people: no write on every request


class Keys:
    """The API keys of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, scopes: Sequence[str], rate_per_minute: int | None = None) -> tuple[ApiKey, str]:
        """Make a key; return it and its text, which cannot be had again.

        Raises:
            InputError: for an unknown scope, an empty name or an impossible rate.
        """
        if not name.strip() or len(name) > 100 or not name.isprintable():
            raise InputError(f"key name {name[:60]!r} is no printable text of 1 to 100 characters")
        unknown = [s for s in scopes if s not in SCOPES]
        if unknown or not scopes:
            raise InputError(f"scope {unknown[0] if unknown else ''!r} does not exist; give one of {', '.join(SCOPES)}")
        if rate_per_minute is not None and not 1 <= rate_per_minute <= 1_000_000:
            raise InputError(f"rate_per_minute is {rate_per_minute}; it must be from 1 to 1000000")
        text = _PREFIX + secrets.token_urlsafe(32)
        row = ApiKeyModel(
            id=uuid.uuid4().hex[:12],
            name=name,
            prefix=text[:8],
            sha256=_digest(text),
            scopes=sorted(set(scopes), key=SCOPES.index),
            rate_per_minute=rate_per_minute,
            created_at=datetime.now(UTC),
        )
        with self._database.write() as session:
            session.add(row)
            session.flush()
            return _value(row), text

    def find(self, text: str) -> ApiKey | None:
        """Return the key with this text; None if there is none, or it is revoked."""
        if not is_key(text):
            return None
        with self._database.read() as session:
            row = session.scalar(select(ApiKeyModel).where(ApiKeyModel.sha256 == _digest(text)))
            found = _value(row) if row is not None and row.revoked_at is None else None
        if found is not None:
            self._touch(found)
        return found

    def list(self) -> list[ApiKey]:
        """Return every key, revoked ones too, the oldest first."""
        with self._database.read() as session:
            rows = session.scalars(select(ApiKeyModel).order_by(ApiKeyModel.created_at, ApiKeyModel.id))
            return [_value(row) for row in rows]

    def any(self) -> bool:
        """Tell whether a key exists that is not revoked."""
        with self._database.read() as session:
            live = select(func.count()).select_from(ApiKeyModel).where(ApiKeyModel.revoked_at.is_(None))
            return bool(session.scalar(live))

    def revoke(self, ref: str) -> ApiKey:
        """Revoke the key with this id, name or beginning of an id; a revoked one stays so.

        Of several, the one that is not revoked yet is meant: keys of one name follow each other.

        Raises:
            NotFound: if there is none, or more than one.
        """
        with self._database.write() as session:
            match = (ApiKeyModel.id.startswith(ref, autoescape=True)) | (ApiKeyModel.name == ref)
            rows = session.scalars(select(ApiKeyModel).where(match)).all() if ref.isprintable() and ref else []
            if len(rows) > 1:
                rows = [row for row in rows if row.revoked_at is None]
            if len(rows) != 1:
                raise NotFound(f"{len(rows) or 'no'} API keys are {ref!r}; see `flashtune keys list`")
            rows[0].revoked_at = rows[0].revoked_at or datetime.now(UTC)
            return _value(rows[0])

    def _touch(self, key: ApiKey) -> None:
        now = datetime.now(UTC)
        if key.last_used_at is None or now - key.last_used_at > _TOUCH_EVERY:
            used = update(ApiKeyModel).where(ApiKeyModel.id == key.id).values(last_used_at=now)
            # a valid key stays one where this cannot be written now
            with contextlib.suppress(StorageError), self._database.write_soft() as connection:
                connection.execute(used)


def is_key(text: str) -> bool:
    """Tell whether a text can be a key at all, without asking the database."""
    return re.fullmatch(_PREFIX + "[A-Za-z0-9_-]{43}", text) is not None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _value(row: ApiKeyModel) -> ApiKey:
    return ApiKey(
        id=row.id,
        name=row.name,
        prefix=row.prefix,
        scopes=tuple(s for s in row.scopes if s in SCOPES),  # a scope of an older version says nothing
        rate_per_minute=row.rate_per_minute,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
    )
