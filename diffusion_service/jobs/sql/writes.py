"""Changes of the job store, named as its calls, each inside a transaction of its caller. Blocks; runs in its threads.

Order of locks on PostgreSQL: rows first, the history last; whoever takes the history first skips locked rows.
"""

from sqlalchemy import Column, delete, insert, select, update
from sqlalchemy.engine import Connection

from diffusion_service.jobs.idempotency import Idempotency, earlier
from diffusion_service.jobs.job import Job
from diffusion_service.jobs.sql import reads
from diffusion_service.jobs.sql.database import lock_history
from diffusion_service.jobs.sql.tables import EVENTS, JOBS
from diffusion_service.jobs.store import (
    Choose,
    Held,
    Transit,
    check_owner,
    freed,
    is_event,
    key_busy,
    no_such_job,
    queue_full,
    webhook_claimed,
)


def add(
    connection: Connection, job: Job, limit: int, key_limit: int | None, claim: Idempotency | None, now: float
) -> Job:
    lock_history(connection)
    if claim is not None:
        candidates = reads.accepted(connection, job.key, claim.idempotency_key, claim.digest)
        known = earlier(claim, candidates, job.created_at)
        kept = known and reads.read(connection, known)
        if kept:
            return kept
    if reads.count_queued(connection) >= limit:
        raise queue_full(limit)
    if key_limit is not None and reads.count_unfinished(connection, job.key) >= key_limit:
        raise key_busy(key_limit)
    job = job.model_copy(update={"revision": _note(connection, job, now)})
    values = {**_columns(job), "accepted_at": job.created_at}
    if claim is not None:
        values |= {"idempotency_key": claim.idempotency_key, "digest": claim.digest}
    row = connection.execute(insert(JOBS).values(values).returning(JOBS.c.sequence)).one()
    return job.model_copy(update={"sequence": row.sequence})


def change(connection: Connection, job_id: str, transition: Transit, instance: str | None, now: float) -> Job:
    before = reads.read(connection, job_id, lock=True)
    if before is None:
        raise no_such_job(job_id)
    check_owner(before, instance)
    return _write(connection, before, transition(before), now)


def remove(connection: Connection, job_id: str) -> bool:
    """Forget a job; returns whether there was one."""
    gone = connection.execute(delete(JOBS).where(JOBS.c.id == job_id)).rowcount > 0
    connection.execute(delete(EVENTS).where(EVENTS.c.job_id == job_id))
    return gone


def claim(connection: Connection, instance: str, now: float, lease_s: float, choose: Choose) -> Job | None:
    lock_history(connection)
    candidates = reads.waiting(connection)
    running = reads.owned_by_key(connection)
    while (chosen := choose(candidates, running)) is not None:
        free = (JOBS.c.id == chosen, JOBS.c.status == "queued", JOBS.c.owner.is_(None))
        row = connection.execute(select(JOBS).where(*free).with_for_update(skip_locked=True)).one_or_none()
        if row is not None:
            job = reads.job_of(row)
            return _write(connection, job, job.claimed(instance), now, now + lease_s)
        # Cancelled or removed at this moment.
        candidates = [each for each in candidates if each.id != chosen]
    return None


def renew(connection: Connection, instance: str, now: float, lease_s: float) -> Held:
    renewed = update(JOBS).where(JOBS.c.owner == instance).values(lease_until=now + lease_s)
    rows = connection.execute(renewed.returning(JOBS.c.id, JOBS.c.cancel_requested)).all()
    cancelled = (row.id for row in rows if row.cancel_requested)
    return Held(frozenset(row.id for row in rows), frozenset(cancelled))


def reclaim_one(connection: Connection, now: float, transition: Transit) -> Job | None:
    """One owned job whose lease is over, changed; None when no more can be had."""
    job = _first_free(connection, JOBS.c.lease_until, now)
    return None if job is None else _write(connection, job, freed(transition(job)), now)


def hold_webhook(connection: Connection, now: float, hold_s: float) -> Job | None:
    """One job whose webhook is due, with that moved ahead; None when no more can be had."""
    job = _first_free(connection, JOBS.c.webhook_due, now)
    return None if job is None else _write(connection, job, webhook_claimed(job, now, hold_s), now)


def _first_free(connection: Connection, time: Column[float], now: float) -> Job | None:
    """The job whose `time` was first, of those that are over and that nobody else is about to change; it is locked."""
    query = select(JOBS).where(time <= now).order_by(time, JOBS.c.sequence).limit(1)
    row = connection.execute(query.with_for_update(skip_locked=True)).one_or_none()
    return None if row is None else reads.job_of(row)


def _write(connection: Connection, before: Job, after: Job, now: float, lease_until: float | None = None) -> Job:
    if is_event(before, after):
        lock_history(connection)
        after = after.model_copy(update={"revision": _note(connection, after, now)})
    values = _columns(after)
    if after.owner is None or lease_until is not None:
        values["lease_until"] = lease_until
    connection.execute(update(JOBS).where(JOBS.c.id == after.id).values(values))
    return after


def _note(connection: Connection, job: Job, now: float) -> int:
    """Write a line of history and return its revision."""
    line = {"job_id": job.id, "at": now, "status": job.status, "phase": job.phase, "progress": job.progress}
    return int(connection.execute(insert(EVENTS).values(line).returning(EVENTS.c.revision)).scalar_one())


def _columns(job: Job) -> dict[str, object]:
    shown = ("id", "status", "priority", "key", "owner", "cancel_requested", "expires_at", "revision")
    due = None if job.webhook is None else job.webhook.due_at
    return {name: getattr(job, name) for name in shown} | {"webhook_due": due, "document": job.model_dump_json()}
