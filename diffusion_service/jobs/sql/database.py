"""Connections to the job store's database, and what SQLite and PostgreSQL need done differently.

Runs in the diffusion API process, in the store's threads.
"""

from typing import Any

from sqlalchemy import URL, create_engine, event, make_url, text
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from shared_schema.errors import DeployError

THREADS = 4
"""Transactions at once on PostgreSQL; SQLite has one writer."""
HISTORY_LOCK = 0x4D33_0001
"""Held to the end of a transaction that adds a job, claims one or writes history."""
AWAY_S = 10
"""Until a PostgreSQL server that does not answer is away, and until somebody else's lock is not waited for any more."""
WAITS = {
    "connect_timeout": AWAY_S,
    # A host that is gone says nothing: the kernel has to notice.
    "tcp_user_timeout": AWAY_S * 1000,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    # A service that was stopped within a transaction would hold its locks for ever.
    "options": f"-c lock_timeout={AWAY_S}s -c statement_timeout={3 * AWAY_S}s"
    f" -c idle_in_transaction_session_timeout={AWAY_S}s",
}
"""Of every connection to PostgreSQL; what takes longer is an error, and so `StoreUnavailable`."""


def database_url(given: str) -> URL:
    """A URL that names our driver.

    Raises:
        DeployError: it is neither SQLite's nor PostgreSQL's.
    """
    try:
        url = make_url(given)
    except ArgumentError as error:
        raise DeployError("service.database is no URL: use postgresql://user:password@host/name") from error
    match url.get_backend_name():
        case "sqlite":
            return url
        case "postgresql" | "postgres":
            return url.set(drivername="postgresql+psycopg")
        case other:
            raise DeployError(f"service.database: {other} is not served: use postgresql:// or leave it out")


def open_engine(url: URL) -> Engine:
    """An engine whose transactions see and lock what the store expects.

    Raises:
        DeployError: the driver is not installed.
    """
    try:
        if url.get_backend_name() == "sqlite":
            engine = create_engine(url)
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        return create_engine(url, pool_size=THREADS, max_overflow=0, pool_pre_ping=True, connect_args=dict(WAITS))
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise DeployError("service.database: PostgreSQL needs psycopg: pip install 'psycopg[binary]'") from error


def is_shared(engine: Engine) -> bool:
    """Whether other processes write into this database."""
    return engine.dialect.name == "postgresql"


def lock_history(connection: Connection) -> None:
    """Let revisions and sequence numbers be committed in the order in which they are given.

    A reader that has seen one then has seen all before it. Whoever holds this lock waits for no row afterwards.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": HISTORY_LOCK})


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # The driver's own idea of when a transaction begins would leave a read outside of it.
    connection.isolation_level = None
    # A process that is killed loses nothing; a power cut may lose the last changes, never the file.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
