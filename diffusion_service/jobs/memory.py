"""Jobs in a dictionary: for tests, and gone with the process. Runs in the diffusion API process."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diffusion_service.jobs.idempotency import Accepted, Idempotency, earlier
from diffusion_service.jobs.job import Job
from diffusion_service.jobs.store import (
    Changes,
    Choose,
    Held,
    JobEvent,
    JobPage,
    Order,
    Tell,
    Transit,
    check_owner,
    freed,
    is_event,
    key_busy,
    no_such_cursor,
    no_such_job,
    queue_full,
    silent,
    webhook_claimed,
)
from diffusion_service.scheduler import Waiting
from shared_schema.videos import VideoStatus


@dataclass(frozen=True)
class _Kept:
    job: Job
    claim: Idempotency | None
    lease_until: float | None = None


class MemoryJobStore:
    """A `JobStore` of one process; see there for what its calls do."""

    def __init__(self, *, tell: Tell = silent, clock: Callable[[], float] = time.time) -> None:
        self._tell = tell
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._events: dict[str, list[JobEvent]] = {}
        self._sequence = itertools.count(1)
        self._revision = 0

    @property
    def shared(self) -> bool:
        return False

    async def add(self, job: Job, limit: int, *, key_limit: int | None = None, claim: Idempotency | None = None) -> Job:
        known = claim and earlier(claim, self._accepted(job.key), job.created_at)
        if known:
            return self._kept[known].job
        if sum(kept.status == "queued" for kept in self._by_age()) >= limit:
            raise queue_full(limit)
        mine = sum(kept.key == job.key and not kept.finished for kept in self._by_age())
        if key_limit is not None and mine >= key_limit:
            raise key_busy(key_limit)
        job = job.model_copy(update={"sequence": next(self._sequence)})
        return self._keep(None, job, _Kept(job, claim))

    async def get(self, job_id: str) -> Job | None:
        kept = self._kept.get(job_id)
        return None if kept is None else kept.job

    async def change(self, job_id: str, transition: Transit, *, instance: str | None = None) -> Job:
        kept = self._kept.get(job_id)
        if kept is None:
            raise no_such_job(job_id)
        check_owner(kept.job, instance)
        return self._keep(kept.job, transition(kept.job), kept)

    async def page(self, after: str | None, limit: int, order: Order, *, key: str | None = None) -> JobPage:
        jobs = [job for job in self._by_age() if key is None or job.key == key]
        if order == "desc":
            jobs.reverse()
        ids = [job.id for job in jobs]
        if after is not None and after not in ids:
            raise no_such_cursor(after)
        start = 0 if after is None else 1 + ids.index(after)
        return JobPage(tuple(jobs[start : start + limit]), len(jobs) > start + limit)

    async def places(self, jobs: Sequence[Job]) -> dict[str, int]:
        asked = {job.id for job in jobs}
        return {job.id: place for place, job in enumerate(self._queue(), start=1) if job.id in asked}

    async def queued(self) -> int:
        return len(self._queue())

    async def unfinished(self) -> list[Job]:
        return [job for job in self._by_age() if not job.finished]

    async def expired(self, now: float) -> list[Job]:
        over = [(job.expires_at, job) for job in self._by_age() if job.expires_at is not None and job.expires_at <= now]
        return [job for _, job in sorted(over, key=lambda each: each[0])]

    async def ids(self, status: VideoStatus | None = None) -> frozenset[str]:
        return frozenset(job.id for job in self._by_age() if status in (None, job.status))

    async def remove(self, job_id: str) -> None:
        if self._kept.pop(job_id, None) is not None:
            del self._events[job_id]
            self._tell(job_id)

    async def claim(self, instance: str, now: float, lease_s: float, choose: Choose) -> Job | None:
        running = Counter(job.key for job in self._by_age() if job.owner is not None)
        waiting = [Waiting(job.id, job.sequence, job.priority, job.key) for job in self._queue() if job.owner is None]
        chosen = choose(waiting, running)
        if chosen is None:
            return None
        kept = self._kept[chosen]
        return self._keep(kept.job, kept.job.claimed(instance), kept, now + lease_s)

    async def renew(self, instance: str, now: float, lease_s: float) -> Held:
        mine = [kept for kept in self._kept.values() if kept.job.owner == instance]
        for kept in mine:
            self._kept[kept.job.id] = _Kept(kept.job, kept.claim, now + lease_s)
        cancelled = (kept.job.id for kept in mine if kept.job.cancel_requested)
        return Held(frozenset(kept.job.id for kept in mine), frozenset(cancelled))

    async def reclaim(self, now: float, transition: Transit) -> list[Job]:
        over = [kept for kept in self._kept.values() if kept.lease_until is not None and kept.lease_until <= now]
        return [self._keep(kept.job, freed(transition(kept.job)), kept) for kept in over]

    async def events(self, job_id: str, after: int | None = None) -> list[JobEvent]:
        return [event for event in self._events.get(job_id, []) if after is None or event.revision > after]

    async def changes(self, after: int | None) -> Changes:
        if after is None:
            return Changes(self._revision, frozenset())
        newer = (job.id for job in self._by_age() if job.revision > after)
        return Changes(max(after, self._revision), frozenset(newer))

    async def due_webhooks(self, now: float, hold_s: float, limit: int) -> list[Job]:
        due = sorted((kept for kept in self._kept.values() if _due_at(kept.job) <= now), key=lambda k: _due_at(k.job))
        return [self._keep(kept.job, webhook_claimed(kept.job, now, hold_s), kept) for kept in due[:limit]]

    async def close(self) -> None:
        pass

    def _by_age(self) -> list[Job]:
        return [kept.job for kept in self._kept.values()]

    def _queue(self) -> list[Job]:
        queued = (job for job in self._by_age() if job.status == "queued")
        return sorted(queued, key=lambda job: (-job.priority, job.sequence))

    def _accepted(self, key: str | None) -> list[Accepted]:
        mine = [kept for kept in reversed(self._kept.values()) if kept.job.key == key and kept.claim is not None]
        return [
            Accepted(kept.job.id, kept.claim.idempotency_key, kept.claim.digest, kept.job.created_at)
            for kept in mine
            if kept.claim is not None
        ]

    def _keep(self, before: Job | None, after: Job, kept: _Kept, lease_until: float | None = None) -> Job:
        """Keep a job as it is now, with its line of history, and tell of it."""
        if is_event(before, after):
            self._revision += 1
            after = after.model_copy(update={"revision": self._revision})
            line = JobEvent(self._revision, after.id, self._clock(), after.status, after.phase, after.progress)
            self._events.setdefault(after.id, []).append(line)
        lease = None if after.owner is None else lease_until or kept.lease_until
        self._kept[after.id] = _Kept(after, kept.claim, lease)
        self._tell(after.id)
        return after


def _due_at(job: Job) -> float:
    return math.inf if job.webhook is None or job.webhook.due_at is None else job.webhook.due_at
