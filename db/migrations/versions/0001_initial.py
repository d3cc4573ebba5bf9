"""Studies, their trials, and the published configs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_UTC = sa.DateTime(timezone=True)


def upgrade() -> None:
    _create_studies()
    _create_trials()
    _create_tuned_configs()


def downgrade() -> None:
    for table in ("tuned_configs", "trials", "studies"):
        op.drop_table(table)


def _create_studies() -> None:
    op.create_table(
        "studies",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("spec_key_hash", sa.String(64), nullable=False),
        sa.Column("run", sa.Integer, nullable=False),
        sa.Column("workload", sa.JSON, nullable=False),
        sa.Column("workload_key", sa.Text, nullable=False),
        sa.Column("target", sa.JSON, nullable=False),
        sa.Column("target_key", sa.Text, nullable=False),
        sa.Column("toolchain", sa.JSON, nullable=False),
        sa.Column("toolchain_key", sa.Text, nullable=False),
        sa.Column("policy", sa.String(16), nullable=False),
        sa.Column("families", sa.JSON, nullable=False),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at", _UTC, nullable=False),
        sa.Column("updated_at", _UTC, nullable=False),
        sa.Column("finished_at", _UTC),
        sa.Column("stats", sa.JSON),
        sa.PrimaryKeyConstraint("id", name="pk_studies"),
        sa.UniqueConstraint("spec_key_hash", "run", name="uq_studies_spec_key_hash_run"),
    )
    op.create_index("ix_studies_spec_key_hash", "studies", ["spec_key_hash"])
    op.create_index("ix_studies_created_at", "studies", ["created_at"])


def _create_trials() -> None:
    op.create_table(
        "trials",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("study_id", sa.String(12), nullable=False),
        sa.Column("config_key", sa.Text, nullable=False),
        sa.Column("family", sa.Text, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("trial", sa.JSON, nullable=False),
        sa.Column("ratio", sa.Float),
        sa.Column("created_at", _UTC, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_trials"),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name="fk_trials_study_id"),
        sa.UniqueConstraint("study_id", "config_key", name="uq_trials_study_id_config_key"),
        sqlite_autoincrement=True,
    )


def _create_tuned_configs() -> None:
    op.create_table(
        "tuned_configs",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("study_id", sa.String(12), nullable=False),
        sa.Column("answer_hash", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("workload_key", sa.Text, nullable=False),
        sa.Column("target_key", sa.Text, nullable=False),
        sa.Column("toolchain_key", sa.Text, nullable=False),
        sa.Column("policy", sa.String(16), nullable=False),
        sa.Column("config_key", sa.Text, nullable=False),
        sa.Column("verdict", sa.String(16), nullable=False),
        sa.Column("tuned", sa.JSON, nullable=False),
        sa.Column("published_at", _UTC, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tuned_configs"),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name="fk_tuned_configs_study_id"),
        sa.UniqueConstraint("study_id", name="uq_tuned_configs_study_id"),
        sa.UniqueConstraint("answer_hash", "version", name="uq_tuned_configs_answer_hash_version"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_tuned_configs_workload_key", "tuned_configs", ["workload_key"], postgresql_using="hash")
