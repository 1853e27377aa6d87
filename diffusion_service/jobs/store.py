"""Where jobs are kept: the store's protocol, one in SQL and one in memory. Runs in the diffusion API process.

Every change of a job is one transaction around one pure transition of `jobs/job.py`. The SQL store works in one
thread of its own, so the event loop never waits for a disk.
"""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

from sqlalchemy import (
    Column,
    Float,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    Text,
    create_engine,
    delete,
    event,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.engine import Connection, Engine

from diffusion_service.jobs.job import Job
from shared_schema.errors import InvalidRequest, NotFound, QueueFull

Order = Literal["asc", "desc"]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class JobPage:
    """Some jobs by their sequence, and whether more follow in that order."""

    jobs: tuple[Job, ...]
    has_more: bool


class JobStore(Protocol):
    """What API and runner ask of a store. A finished call is kept, whatever happens to the process afterwards."""

    async def add(self, job: Job, limit: int) -> Job:
        """Keep a new job and give it its sequence number, higher than any before.

        Raises:
            QueueFull: `limit` jobs are queued already; nothing was kept.
        """

    async def get(self, job_id: str) -> Job | None:
        """The job, or None."""

    async def change(self, job_id: str, transition: Callable[[Job], Job]) -> Job:
        """Read, apply `transition`, write; what the transition raises is raised and changes nothing.

        Raises:
            NotFound: no such job.
        """

    async def page(self, after: str | None, limit: int, order: Order) -> JobPage:
        """At most `limit` jobs that follow the job `after` in `order`.

        Raises:
            InvalidRequest: `after` names no job.
        """

    async def next_queued(self, skip: Collection[str] = ()) -> Job | None:
        """The oldest queued job whose id is not in `skip`."""

    async def queued_ahead(self, sequence: int) -> int:
        """How many queued jobs are older."""

    async def unfinished(self) -> list[Job]:
        """Queued and running jobs, oldest first."""

    async def expired(self, now: float) -> list[Job]:
        """Finished jobs whose time is over."""

    async def ids(self) -> frozenset[str]:
        """Every job that is kept."""

    async def remove(self, job_id: str) -> None:
        """Forget the job; an unknown one is forgotten already."""

    async def close(self) -> None:
        """Finish what is being written."""


class MemoryJobStore:
    """Jobs in a dictionary: for tests, and gone with the process."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._last = 0

    async def add(self, job: Job, limit: int) -> Job:
        """See `JobStore.add`."""
        if sum(kept.status == "queued" for kept in self._jobs.values()) >= limit:
            raise _full(limit)
        self._last += 1
        kept = job.model_copy(update={"sequence": self._last})
        self._jobs[job.id] = kept
        return kept

    async def get(self, job_id: str) -> Job | None:
        """See `JobStore.get`."""
        return self._jobs.get(job_id)

    async def change(self, job_id: str, transition: Callable[[Job], Job]) -> Job:
        """See `JobStore.change`."""
        if job_id not in self._jobs:
            raise _unknown(job_id)
        changed = transition(self._jobs[job_id])
        self._jobs[job_id] = changed
        return changed

    async def page(self, after: str | None, limit: int, order: Order) -> JobPage:
        """See `JobStore.page`."""
        if after is not None and after not in self._jobs:
            raise _unknown_cursor(after)
        jobs = sorted(self._jobs.values(), key=lambda job: job.sequence, reverse=order == "desc")
        start = 0 if after is None else 1 + [job.id for job in jobs].index(after)
        return JobPage(tuple(jobs[start : start + limit]), len(jobs) > start + limit)

    async def next_queued(self, skip: Collection[str] = ()) -> Job | None:
        """See `JobStore.next_queued`."""
        queued = (job for job in self._by_age() if job.status == "queued" and job.id not in skip)
        return next(queued, None)

    async def queued_ahead(self, sequence: int) -> int:
        """See `JobStore.queued_ahead`."""
        return sum(job.status == "queued" and job.sequence < sequence for job in self._jobs.values())

    async def unfinished(self) -> list[Job]:
        """See `JobStore.unfinished`."""
        return [job for job in self._by_age() if not job.finished]

    async def expired(self, now: float) -> list[Job]:
        """See `JobStore.expired`."""
        return [job for job in self._by_age() if job.expires_at is not None and job.expires_at <= now]

    async def ids(self) -> frozenset[str]:
        """See `JobStore.ids`."""
        return frozenset(self._jobs)

    async def remove(self, job_id: str) -> None:
        """See `JobStore.remove`."""
        self._jobs.pop(job_id, None)

    async def close(self) -> None:
        """See `JobStore.close`."""

    def _by_age(self) -> list[Job]:
        return sorted(self._jobs.values(), key=lambda job: job.sequence)


_METADATA = MetaData()
_JOBS = Table(
    "jobs",
    _METADATA,
    Column("sequence", Integer, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("status", String(16), nullable=False, index=True),
    Column("expires_at", Float, nullable=True, index=True),
    Column("document", Text, nullable=False),
    # Without it SQLite gives the number of a removed job away again.
    sqlite_autoincrement=True,
)


class SqlJobStore:
    """Jobs in a database; the columns beside the document are what queries need."""

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        _METADATA.create_all(self._engine)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="job-store")

    async def add(self, job: Job, limit: int) -> Job:
        """See `JobStore.add`."""
        return await self._run(_add, job, limit)

    async def get(self, job_id: str) -> Job | None:
        """See `JobStore.get`."""
        return await self._run(_get, job_id)

    async def change(self, job_id: str, transition: Callable[[Job], Job]) -> Job:
        """See `JobStore.change`."""
        return await self._run(_change, job_id, transition)

    async def page(self, after: str | None, limit: int, order: Order) -> JobPage:
        """See `JobStore.page`."""
        return await self._run(_page, after, limit, order)

    async def next_queued(self, skip: Collection[str] = ()) -> Job | None:
        """See `JobStore.next_queued`."""
        return await self._run(_next_queued, tuple(skip))

    async def queued_ahead(self, sequence: int) -> int:
        """See `JobStore.queued_ahead`."""
        return await self._run(_queued_ahead, sequence)

    async def unfinished(self) -> list[Job]:
        """See `JobStore.unfinished`."""
        return await self._run(_unfinished)

    async def expired(self, now: float) -> list[Job]:
        """See `JobStore.expired`."""
        return await self._run(_expired, now)

    async def ids(self) -> frozenset[str]:
        """See `JobStore.ids`."""
        return await self._run(_ids)

    async def remove(self, job_id: str) -> None:
        """See `JobStore.remove`."""
        await self._run(_remove, job_id)

    async def close(self) -> None:
        """See `JobStore.close`."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.dispose)
        self._thread.shutdown()

    async def _run(self, work: Callable[..., R], *arguments: object) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(self._transact, work, *arguments))

    def _transact(self, work: Callable[..., R], *arguments: object) -> R:
        with self._engine.begin() as connection:
            return work(connection, *arguments)


