"""What keeps the queue healthy while jobs are made: leases, jobs of services that are gone, retention. API process."""

import asyncio
import contextlib
import logging
import math

from diffusion_service.jobs.conduct import Conduct
from diffusion_service.jobs.job import Job, JobFailure, Transition
from diffusion_service.jobs.line import Line
from diffusion_service.jobs.workshop import Workshop
from shared_schema.errors import NotFound, StorageUnavailable, StoreUnavailable

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
SWEEP_S = 900.0
"""Between looks for what killed services have left on a shelf that several use."""
AWAY_S = 15.0
"""Until another try to remove what is over, after one that failed."""


class Upkeep:
    """One round a second, as long as the service runs."""

    def __init__(self, workshop: Workshop, line: Line[Conduct]) -> None:
        self._workshop = workshop
        self._line = line
        self._renewed = workshop.ticks()
        self._swept = workshop.ticks()
        self._strays: frozenset[str] = frozenset()
        self._tidying: asyncio.Task[None] | None = None
        self.queued = 0
        """Jobs that are queued, as the store had it in the last round."""

    async def run(self) -> None:
        """For ever. A database that does not answer is waited for; jobs whose lease is over meanwhile are let go."""
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                await self._round()
        finally:
            if self._tidying is not None:
                self._tidying.cancel()

    async def _round(self) -> None:
        self._workshop.handover.expire()
        try:
            await self._renew()
            await self.reclaim(self._workshop.clock())
            self.queued = await self._workshop.store.queued()
        except StoreUnavailable as error:
            logger.warning("the database does not answer: %s", error.message)
        if self._workshop.ticks() - self._renewed > self._workshop.rules.lease_s:
            self._let_go(list(self._line))
        if self._tidying is None or self._tidying.done():
            if self._tidying is not None:
                self._tidying.result()
            # Beside the rounds: a store of clips may be slow, and leases have to be renewed.
            self._tidying = asyncio.create_task(self._tidy(), name="tidy")

    async def _tidy(self) -> None:
        try:
            await self._expire()
            await self._sweep()
        except (StoreUnavailable, StorageUnavailable) as error:
            logger.warning("what is over cannot be removed now: %s", error.message)
            await asyncio.sleep(AWAY_S)

    async def _renew(self) -> None:
        """Keep this service's jobs. Stop those that are another's by now, or that nobody wants any more."""
        workshop, asked_at, here = self._workshop, self._workshop.ticks(), list(self._line)
        held = await workshop.store.renew(workshop.instance, workshop.clock(), workshop.rules.lease_s)
        self._renewed = asked_at
        self._let_go([conduct for conduct in here if conduct.id not in held.jobs])
        for conduct in here:
            if conduct.id in held.cancelled:
                conduct.stop("cancelled")
        await self._hand_back_strays(held.jobs)

    async def _hand_back_strays(self, owned: frozenset[str]) -> None:
        """What this service owns and does not work on, for two rounds: its last word was lost with the database."""
        strays = frozenset(job_id for job_id in owned if self._line.find(job_id) is None)
        for job_id in strays & self._strays:
            logger.warning("job %s is handed back: nobody works on it", job_id)
            with contextlib.suppress(Transition, NotFound):
                await self._workshop.change(job_id, lambda job: job.handed_back())
        self._strays = strays

    @staticmethod
    def _let_go(conducts: list[Conduct]) -> None:
        for conduct in conducts:
            conduct.stop("lost")

    async def recover(self) -> None:
        """After a start: what this service worked on begins again, once; half-written files and lost inputs go."""
        store, artifacts = self._workshop.store, self._workshop.artifacts
        # Nobody else works on a store that is this service's alone: whatever is owned was its own.
        await self.reclaim(self._workshop.clock() if store.shared else math.inf)
        for job in await store.unfinished():
            if job.status == "in_progress" and job.owner is None:
                await self._orphaned(await store.change(job.id, self._orphaning))
        unfinished = {job.id for job in await store.unfinished()}
        try:
            _tell(await asyncio.to_thread(artifacts.sweep, await store.ids("completed"), unfinished))
        except StorageUnavailable as error:
            logger.warning("leftovers of jobs that are over stay for now: %s", error.message)

    async def _sweep(self) -> None:
        """What another service of a shared store left when it was killed goes while this one runs."""
        store, now = self._workshop.store, self._workshop.ticks()
        if not store.shared or now - self._swept < SWEEP_S:
            return
        self._swept = now
        unfinished = {job.id for job in await store.unfinished()}
        completed = await store.ids("completed")
        _tell(await asyncio.to_thread(self._workshop.artifacts.sweep_shelf, completed, unfinished))

    async def reclaim(self, now: float) -> None:
        """Jobs whose service is gone begin again, once, or fail."""
        for job in await self._workshop.store.reclaim(now, self._orphaning):
            await self._orphaned(job)

    def _orphaning(self, job: Job) -> Job:
        failure = JobFailure(code="worker_died", message="the service stopped")
        return job.orphaned(failure, self._workshop.clock(), self._workshop.rules.retention_s)

    async def _orphaned(self, job: Job) -> None:
        logger.warning("job %s was left by its service: it is %s, attempt %d", job.id, job.status, job.attempt)
        if job.finished:
            await self._workshop.ended(job)

    async def _expire(self) -> None:
        """Record and files of a job expire together."""
        store, artifacts = self._workshop.store, self._workshop.artifacts
        for job in await store.expired(self._workshop.clock()):
            # Files first: without a record nobody would look for them.
            await asyncio.to_thread(artifacts.remove, job.id)
            await store.remove(job.id)


def _tell(removed: int) -> None:
    if removed:
        logger.info("removed %d leftovers of jobs that are over", removed)
