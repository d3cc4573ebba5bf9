"""What nobody read is gone, the outbox and work's error; old compiled objects can be found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("outbox")
    op.drop_column("work", "error")
    op.create_index("ix_artifacts_created_at", "artifacts", ["created_at"])


def downgrade() -> None:
    op.drop_index("ix_artifacts_created_at", "artifacts")
    op.add_column("work", sa.Column("error", sa.Text, nullable=False, server_default=""))
    op.create_table(
        "outbox",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("ref", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sqlite_autoincrement=True,
    )
