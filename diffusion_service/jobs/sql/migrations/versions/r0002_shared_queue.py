"""What several services need to share a queue, the history of jobs, and what makes a repeated request known."""

import json

from alembic import op
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    String,
    Text,
    column,
    false,
    insert,
    select,
    table,
    text,
    update,
)

revision = "0002"
down_revision = "0001"

_REVISION = BigInteger().with_variant(Integer, "sqlite")
_JOBS = table("jobs", *map(column, ("sequence", "revision", "accepted_at", "owner", "lease_until", "document")))
_EVENTS = table("job_events", *map(column, ("revision", "job_id", "at", "status", "phase", "progress")))
_GONE = "before"
"""Owner of what was under way when the old program stopped; its lease is over."""


def upgrade() -> None:
    """Add columns, indices and the history, which begins with every job as it is now."""
    _add_columns()
    _add_indices()
    op.create_table(
        "job_events",
        Column("revision", _REVISION, primary_key=True, autoincrement=True),
        Column("job_id", String(64), nullable=False),
        Column("at", Float, nullable=False),
        Column("status", String(16), nullable=False),
        Column("phase", String(16), nullable=False),
        Column("progress", Integer, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_job_events_of_job", "job_events", ["job_id", "revision"])
    _fill(op.get_bind())


def _add_columns() -> None:
    for added in (
        Column("revision", _REVISION, nullable=False, server_default=text("0")),
        Column("priority", Integer, nullable=False, server_default=text("0")),
        Column("key", Text, nullable=True),
        Column("owner", String(64), nullable=True),
        Column("lease_until", Float, nullable=True),
        Column("cancel_requested", Boolean, nullable=False, server_default=false()),
        Column("idempotency_key", Text, nullable=True),
        Column("digest", String(64), nullable=True),
        Column("accepted_at", Float, nullable=False, server_default=text("0")),
        Column("webhook_due", Float, nullable=True),
    ):
        op.add_column("jobs", added)


def _add_indices() -> None:
    op.drop_index("ix_jobs_status", "jobs")
    op.create_index("ix_jobs_queue", "jobs", ["status", "priority", "sequence"])
    op.create_index("ix_jobs_of_key", "jobs", ["key", "sequence"])
    for name in ("owner", "lease_until", "idempotency_key", "digest", "webhook_due"):
        given = text(f"{name} IS NOT NULL")
        op.create_index(f"ix_jobs_{name}", "jobs", [name], sqlite_where=given, postgresql_where=given)


def _fill(connection: Connection) -> None:
    for sequence, document in connection.execute(select(_JOBS.c.sequence, _JOBS.c.document)).all():
        job = json.loads(document)
        line = {"job_id": job["id"], "at": job["completed_at"] or job["started_at"] or job["created_at"]}
        line |= {name: job[name] for name in ("status", "phase", "progress")}
        revision: int = connection.execute(insert(_EVENTS).values(line).returning(_EVENTS.c.revision)).scalar_one()
        given = {"revision": revision, "accepted_at": job["created_at"]}
        if job["status"] == "in_progress":
            given |= {"owner": _GONE, "lease_until": 0.0, "document": json.dumps({**job, "owner": _GONE})}
        connection.execute(update(_JOBS).where(_JOBS.c.sequence == sequence).values(given))
