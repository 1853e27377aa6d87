"""The job store in SQL. It works in threads of its own, so the event loop never waits for a disk or a network.

Runs in the diffusion API process.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from sqlalchemy.exc import DBAPIError

from diffusion_service.jobs.idempotency import Idempotency
from diffusion_service.jobs.job import Job
from diffusion_service.jobs.sql import reads, writes
from diffusion_service.jobs.sql.database import THREADS, database_url, is_shared, open_engine
from diffusion_service.jobs.sql.recent import RecentJobs
from diffusion_service.jobs.sql.upgrade import upgrade
from diffusion_service.jobs.store import Changes, Choose, Held, JobEvent, JobPage, Order, Tell, Transit, silent
from shared_schema.errors import DeployError, StoreUnavailable
from shared_schema.videos import VideoStatus

R = TypeVar("R")


class SqlJobStore:
    """A `JobStore` in a database; see there for what its calls do.

    Raises (when built):
        DeployError: the URL is wrong, or the database cannot be used by this program.
    """

    def __init__(self, url: str, *, tell: Tell = silent, clock: Callable[[], float] = time.time) -> None:
        self._engine = open_engine(database_url(url))
        try:
            upgrade(self._engine)
        except DeployError:
            self._engine.dispose()
            raise
        self._shared = is_shared(self._engine)
        self._threads = ThreadPoolExecutor(THREADS if self._shared else 1, thread_name_prefix="job-store")
        self._recent = None if self._shared else RecentJobs()
        self._tell = tell
        self._clock = clock

    @property
    def shared(self) -> bool:
        return self._shared

    async def add(self, job: Job, limit: int, *, key_limit: int | None = None, claim: Idempotency | None = None) -> Job:
        now = self._clock()
        return await self._tells(
            lambda kept: job.id if kept.id == job.id else None, writes.add, job, limit, key_limit, claim, now
        )

    async def get(self, job_id: str) -> Job | None:
        kept = None if self._recent is None else self._recent.get(job_id)
        return kept or await self._run(reads.read, job_id)

    async def change(self, job_id: str, transition: Transit, *, instance: str | None = None) -> Job:
        return await self._tells(_id, writes.change, job_id, transition, instance, self._clock())

    async def page(self, after: str | None, limit: int, order: Order, *, key: str | None = None) -> JobPage:
        return await self._run(reads.page, after, limit, order, key)

    async def places(self, jobs: Sequence[Job]) -> dict[str, int]:
        queued = [job for job in jobs if job.status == "queued"]
        return await self._run(reads.places, queued) if queued else {}

    async def queued(self) -> int:
        return await self._run(reads.count_queued)

    async def unfinished(self) -> list[Job]:
        return await self._run(reads.unfinished)

    async def expired(self, now: float) -> list[Job]:
        return await self._run(reads.expired, now)

    async def ids(self, status: VideoStatus | None = None) -> frozenset[str]:
        return await self._run(reads.ids, status)

    async def remove(self, job_id: str) -> None:
        await self._tells(lambda removed: job_id if removed else None, writes.remove, job_id)

    async def claim(self, instance: str, now: float, lease_s: float, choose: Choose) -> Job | None:
        return await self._tells(_id, writes.claim, instance, now, lease_s, choose)

    async def renew(self, instance: str, now: float, lease_s: float) -> Held:
        return await self._run(writes.renew, instance, now, lease_s)

    async def reclaim(self, now: float, transition: Transit) -> list[Job]:
        return await self._each(partial(writes.reclaim_one, now=now, transition=transition))

    async def events(self, job_id: str, after: int | None = None) -> list[JobEvent]:
        return await self._run(reads.events, job_id, after)

    async def changes(self, after: int | None) -> Changes:
        return await self._run(reads.changes, after)

    async def due_webhooks(self, now: float, hold_s: float, limit: int) -> list[Job]:
        return await self._each(partial(writes.hold_webhook, now=now, hold_s=hold_s), limit)

    async def close(self) -> None:
        # Callers that were cancelled leave transactions behind, whose connections come back only now.
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._engine.dispose)

    async def _each(self, work: Callable[..., Job | None], limit: int | None = None) -> list[Job]:
        """One transaction a job, until there is none left or enough are had."""
        jobs: list[Job] = []
        while len(jobs) != limit and (job := await self._tells(_id, work)) is not None:
            jobs.append(job)
        return jobs

    async def _run(self, work: Callable[..., R], *arguments: object) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(self._transact, work, *arguments))

    async def _tells(self, of: Callable[[R], str | None], work: Callable[..., R], *arguments: object) -> R:
        """Run a change and tell of the job that `of` names.

        From the thread: a caller that is cancelled meanwhile leaves a change that is kept all the same.
        """
        loop = asyncio.get_running_loop()

        def run() -> R:
            made = self._transact(work, *arguments)
            if job_id := of(made):
                if self._recent is not None and not isinstance(made, Job):
                    self._recent.drop(job_id)
                loop.call_soon_threadsafe(self._tell, job_id)
            return made

        return await loop.run_in_executor(self._threads, run)

    def _transact(self, work: Callable[..., R], *arguments: object) -> R:
        try:
            with self._engine.begin() as connection:
                done = work(connection, *arguments)
        except DBAPIError as error:
            if self._recent is not None:
                self._recent.clear()
            raise StoreUnavailable("the job store does not work now; try again") from error
        if self._recent is not None and isinstance(done, Job):
            self._recent.put(done)
        return done


def _id(job: Job | None) -> str | None:
    return None if job is None else job.id
