"""Jobs, work with leases, events, workers, keys, artifacts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_UTC = sa.DateTime(timezone=True)
_STUDY_COLUMNS = (
    ("class_key", sa.String(80), sa.text("''")),
    ("compile_key", sa.String(80), sa.text("''")),
    ("wanted", sa.Boolean, sa.false()),
    ("priority", sa.Integer, "0"),
    ("served_s", sa.Float, "0"),
    ("planned", sa.Integer, "0"),
)


def upgrade() -> None:
    for name, kind, default in _STUDY_COLUMNS:
        op.add_column("studies", sa.Column(name, kind, nullable=False, server_default=default))
    op.add_column("trials", sa.Column("worker_id", sa.String(32)))
    op.add_column("trials", sa.Column("default_us", sa.Float))
    _create_jobs()
    _create_work()
    _create_events()
    _create_fleet()
    _create_keys()


def downgrade() -> None:
    for table in (
        "artifacts",
        "idempotency_keys",
        "api_keys",
        "workers",
        "outbox",
        "events",
        "work",
        "job_items",
        "jobs",
    ):
        op.drop_table(table)
    op.drop_column("trials", "default_us")
    op.drop_column("trials", "worker_id")
    for name, _, _ in reversed(_STUDY_COLUMNS):
        op.drop_column("studies", name)


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("base_s", sa.Float, nullable=False),
        sa.Column("created_at", _UTC, nullable=False),
        sa.Column("updated_at", _UTC, nullable=False),
        sa.Column("finished_at", _UTC),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.create_index("ix_jobs_created_at", "jobs", ["created_at"])
    op.create_table(
        "job_items",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("job_id", sa.String(12), nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("workload", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("study_id", sa.String(12)),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("known", sa.Boolean, nullable=False),
        sa.Column("updated_at", _UTC, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_job_items"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_items_job_id"),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name="fk_job_items_study_id"),
        sa.UniqueConstraint("job_id", "position", name="uq_job_items_job_id_position"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_job_items_state", "job_items", ["state"])
    op.create_index("ix_job_items_study_id", "job_items", ["study_id"])


def _create_work() -> None:
    op.create_table(
        "work",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("study_id", sa.String(12), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("config_key", sa.Text, nullable=False),
        sa.Column("config", sa.JSON),
        sa.Column("stage", sa.String(8), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("lease_until", sa.Float, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("begun", sa.Boolean, nullable=False),
        sa.Column("deaths", sa.Integer, nullable=False),
        sa.Column("worker_id", sa.String(32)),
        sa.Column("compiled", sa.JSON),
        sa.Column("busy_s", sa.Float, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_work"),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name="fk_work_study_id"),
        sa.UniqueConstraint("study_id", "kind", "config_key", name="uq_work_study_id_kind_config_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_work_ready", "work", ["study_id", "stage", "state", "rank", "id"])
    op.create_index("ix_work_lease", "work", ["state", "lease_until"])
    op.create_index("ix_work_worker_id", "work", ["worker_id", "state"])


def _create_events() -> None:
    # A reader must not pass a transaction that is still under way: on PostgreSQL each event carries its own.
    postgresql = op.get_bind().dialect.name == "postgresql"
    xid = sa.text("(pg_current_xact_id()::text::bigint)") if postgresql else sa.text("0")
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("xid", sa.BigInteger, nullable=False, server_default=xid),
        sa.Column("job_id", sa.String(12), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("at", _UTC, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job_id_xid_id", "events", ["job_id", "xid", "id"])
    op.create_index("ix_events_xid_id", "events", ["xid", "id"])
    op.create_table(
        "outbox",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("ref", sa.Text, nullable=False),
        sa.Column("created_at", _UTC, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sqlite_autoincrement=True,
    )


def _create_fleet() -> None:
    op.create_table(
        "workers",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("roles", sa.JSON, nullable=False),
        sa.Column("class_key", sa.String(80), nullable=False),
        sa.Column("compile_key", sa.String(80), nullable=False),
        sa.Column("target", sa.JSON),
        sa.Column("toolchain", sa.JSON, nullable=False),
        sa.Column("doing", sa.Text, nullable=False),
        sa.Column("started_at", _UTC, nullable=False),
        sa.Column("heartbeat_at", _UTC, nullable=False),
        sa.Column("stopped_at", _UTC),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    op.create_index("ix_workers_heartbeat_at", "workers", ["heartbeat_at"])
    op.create_table(
        "artifacts",
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.Column("created_at", _UTC, nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_artifacts"),
    )


def _create_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("prefix", sa.String(12), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("rate_per_minute", sa.Integer),
        sa.Column("created_at", _UTC, nullable=False),
        sa.Column("last_used_at", _UTC),
        sa.Column("revoked_at", _UTC),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("sha256", name="uq_api_keys_sha256"),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("body_hash", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(12), nullable=False),
        sa.Column("created_at", _UTC, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_idempotency_keys"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_idempotency_keys_job_id"),
    )
    op.create_index("ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"])
