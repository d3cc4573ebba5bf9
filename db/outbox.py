"""Messages that wait to be sent: written with what they are about, deleted once the broker has them.

A message may be sent twice, after a crash between sending and deleting; never not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from db.models import OutboxModel
from db.session import Database
from db.values import Bell


class Outbox:
    """The waiting messages of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def pending(self, limit: int = 100) -> list[Bell]:
        """Return up to ``limit`` messages, the oldest first."""
        query = select(OutboxModel).order_by(OutboxModel.id).limit(limit)
        with self._database.read() as session:
            return [Bell(row.id, row.queue, row.ref) for row in session.scalars(query)]

    def sent(self, ids: Sequence[int]) -> None:
        """Forget messages that the broker has confirmed."""
        if ids:
            with self._database.write_soft() as connection:
                connection.execute(delete(OutboxModel).where(OutboxModel.id.in_(ids)))


def put(session: Session, queue: str, ref: str) -> None:
    """Add a message within the caller's transaction."""
    session.add(OutboxModel(queue=queue, ref=ref, created_at=datetime.now(UTC)))
