"""The history of the schema, from the first table on, run by ``upgrade`` and by nothing else.

Alembic finds its scripts beside this file, so that an installed package migrates itself. To add a
revision after a change of ``db.models``, with ``engine`` on a database at the newest revision:

    with engine.begin() as connection:
        alembic.command.revision(config(connection), "what changes", autogenerate=True, rev_id="0002")
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection


def config(connection: Connection) -> Config:
    """Return what Alembic's commands need to work on ``connection``, inside its transaction."""
    made = Config(attributes={"connection": connection})
    # a ConfigParser reads this: percent signs in a path would be taken for its own
    made.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    made.set_main_option("path_separator", "os")
    return made


def revision(connection: Connection) -> str | None:
    """Return the revision that the database is at, or None if it has never been migrated."""
    # several at once are none of ours, and are returned together so that they are known as none
    return ", ".join(MigrationContext.configure(connection).get_current_heads()) or None


def revisions(connection: Connection) -> list[str]:
    """Return every revision that this version of flashtune knows, the newest first."""
    return [script.revision for script in ScriptDirectory.from_config(config(connection)).walk_revisions()]


def upgrade(connection: Connection) -> None:
    """Bring the schema to the newest revision within the caller's transaction."""
    command.upgrade(config(connection), "head")
