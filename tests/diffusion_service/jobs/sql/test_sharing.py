"""Several services on one PostgreSQL queue: no job twice, none lost, every change seen in order."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import psycopg
import pytest
from sqlalchemy import Connection, text

from diffusion_service.jobs.job import Job, LeaseLost
from diffusion_service.jobs.sql import database
from diffusion_service.jobs.sql.store import SqlJobStore
from diffusion_service.scheduler import Waiting
from shared_schema.errors import QueueFull, StoreUnavailable
from tests.diffusion_service.jobs.test_store import LOST, first, new_job, orphaned
from tests.end_to_end.processes import wait_until
from tests.postgres import PostgresServer

Body = Callable[[SqlJobStore, SqlJobStore], Awaitable[None]]


def share(url: str, body: Body) -> None:
    """Run `body` with two services' stores over one database."""

    async def run() -> None:
        one, two = SqlJobStore(url), SqlJobStore(url)
        try:
            await body(one, two)
        finally:
            await one.close()
            await two.close()

    asyncio.run(run())


def test_what_one_service_keeps_the_other_answers_for(postgres_url: str) -> None:  # case 22
    async def body(one: SqlJobStore, two: SqlJobStore) -> None:
        assert one.shared
        assert two.shared
        job = await one.add(new_job(1), 10)
        assert await two.get(job.id) == job
        await one.claim("A", 0.0, 10.0, first)
        await two.change(job.id, lambda j: j.ask_cancel(1.0, 60.0))
        assert (await one.renew("A", 1.0, 10.0)).cancelled == {job.id}
        await one.change(job.id, lambda j: j.cancel(1.0, 60.0), instance="A")
        await two.remove(job.id)
        assert await one.get(job.id) is None

    share(postgres_url, body)


def test_two_services_never_claim_the_same_job(postgres_url: str) -> None:  # case 7
    async def body(one: SqlJobStore, two: SqlJobStore) -> None:
        for number in range(40):
            await one.add(new_job(number), 100)
        claims = [store.claim(name, 0.0, 10.0, first) for _ in range(25) for store, name in ((one, "A"), (two, "B"))]
        claimed = [job for job in await asyncio.gather(*claims) if job is not None]
        assert sorted(job.id for job in claimed) == sorted(new_job(number).id for number in range(40))
        assert {job.owner for job in claimed} == {"A", "B"}

    share(postgres_url, body)


def test_a_lost_job_is_recovered_by_one_service_only(postgres_url: str) -> None:
    async def body(one: SqlJobStore, two: SqlJobStore) -> None:
        for number in range(10):
            await one.add(new_job(number), 100)
            job = await one.claim("A", 0.0, 10.0, first)
            assert job is not None
            await one.change(job.id, lambda j: j.start(1.0), instance="A")
        recovered = await asyncio.gather(*(store.reclaim(10.0, orphaned) for store in (one, two, one, two)))
        assert sorted(job.id for jobs in recovered for job in jobs) == sorted(new_job(n).id for n in range(10))
        assert {job.attempt for jobs in recovered for job in jobs} == {2}

    share(postgres_url, body)


def test_a_service_that_slept_through_its_lease_is_fenced(postgres_url: str) -> None:
    async def body(one: SqlJobStore, two: SqlJobStore) -> None:
        job = await one.add(new_job(1), 10)
        await one.claim("A", 0.0, 10.0, first)
        await one.change(job.id, lambda j: j.start(1.0), instance="A")
        await two.reclaim(11.0, orphaned)
        await two.claim("B", 11.0, 10.0, first)
        with pytest.raises(LeaseLost):
            await one.change(job.id, lambda j: j.fail(LOST, 12.0, 60.0), instance="A")
        kept = await one.get(job.id)
        assert kept is not None
        assert (kept.owner, kept.status, kept.attempt) == ("B", "queued", 2)

    share(postgres_url, body)


def test_the_share_of_a_key_is_counted_over_all_services(postgres_url: str) -> None:
    def one_a_key(candidates: Sequence[Waiting], running: Mapping[str | None, int]) -> str | None:
        return next((each.id for each in candidates if not running.get(each.key, 0)), None)

    async def body(one: SqlJobStore, two: SqlJobStore) -> None:
        for number in range(6):
            await one.add(new_job(number, key="a"), 100)
        claims = await asyncio.gather(*(store.claim("X", 0.0, 10.0, one_a_key) for store in (one, two) * 3))
        assert len([job for job in claims if job is not None]) == 1

    share(postgres_url, body)


