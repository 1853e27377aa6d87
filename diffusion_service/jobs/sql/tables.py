"""The tables of the job store as the newest migration leaves them. Pure.

A job is its `document`; the columns beside it are what queries need, and repeat it.
"""

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text, false, text

METADATA = MetaData()
_REVISION = BigInteger().with_variant(Integer, "sqlite")


def _where_given(name: str) -> Index:
    """An index of the few rows in which that column has a value; the many others never stand in its way."""
    given = text(f"{name} IS NOT NULL")
    return Index(f"ix_jobs_{name}", name, sqlite_where=given, postgresql_where=given)


JOBS = Table(
    "jobs",
    METADATA,
    Column("sequence", Integer, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("status", String(16), nullable=False),
    Column("expires_at", Float, nullable=True, index=True),
    Column("document", Text, nullable=False),
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
    Index("ix_jobs_queue", "status", "priority", "sequence"),
    Index("ix_jobs_of_key", "key", "sequence"),
    *(_where_given(name) for name in ("owner", "lease_until", "idempotency_key", "digest", "webhook_due")),
    # Without it SQLite gives the number of a removed job away again.
    sqlite_autoincrement=True,
)

EVENTS = Table(
    "job_events",
    METADATA,
    Column("revision", _REVISION, primary_key=True, autoincrement=True),
    Column("job_id", String(64), nullable=False),
    Column("at", Float, nullable=False),
    Column("status", String(16), nullable=False),
    Column("phase", String(16), nullable=False),
    Column("progress", Integer, nullable=False),
    Index("ix_job_events_of_job", "job_id", "revision"),
    sqlite_autoincrement=True,
)
