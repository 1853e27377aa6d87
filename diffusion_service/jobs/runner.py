"""Drives jobs: takes them from the queue, has each conducted to its end, and stops them. Diffusion API process.

Every job under way is one `Conduct` with one asyncio task. The first in line is the one that is `in_progress`, beside
one whose file is being finished; those behind it are encoded ahead of their turn and still show as queued.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from diffusion_service.engine import Engine
from diffusion_service.handover import Handover
from diffusion_service.jobs.accounts import JobAccounts, QueueState
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.conduct import PARTING_S, Conduct
from diffusion_service.jobs.feed import JobFeed
from diffusion_service.jobs.job import Job, Transition
from diffusion_service.jobs.line import Line
from diffusion_service.jobs.progress import by_its_own_pace
from diffusion_service.jobs.store import JobStore
from diffusion_service.jobs.upkeep import Upkeep
from diffusion_service.jobs.workshop import RunnerRules, Workshop, insist
from diffusion_service.scheduler import Key, Waiting, choose, overtakes, turn_of
from shared_runtime.spans_out import Export
from shared_schema.errors import NotFound, NotReady

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between looks at the queue when nobody says that there is work: other services hand jobs back."""
RECENT = 100
"""Keys of the jobs taken last, which share fairly."""
REMOTE_S = 60.0
"""For another service to stop a job that it works on, or to be found gone."""
HISTORY = 100
"""Jobs of earlier starts from which the pace is learned."""


