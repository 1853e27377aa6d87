"""What the store asks stays as quick when thousands of finished jobs are kept: every query is answered by an index."""

import asyncio
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

from diffusion_service.jobs.idempotency import Idempotency
from diffusion_service.jobs.sql.store import SqlJobStore
from tests.diffusion_service.jobs.test_store import first, new_job, orphaned

WHOLE_TABLE = "ORDER BY jobs.sequence DESC\n LIMIT"
"""The first page reads the table itself, from its newest end, and stops at its limit."""


def follow(engine: Engine) -> dict[str, list[str]]:
    """Statements and how SQLite answers them, from now on."""
    plans: dict[str, list[str]] = {}

    def look(connection: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        if statement.startswith(("SELECT", "UPDATE", "DELETE")):
            raw = connection.connection.dbapi_connection
            plans[statement] = [row[3] for row in raw.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]

    event.listen(engine, "before_cursor_execute", look)
    return plans


async def use_everything(store: SqlJobStore) -> None:
    job = await store.add(new_job(1, key="a"), 10, key_limit=9, claim=Idempotency("once", "d" * 64, retry=False))
    await store.add(new_job(2, key="a"), 10, claim=Idempotency(None, "d" * 64, retry=True))
    other = await store.add(new_job(3), 10)
    await store.get(job.id)
    await store.page(None, 5, "desc")
    for key in (None, "a"):
        await store.page(job.id, 5, "desc", key=key)
        await store.page(job.id, 5, "asc", key=key)
    await store.page(None, 5, "desc", key="a")
    await store.places([job, other])
    await store.unfinished()
    await store.expired(1.0)
    await store.ids("completed")
    await store.claim("A", 0.0, 5.0, first)
    await store.renew("A", 1.0, 5.0)
    await store.reclaim(10.0, orphaned)
    await store.change(job.id, lambda j: j.start(1.0))
    await store.events(job.id, 1)
    await store.changes(1)
    await store.due_webhooks(1.0, 5.0, 5)
    await store.remove(job.id)


def test_no_query_reads_all_jobs(tmp_path: Path) -> None:
    async def body() -> dict[str, list[str]]:
        store = SqlJobStore(f"sqlite:///{tmp_path}/jobs.db")
        plans = follow(store._engine)
        await use_everything(store)
        await store.close()
        return plans

    plans = asyncio.run(body())
    # An index of the few rows that have a value may be read whole.
    few = ("SCAN jobs USING INDEX ix_jobs_owner", "SCAN jobs USING COVERING INDEX ix_jobs_owner")
    allowed = ("SEARCH", "USE TEMP B-TREE", *few)
    scans = {
        statement: plan
        for statement, plan in plans.items()
        if WHOLE_TABLE not in statement and not all(step.startswith(allowed) for step in plan)
    }
    assert scans == {}
    assert len(plans) > 20