def test_the_queue_limit_holds_for_all_services_together(postgres_url: str) -> None:
    async def body(one: SqlJobStore, two: SqlJobStore) -> None:
        adding = [store.add(new_job(2 * n + i), 7) for n in range(10) for i, store in enumerate((one, two))]
        answers = await asyncio.gather(*adding, return_exceptions=True)
        assert sum(isinstance(answer, Job) for answer in answers) == 7
        assert sum(isinstance(answer, QueueFull) for answer in answers) == 13

    share(postgres_url, body)


def test_who_follows_the_changes_misses_none(postgres_url: str) -> None:
    """Revisions are committed in the order in which they are given, so a reader may go on from the last it saw."""

    async def body(one: SqlJobStore, two: SqlJobStore) -> None:
        jobs = [await one.add(new_job(number), 100) for number in range(12)]
        start = await two.changes(None)
        writing = [
            asyncio.create_task((one, two)[number % 2].change(job.id, lambda j: j.start(1.0)))
            for number, job in enumerate(jobs)
        ]
        seen: set[str] = set()
        revision = start.revision
        while not all(task.done() for task in writing):
            news = await two.changes(revision)
            seen, revision = seen | news.jobs, news.revision
        news = await two.changes(revision)
        assert seen | news.jobs == {job.id for job in jobs}
        assert news.revision == start.revision + len(jobs)

    share(postgres_url, body)


def test_changes_of_one_job_from_two_services_are_all_kept(postgres_url: str) -> None:
    def count(job: Job) -> Job:
        return job.encoded((), {"ticks": job.stage_durations.get("ticks", 0.0) + 1})

    async def body(one: SqlJobStore, two: SqlJobStore) -> None:
        job = await one.add(new_job(1), 10)
        await asyncio.gather(*(store.change(job.id, count) for store in (one, two) * 40))
        kept = await two.get(job.id)
        assert kept is not None
        assert kept.stage_durations == {"ticks": 80.0}

    share(postgres_url, body)


def test_a_server_that_is_away_is_an_error_of_ours_and_comes_back(postgres: PostgresServer) -> None:
    async def body(one: SqlJobStore, _two: SqlJobStore) -> None:
        job = await one.add(new_job(1), 10)
        await asyncio.to_thread(postgres.stop)
        try:
            with pytest.raises(StoreUnavailable):
                await one.get(job.id)
        finally:
            await asyncio.to_thread(postgres.start)
        assert await one.get(job.id) == job

    share(postgres.new_database(), body)


def test_an_id_that_no_database_takes_names_no_job(postgres_url: str) -> None:
    async def body(one: SqlJobStore, _two: SqlJobStore) -> None:
        assert await one.get("video_\0") is None
        assert await one.get("video_é") is None

    share(postgres_url, body)


def test_a_store_that_is_closed_leaves_no_connection_of_callers_that_were_cancelled(postgres_url: str) -> None:
    def slowly(connection: Connection) -> None:
        connection.execute(text("SELECT pg_sleep(0.5)"))

    async def body(one: SqlJobStore, _two: SqlJobStore) -> None:
        left = [asyncio.create_task(one._run(slowly)) for _ in range(3)]
        await asyncio.sleep(0.2)
        for each in left:
            each.cancel()
        await asyncio.wait(left)

    share(postgres_url, body)
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with psycopg.connect(postgres_url, autocommit=True) as looking:
        wait_until(lambda: looking.execute(others).fetchone() == (0,), 30, "no connection is left")


def test_a_service_that_was_stopped_within_a_change_holds_up_nobody_for_ever(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = {**database.WAITS, "options": "-c lock_timeout=200ms -c idle_in_transaction_session_timeout=2s"}
    monkeypatch.setattr(database, "WAITS", waits)
    stopped = database.open_engine(database.database_url(postgres_url))

    async def body(one: SqlJobStore, two: SqlJobStore) -> None:
        with stopped.connect() as connection:
            connection.begin()
            database.lock_history(connection)
            with pytest.raises(StoreUnavailable):
                await one.add(new_job(1), 10)
            await asyncio.sleep(2.5)
            assert (await two.add(new_job(2), 10)).id == new_job(2).id
            driver = connection.connection.dbapi_connection
            assert driver is not None
            driver.close()
            connection.invalidate()

    share(postgres_url, body)
    stopped.dispose()


def test_every_wait_for_the_server_has_an_end(postgres_url: str) -> None:
    engine = database.open_engine(database.database_url(postgres_url))
    with engine.connect() as connection:
        for name in ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout"):
            assert connection.execute(text(f"SHOW {name}")).scalar() != "0"
    engine.dispose()
