"""Brings a database to this program's tables, at start. Runs in the diffusion API process before anything else uses it.

Whoever comes first upgrades, under a lock, in one transaction; others wait, and find it done.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext, RevisionStep
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from shared_schema.errors import DeployError

logger = logging.getLogger(__name__)

STEPS = Path(__file__).parent / "migrations"
BEFORE_STEPS = "0001"
"""What a database is that was made before there were steps."""
UPGRADE_LOCK = 0x4D33_0000


def upgrade(engine: Engine) -> None:
    """Make or upgrade the tables.

    Raises:
        DeployError: the database cannot be used, or a newer program made its tables.
    """
    steps = ScriptDirectory(STEPS)
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                # Tables may take longer than a job's change may, and so may waiting for whoever upgrades them.
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": UPGRADE_LOCK})
            _upgrade(connection, steps)
    except DBAPIError as error:
        place = engine.url.render_as_string(hide_password=True)
        raise DeployError(f"the jobs' database {place} cannot be used: {error.orig}") from error


def _upgrade(connection: Connection, steps: ScriptDirectory) -> None:
    def ahead(current: tuple[str, ...], _context: MigrationContext) -> Iterable[RevisionStep]:
        return steps._upgrade_revs("head", current)  # type: ignore[arg-type]  # as Alembic's own recipes do

    context = MigrationContext.configure(connection, opts={"fn": ahead, "script": steps})
    found = context.get_current_heads()
    known = {step.revision for step in steps.walk_revisions()}
    newest = steps.get_current_head()
    if not known.issuperset(found):
        made = ", ".join(found)
        raise DeployError(
            f"a newer version made the jobs' database (step {made}, this version knows up to {newest}): "
            "start that version, or give this one another database"
        )
    if not found and inspect(connection).has_table("jobs"):
        context.stamp(steps, BEFORE_STEPS)
    with Operations.context(context):
        context.run_migrations()
    if found and found != (newest,):
        logger.info("upgraded the jobs' database from step %s to %s", ", ".join(found), newest)
