"""Databases of every age become this program's; those of a newer one are left alone."""

import asyncio
import multiprocessing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from diffusion_service.jobs.job import Job
from diffusion_service.jobs.sql.database import database_url, open_engine
from diffusion_service.jobs.sql.store import SqlJobStore
from diffusion_service.jobs.sql.tables import METADATA
from diffusion_service.jobs.sql.upgrade import upgrade
from shared_schema.errors import DeployError
from tests.diffusion_service.jobs.made import waiting as candidates
from tests.diffusion_service.jobs.test_store import LOST, new_job

FIRST_TABLES = (
    "CREATE TABLE jobs (sequence INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, id VARCHAR(64) NOT NULL, "
    "status VARCHAR(16) NOT NULL, expires_at FLOAT, document TEXT NOT NULL, UNIQUE (id))",
    "CREATE INDEX ix_jobs_expires_at ON jobs (expires_at)",
    "CREATE INDEX ix_jobs_status ON jobs (status)",
)
"""What `create_all` made before there were steps."""
NEW_FIELDS = {"revision", "priority", "key", "owner", "cancel_requested", "webhook"}


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


def make_old(url: str, *jobs: Job) -> None:
    """A database as the program before leases left it."""
    engine = open_engine(database_url(url))
    with engine.begin() as connection:
        for statement in FIRST_TABLES:
            connection.exec_driver_sql(
                statement
                if "sqlite" in url
                else statement.replace("INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT", "SERIAL PRIMARY KEY")
            )
        for job in jobs:
            row = {"id": job.id, "status": job.status, "expires_at": job.expires_at}
            row["document"] = job.model_dump_json(exclude=NEW_FIELDS)
            connection.execute(
                text(
                    "INSERT INTO jobs (id, status, expires_at, document) VALUES (:id, :status, :expires_at, :document)"
                ),
                row,
            )
    engine.dispose()


def test_the_steps_end_in_the_tables_that_the_store_uses(url: str) -> None:
    engine = open_engine(database_url(url))
    upgrade(engine)
    upgrade(engine)
    with engine.begin() as connection:
        options = {"compare_server_default": False}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), METADATA) == []
    engine.dispose()


def test_jobs_of_an_older_program_are_kept_and_go_on(url: str) -> None:
    waiting, running = new_job(1), new_job(2).start(2000.0)
    ended = new_job(3).cancel(3000.0, 60.0)
    make_old(url, waiting, running, ended)

    async def body() -> None:
        store = SqlJobStore(url)
        assert [job.sequence for job in (await store.page(None, 10, "asc")).jobs] == [1, 2, 3]
        assert await candidates(store) == [waiting.id]
        lost = await store.reclaim(5000.0, lambda job: job.orphaned(LOST, 5000.0, 60.0))
        assert [(job.id, job.status, job.attempt) for job in lost] == [(running.id, "queued", 2)]
        assert [event.status for event in await store.events(running.id)] == ["in_progress", "queued"]
        assert [job.id for job in await store.expired(3060.0)] == [ended.id]
        assert (await store.add(new_job(4), 10)).sequence == 4
        await store.close()

    asyncio.run(body())


def test_a_newer_database_is_refused_and_left_as_it_is(url: str) -> None:
    engine = open_engine(database_url(url))
    upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0999'"))
    with pytest.raises(DeployError, match=r"a newer version made .* 0999"):
        SqlJobStore(url)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "0999"
    engine.dispose()


def test_an_upgrade_that_fails_changes_nothing(url: str) -> None:
    make_old(url, new_job(1))
    engine = open_engine(database_url(url))
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO jobs (id, status, document) VALUES ('video_bad', 'queued', '{}')"))
    with pytest.raises(KeyError):
        upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM jobs WHERE id = 'video_bad'"))
    upgrade(engine)
    engine.dispose()


def _start(url: str) -> None:
    engine = open_engine(database_url(url))
    upgrade(engine)
    engine.dispose()


def test_services_that_start_together_upgrade_once(url: str) -> None:
    make_old(url, new_job(1))
    spawn = multiprocessing.get_context("spawn")
    starting = [spawn.Process(target=_start, args=(url,)) for _ in range(3)]
    for process in starting:
        process.start()
    for process in starting:
        process.join(200)
    assert [process.exitcode for process in starting] == [0, 0, 0]


def test_a_file_that_is_no_database_says_so(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").write_bytes(b"not a database, but long enough to be taken for one" * 40)
    with pytest.raises(DeployError, match=r"jobs\.db cannot be used"):
        SqlJobStore(f"sqlite:///{tmp_path}/jobs.db")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://host/name", "mysql is not served"),
        ("nonsense", "is no URL"),
        ("postgresql://postgres@/name?host=/nowhere", "cannot be used"),
    ],
)
def test_a_database_that_cannot_be_used_is_a_wrong_setting(url: str, why: str) -> None:
    with pytest.raises(DeployError, match=why):
        SqlJobStore(url)
