"""Queries of the job store, named as its calls, each inside a transaction of its caller. Blocks; runs in the store's
threads.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, Select, and_, bindparam, func, or_, select
from sqlalchemy.engine import Connection

from diffusion_service.jobs.idempotency import Accepted
from diffusion_service.jobs.job import Job
from diffusion_service.jobs.sql.tables import EVENTS, JOBS
from diffusion_service.jobs.store import Changes, JobEvent, JobPage, Order, no_such_cursor
from diffusion_service.scheduler import Waiting
from shared_schema.videos import VideoStatus

IN_ORDER = (JOBS.c.priority.desc(), JOBS.c.sequence)
"""How the queue is ordered."""
_ONE: Select[Any] = select(JOBS.c.sequence, JOBS.c.revision, JOBS.c.document).where(JOBS.c.id == bindparam("job_id"))
"""Built once: building it takes three times as long as SQLite takes to answer."""
_ONE_LOCKED = _ONE.with_for_update()


def job_of(row: Row[Any]) -> Job:
    """A row as the job that it keeps; what the database gives is in its columns alone."""
    given = {"sequence": row.sequence, "revision": row.revision}
    return Job.model_validate_json(row.document).model_copy(update=given)


def read(connection: Connection, job_id: str, *, lock: bool = False) -> Job | None:
    """One job; `lock`: nobody else changes it before this transaction ends."""
    if not (job_id.isascii() and job_id.isprintable()):
        # None of ours, and PostgreSQL takes no NUL.
        return None
    row = connection.execute(_ONE_LOCKED if lock else _ONE, {"job_id": job_id}).one_or_none()
    return None if row is None else job_of(row)


def page(connection: Connection, after: str | None, limit: int, order: Order, key: str | None) -> JobPage:
    sequence = JOBS.c.sequence
    query = select(JOBS).order_by(sequence.desc() if order == "desc" else sequence.asc()).limit(limit + 1)
    if key is not None:
        query = query.where(JOBS.c.key == key)
    if after is not None:
        start = read(connection, after)
        if start is None or key not in (None, start.key):
            raise no_such_cursor(after)
        query = query.where(sequence < start.sequence if order == "desc" else sequence > start.sequence)
    jobs = [job_of(row) for row in connection.execute(query)]
    return JobPage(tuple(jobs[:limit]), len(jobs) > limit)


def places(connection: Connection, queued: Sequence[Job]) -> dict[str, int]:
    """See `JobStore.places`; the index of the queue answers it alone."""
    found = {}
    for job in queued:
        same = and_(JOBS.c.priority == job.priority, JOBS.c.sequence < job.sequence)
        query = select(func.count()).where(JOBS.c.status == "queued", or_(JOBS.c.priority > job.priority, same))
        found[job.id] = 1 + connection.execute(query).scalar_one()
    return found


def waiting(connection: Connection) -> list[Waiting]:
    """Queued jobs that nobody owns, in order."""
    columns = (JOBS.c.id, JOBS.c.sequence, JOBS.c.priority, JOBS.c.key)
    query = select(*columns).where(JOBS.c.status == "queued", JOBS.c.owner.is_(None)).order_by(*IN_ORDER)
    return [Waiting(row.id, row.sequence, row.priority, row.key) for row in connection.execute(query)]


def owned_by_key(connection: Connection) -> Counter[str | None]:
    """How many jobs of each key somebody owns."""
    return Counter(connection.execute(select(JOBS.c.key).where(JOBS.c.owner.is_not(None))).scalars())


def count_queued(connection: Connection) -> int:
    """How many jobs are queued."""
    return connection.execute(select(func.count()).where(JOBS.c.status == "queued")).scalar_one()


def count_unfinished(connection: Connection, key: str | None) -> int:
    """How many jobs of that key have not ended."""
    query = select(JOBS.c.key).where(JOBS.c.status.in_(("queued", "in_progress")))
    return sum(row.key == key for row in connection.execute(query))


def accepted(connection: Connection, key: str | None, idempotency_key: str | None, digest: str) -> list[Accepted]:
    """Requests of that caller that might be the same as a new one, newest first."""
    same = JOBS.c.digest == digest if idempotency_key is None else JOBS.c.idempotency_key == idempotency_key
    columns = (JOBS.c.id, JOBS.c.idempotency_key, JOBS.c.digest, JOBS.c.accepted_at, JOBS.c.key)
    rows = connection.execute(select(*columns).where(same).order_by(JOBS.c.sequence.desc())).all()
    return [Accepted(row.id, row.idempotency_key, row.digest, row.accepted_at) for row in rows if row.key == key]


def unfinished(connection: Connection) -> list[Job]:
    query = select(JOBS).where(JOBS.c.status.in_(("queued", "in_progress"))).order_by(JOBS.c.sequence)
    return [job_of(row) for row in connection.execute(query)]


def expired(connection: Connection, now: float) -> list[Job]:
    query = select(JOBS).where(JOBS.c.expires_at <= now).order_by(JOBS.c.expires_at, JOBS.c.sequence)
    return [job_of(row) for row in connection.execute(query)]


def ids(connection: Connection, status: VideoStatus | None) -> frozenset[str]:
    query = select(JOBS.c.id) if status is None else select(JOBS.c.id).where(JOBS.c.status == status)
    return frozenset(connection.execute(query).scalars())


def events(connection: Connection, job_id: str, after: int | None) -> list[JobEvent]:
    query = select(EVENTS).where(EVENTS.c.job_id == job_id).order_by(EVENTS.c.revision)
    if after is not None:
        query = query.where(EVENTS.c.revision > after)
    return [JobEvent(**row._mapping) for row in connection.execute(query)]


def changes(connection: Connection, after: int | None) -> Changes:
    newest = connection.execute(select(func.max(EVENTS.c.revision))).scalar_one() or 0
    if after is None:
        return Changes(newest, frozenset())
    query = select(EVENTS.c.job_id).where(EVENTS.c.revision > after, EVENTS.c.revision <= newest).distinct()
    return Changes(max(after, newest), frozenset(connection.execute(query).scalars()))
