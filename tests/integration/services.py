"""A PostgreSQL schema and a RabbitMQ virtual host of a test's own, made before it and dropped after it."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import URL, create_engine, make_url, text

POSTGRES = os.environ.get("FLASHTUNE_TEST_POSTGRES", "postgresql+psycopg://127.0.0.1:5432/test")


@contextmanager
def empty_schema() -> Iterator[URL]:
    """Give the URL of an empty schema; skip the test where no PostgreSQL answers."""
    base = make_url(POSTGRES)
    admin = create_engine(base, isolation_level="AUTOCOMMIT")
    name = f"flashtune_{uuid.uuid4().hex[:12]}"
    try:
        with admin.connect() as connection:
            connection.execute(text(f"CREATE SCHEMA {name}"))
    except Exception as e:
        pytest.skip(f"no PostgreSQL at {base.render_as_string()}: {e}")
    yield base.update_query_dict({"options": f"-csearch_path={name},pg_catalog"})
    with admin.connect() as connection:
        connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
    admin.dispose()


@contextmanager
def virtual_host(password: str) -> Iterator[str]:
    """Give the name of a user and of a virtual host; skip the test where rabbitmqctl makes none."""
    name = f"flashtune-{uuid.uuid4().hex[:12]}"
    try:
        rabbitmqctl("add_vhost", name)
        rabbitmqctl("add_user", name, password)
        rabbitmqctl("set_permissions", "-p", name, name, ".*", ".*", ".*")
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no RabbitMQ that rabbitmqctl may change: {e}")
    yield name
    rabbitmqctl("delete_vhost", name)
    rabbitmqctl("delete_user", name)


def rabbitmqctl(*arguments: str) -> str:
    """Run rabbitmqctl, and return what it prints."""
    done = subprocess.run(["rabbitmqctl", "--quiet", *arguments], check=True, capture_output=True, text=True)
    return done.stdout
