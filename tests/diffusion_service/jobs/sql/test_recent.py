"""A job that is polled costs no transaction until it changes, where nobody else writes."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from diffusion_service.jobs.job import Job
from diffusion_service.jobs.sql.recent import KEPT, RecentJobs
from diffusion_service.jobs.sql.store import SqlJobStore
from shared_schema.errors import StoreUnavailable
from tests.diffusion_service.jobs.test_store import first, new_job


def with_store(path: Path, body: Callable[[SqlJobStore], Awaitable[None]]) -> None:
    async def run() -> None:
        store = SqlJobStore(f"sqlite:///{path}")
        try:
            await body(store)
        finally:
            await store.close()

    asyncio.run(run())


def spoil(path: Path) -> None:
    """Make every transaction fail from now on."""
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE jobs RENAME TO gone")


def test_a_job_that_was_just_written_or_read_needs_no_database(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"

    async def body(store: SqlJobStore) -> None:
        job = await store.add(new_job(1), 10)
        assert await store.get(job.id) == job
        spoil(path)
        assert await store.get(job.id) == job
        with pytest.raises(StoreUnavailable):
            await store.get(new_job(2).id)
        # After a failure nothing is taken for known.
        with pytest.raises(StoreUnavailable):
            await store.get(job.id)

    with_store(path, body)


def test_every_change_is_seen_by_the_next_read(tmp_path: Path) -> None:
    async def body(store: SqlJobStore) -> None:
        job = await store.add(new_job(1), 10)

        async def seen() -> Job:
            found = await store.get(job.id)
            assert found is not None
            return found

        assert await store.claim("a", 0.0, 10.0, first) == await seen()
        assert (await seen()).owner == "a"
        await store.change(job.id, lambda job: job.released(), instance="a")
        assert (await seen()).owner is None
        await store.change(job.id, lambda job: job.claimed("b"))
        assert (await seen()).owner == "b"
        await store.remove(job.id)
        assert await store.get(job.id) is None

    with_store(tmp_path / "jobs.db", body)


def test_the_number_of_jobs_is_bounded_and_the_one_not_used_goes_first() -> None:
    recent = RecentJobs()
    for number in range(KEPT):
        recent.put(new_job(number))
    assert recent.get(new_job(0).id) is not None
    recent.put(new_job(KEPT))
    assert recent.get(new_job(0).id) is not None
    assert recent.get(new_job(1).id) is None