class JobRunner:
    """The only one that changes jobs after they were accepted."""

    def __init__(
        self,
        store: JobStore,
        artifacts: Artifacts,
        handover: Handover,
        engine: Engine,
        rules: RunnerRules,
        feed: JobFeed,
        accounts: JobAccounts,
        export: Export,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._rules = rules
        self._feed = feed
        self._clock = clock
        self._workshop = Workshop(store, artifacts, handover, engine, rules, accounts, export, uuid.uuid4().hex, clock)
        self._line: Line[Conduct] = Line()
        self._upkeep = Upkeep(self._workshop, self._line)
        self._recent: deque[Key] = deque(maxlen=RECENT)
        self._taken = 0
        self._woken = asyncio.Event()
        self._admission = asyncio.Lock()
        self._admitting = True

    # What the API asks

    def wake(self) -> None:
        """A job was added."""
        self._woken.set()

    async def cancel(self, job_id: str) -> Job:
        """Stop a job; returns once it is final and nothing works on it any more. Repeating it changes nothing.

        Raises:
            NotFound: no such job.
            NotReady: another service works on it and has not stopped in time.
        """
        try:
            async with asyncio.timeout(REMOTE_S):
                while not (job := await self._stopped(job_id)).finished:
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise NotReady(f"another service works on job {job_id} and has not stopped yet; try again") from error
        return job

    async def _stopped(self, job_id: str) -> Job:
        """The job after this service has done what it can to stop it."""
        async with self._admission:
            conduct = self._line.find(job_id)
        if conduct is not None:
            conduct.stop("cancelled")
            await conduct.over.wait()
        job = await self._store.get(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}")
        if job.finished or (job.cancel_requested and job.owner is not None):
            return job
        with contextlib.suppress(Transition):
            now = self._clock()
            job = await self._store.change(job_id, lambda each: each.ask_cancel(now, self._rules.retention_s))
            if job.finished:
                await self._workshop.ended(job)
        return job

    async def remove(self, job_id: str) -> None:
        """Stop a job and forget it with everything that belongs to it.

        Raises:
            NotFound, NotReady: as from `cancel`.
        """
        await self.cancel(job_id)
        # Files first: a store of clips that is away is a 503, and the same DELETE works later.
        await asyncio.to_thread(self._workshop.artifacts.remove, job_id)
        await self._store.remove(job_id)

    async def wait(self, job_id: str, timeout_s: float) -> Job | None:
        """The job once it is final, or None if that takes longer than `timeout_s`, or than this service lives."""
        with contextlib.suppress(TimeoutError), self._feed.watch(job_id) as watch:
            async with asyncio.timeout(timeout_s):
                while True:
                    job = await self._store.get(job_id)
                    if job is None or job.finished:
                        return job
                    if not await watch.changed():
                        return None
        return None

    def eta(self, job: Job, position: int | None = None) -> float | None:
        """Seconds until the job is final, at the pace of the jobs before it; None while that is not known.

        `position` is that of a queued job, from 1.
        """
        if job.status == "in_progress":
            left = self._left(self._line.find(job.id))
            return by_its_own_pace(job, self._clock()) if left is None else round(left, 1)
        whole = self._workshop.pace.whole(job.plan)
        if job.status != "queued" or position is None or whole is None:
            return None
        before = (position - 1) * (self._workshop.pace.job_s or whole)
        return round((self._left(self._line.first) or 0.0) + before + whole, 1)

    def step(self, job: Job) -> int | None:
        """Forwards finished of the output that is being made; None unless this service denoises the job now."""
        conduct = self._line.find(job.id)
        course = None if conduct is None else conduct.course
        if course is None or course.stage != "denoising" or job.status != "in_progress":
            return None
        return round(course.part * job.plan.forwards)

    def _left(self, conduct: Conduct | None) -> float | None:
        return None if conduct is None or conduct.course is None else conduct.course.left(self._workshop.ticks())

    def queue(self, limit: int) -> QueueState:
        """How much there is to do; nobody is asked."""
        return QueueState(self._upkeep.queued, limit, len(self._line))

    # Life

    async def recover(self) -> None:
        """After a start: what was under way begins again, once; half-written files and lost inputs go."""
        await self._upkeep.recover()
        finished = await self._store.page(None, HISTORY, "desc")
        for job in reversed(finished.jobs):
            self._workshop.learn(job)

    async def run(self) -> None:
        """Work until cancelled; jobs under way are then put back."""
        upkeep = asyncio.create_task(self._upkeep.run(), name="upkeep")
        try:
            while True:
                self._woken.clear()
                if not await insist(self._admit):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await self._woken.wait()
                if upkeep.done():
                    upkeep.result()
        finally:
            upkeep.cancel()
            await self._hand_back(list(self._line))

    async def drain(self, limit_s: float) -> None:
        """Take nothing new, hand back what has not begun, and let the job that is being made finish, and the one whose
        file is, for at most `limit_s` seconds; then hand them back too.
        """
        self._admitting = False
        async with self._admission:
            made = [conduct for conduct in self._line if conduct.decoded or conduct is self._line.first]
            waiting = [conduct for conduct in self._line if conduct not in made]
        await self._hand_back(waiting)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for conduct in made:
                    await conduct.over.wait()
        await self._hand_back(made)

    @staticmethod
    async def _hand_back(conducts: list[Conduct]) -> None:
        for conduct in conducts:
            conduct.stop("put_back")
        for conduct in conducts:
            # One at its last word may be waiting for a database that is away; its lease will be over.
            limit = PARTING_S if conduct.ending else None
            try:
                async with asyncio.timeout(limit):
                    await conduct.over.wait()
            except TimeoutError:
                logger.warning("job %s is left: its end could not be kept", conduct.id)

    async def _admit(self) -> bool:
        """Take the next queued job, if there is one and room for it."""
        async with self._admission:
            if not self._admitting or any(conduct.starving for conduct in self._line):
                return False
            last = self._line.last_ahead
            full = self._line.ahead > self._rules.look_ahead
            if full and last is None:
                return False
            job = await self._claim(last.waiting if full and last is not None else None)
            if job is None:
                return False
            self._taken += 1
            self._recent.append(job.key)
            turn = turn_of(Waiting(job.id, job.sequence, job.priority, job.key), self._taken)
            Conduct(job, turn, self._workshop, self._line).start(self._freed)
            if full and last is not None and not last.begun:
                last.stop("put_back")
            return True

    async def _claim(self, last: Waiting | None) -> Job | None:
        """The next job by the policy, this service's from now on; if there is no room, only one that goes before
        `last`.
        """

        def pick(candidates: Sequence[Waiting], running: Mapping[Key, int]) -> str | None:
            if last is not None:
                candidates = [each for each in candidates if overtakes(each, last)]
            return choose(candidates, running, self._recent, self._rules.running_per_key)

        return await self._store.claim(self._workshop.instance, self._clock(), self._rules.lease_s, pick)

    def _freed(self) -> None:
        """The ranks are done with a job, or it is over: there is room for another, and the next one may begin."""
        first = self._line.first
        if first is not None:
            first.moved()
        self.wake()
