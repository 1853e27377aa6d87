"""The first table: jobs as documents, for one service."""

from alembic import op
from sqlalchemy import Column, Float, Integer, String, Text

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the table, as `create_all` did before there were steps."""
    op.create_table(
        "jobs",
        Column("sequence", Integer, primary_key=True, autoincrement=True),
        Column("id", String(64), nullable=False, unique=True),
        Column("status", String(16), nullable=False, index=True),
        Column("expires_at", Float, nullable=True, index=True),
        Column("document", Text, nullable=False),
        sqlite_autoincrement=True,
    )