def _engine(url: str) -> Engine:
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # The driver's own idea of when a transaction begins would leave a read outside of it.
    connection.isolation_level = None
    # A process that is killed loses nothing; a power cut may lose the last changes, never the file.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _job(row: Row[Any]) -> Job:
    return Job.model_validate_json(row.document).model_copy(update={"sequence": row.sequence})


def _columns(job: Job) -> dict[str, object]:
    document = job.model_dump_json()
    return {"id": job.id, "status": job.status, "expires_at": job.expires_at, "document": document}


def _add(connection: Connection, job: Job, limit: int) -> Job:
    queued = connection.execute(select(func.count()).where(_JOBS.c.status == "queued")).scalar_one()
    if queued >= limit:
        raise _full(limit)
    row = connection.execute(insert(_JOBS).values(**_columns(job)).returning(_JOBS.c.sequence)).one()
    return job.model_copy(update={"sequence": row.sequence})


def _get(connection: Connection, job_id: str) -> Job | None:
    row = connection.execute(select(_JOBS).where(_JOBS.c.id == job_id)).one_or_none()
    return None if row is None else _job(row)


def _change(connection: Connection, job_id: str, transition: Callable[[Job], Job]) -> Job:
    before = _get(connection, job_id)
    if before is None:
        raise _unknown(job_id)
    after = transition(before)
    connection.execute(update(_JOBS).where(_JOBS.c.id == job_id).values(**_columns(after)))
    return after


def _page(connection: Connection, after: str | None, limit: int, order: Order) -> JobPage:
    sequence = _JOBS.c.sequence
    query = select(_JOBS).order_by(sequence.desc() if order == "desc" else sequence.asc()).limit(limit + 1)
    if after is not None:
        start = _get(connection, after)
        if start is None:
            raise _unknown_cursor(after)
        query = query.where(sequence < start.sequence if order == "desc" else sequence > start.sequence)
    jobs = [_job(row) for row in connection.execute(query)]
    return JobPage(tuple(jobs[:limit]), len(jobs) > limit)


def _next_queued(connection: Connection, skip: tuple[str, ...]) -> Job | None:
    query = select(_JOBS).where(_JOBS.c.status == "queued", _JOBS.c.id.not_in(skip))
    row = connection.execute(query.order_by(_JOBS.c.sequence).limit(1)).one_or_none()
    return None if row is None else _job(row)


def _queued_ahead(connection: Connection, sequence: int) -> int:
    query = select(func.count()).where(_JOBS.c.status == "queued", _JOBS.c.sequence < sequence)
    return connection.execute(query).scalar_one()


def _unfinished(connection: Connection) -> list[Job]:
    query = select(_JOBS).where(_JOBS.c.status.in_(("queued", "in_progress"))).order_by(_JOBS.c.sequence)
    return [_job(row) for row in connection.execute(query)]


def _expired(connection: Connection, now: float) -> list[Job]:
    query = select(_JOBS).where(_JOBS.c.expires_at <= now).order_by(_JOBS.c.sequence)
    return [_job(row) for row in connection.execute(query)]


def _ids(connection: Connection) -> frozenset[str]:
    return frozenset(connection.execute(select(_JOBS.c.id)).scalars())


def _remove(connection: Connection, job_id: str) -> None:
    connection.execute(delete(_JOBS).where(_JOBS.c.id == job_id))


def _full(limit: int) -> QueueFull:
    return QueueFull(f"{limit} jobs are waiting already; try again later")


def _unknown(job_id: str) -> NotFound:
    return NotFound(f"there is no video {job_id!a}", param="video_id")


def _unknown_cursor(after: str) -> InvalidRequest:
    return InvalidRequest(f"there is no video {after!a} to list after", param="after")
