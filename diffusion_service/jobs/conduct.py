"""One job under way, from the queue to its end, as one asyncio task. Diffusion API process.

It waits for an encoder and has its payload landed, waits until it is first in line, has its clips made, and publishes
them. Whatever happens on the way, the job is left in a state that says so.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

from diffusion_service.commands import ChunkDone, DiffusionEvent, Muxing, PayloadTaken, SoundDone, StepDone
from diffusion_service.handover import Landed
from diffusion_service.jobs.failure import failure_of
from diffusion_service.jobs.job import ClipResult, Job, JobFailure, Transition
from diffusion_service.jobs.line import Line
from diffusion_service.jobs.progress import Course, Stage, phase_of
from diffusion_service.jobs.trace import JobTrace
from diffusion_service.jobs.workshop import Workshop
from diffusion_service.scheduler import Turn, Waiting
from shared_runtime.tracing import span
from shared_schema.encode import EncodeProgress
from shared_schema.errors import JobFailed, NotFound
from shared_schema.videos import Phase

logger = logging.getLogger(__name__)

PARTING_S = 5.0
"""For the last word of a job that is stopped, should the database be away."""
PERCENT_EVERY_S = 0.25
"""Between two percentages of one phase in the store at most, since every change wakes all who listen."""
SHORT_JOB_S = 3.0
"""Of a job that is not expected to take longer nothing is held back: it is told in as many steps."""

Stop = Literal["cancelled", "put_back", "lost"]
"""Its caller does not want it; this service cannot go on with it; it belongs to another service."""


class Conduct:
    """One job under way. `start` it once; `over` is set when nothing works on it any more."""

    def __init__(self, job: Job, turn: Turn, workshop: Workshop, line: "Line[Conduct]") -> None:
        self.job = job
        self.turn = turn
        self.begun = self.decoded = self.landed = self.starving = False
        self.over = asyncio.Event()
        self.course: Course | None = None
        """None until the job is in progress."""
        self._workshop = workshop
        self._line = line
        self._stage: Stage | None = None
        """What was reached before the job was in progress."""
        self._stop: Stop | None = None
        self._running = self._ending = False
        self._limit = asyncio.timeout(None)
        self._limited = True
        self._beginning = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        """Writes progress to the store, the latest first."""
        self._turned = asyncio.Event()
        """Another phase has begun since the last write."""
        self._task: asyncio.Task[None] | None = None
        self._freed: Callable[[], None] = lambda: None
        self._trace = JobTrace(job)

    @property
    def id(self) -> str:
        """Of the job."""
        return self.job.id

    @property
    def ending(self) -> bool:
        """Whether it is at its last word, which nobody stops."""
        return self._ending

    @property
    def waiting(self) -> Waiting:
        """As the scheduler sees it."""
        return Waiting(self.job.id, self.job.sequence, self.job.priority, self.job.key)

    def start(self, freed: Callable[[], None]) -> None:
        """Begin to work; `freed` is called when the ranks have made the clips, and when it is over."""
        self._freed = freed
        self._line.join(self)
        self._task = asyncio.create_task(self._run(), name=self.id)

    def stop(self, reason: Stop) -> None:
        """Stop working within a step, or when the file is whole that the ranks are at, unless the end has begun.

        `over` says when that is done.
        """
        if self._stop is None and not self._ending:
            self._stop = reason
            # A task that is cancelled before its first step would never run, not even its end.
            if self._task is not None and self._running:
                self._task.cancel()

    def moved(self) -> None:
        """The line has moved: this job may be in progress from now on."""
        self._write_soon()

    async def _run(self) -> None:
        self._running = True
        with self._trace.going_on():
            await self._to_its_end()

    async def _to_its_end(self) -> None:
        try:
            await self._work()
        except asyncio.CancelledError:
            await self._parting()
        except (Transition, NotFound) as error:
            logger.info("job %s: %s", self.id, error)
            await self._quiet()
        except Exception as error:
            await self._failed(error)
        finally:
            self._line.leave(self)
            self.over.set()
            self._freed()

    async def _work(self) -> None:
        if self._stop is not None:
            raise asyncio.CancelledError
        try:
            async with self._limit:
                try:
                    await self._make()
                finally:
                    self._limited = False
        except TimeoutError as error:
            if not self._limit.expired():
                raise
            limit = self._workshop.rules.job_timeout_s
            raise JobFailed(f"the job took longer than service.job_timeout_s, {limit:g} s", code="timeout") from error

    async def _make(self) -> None:
        workshop = self._workshop
        await workshop.engine.until_ready()
        landed = await workshop.handover.land(self.job, self)
        self.landed = True
        try:
            with span("wait for its turn"):
                await self._line.turn(self)
            self.begun = True
            result = await self._generate(landed)
        finally:
            landed.use.release()
        finishing = asyncio.create_task(self._finish(result))
        self._ending = True
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            # The clips are made: whoever stops the job now finds it completed.
            await asyncio.wait([finishing])
            finishing.result()

    async def _generate(self, landed: Landed) -> ClipResult:
        workshop, job, kept = self._workshop, self.job, landed.kept
        await workshop.engine.until_ready()
        self.reach("denoising")
        await self._begin()
        await workshop.change(job.id, lambda now: now.encoded(kept.references, landed.durations, landed.cache))

        def hear(event: DiffusionEvent) -> None:
            match event:
                case PayloadTaken():
                    landed.use.release()
                case StepDone(done, of, output, seconds, skipped):
                    workshop.accounts.forward(job.plan.task, seconds, skipped=skipped)
                    self._reached("denoising", done, of, output)
                case SoundDone(output):
                    self._reached("sound", 1, 1, output)
                case ChunkDone(done, of, output):
                    self._reached("decoding", done, of, output)
                case Muxing(output):
                    self._reached("muxing", 0, 1, output)
                    if output == job.plan.num_outputs - 1:
                        self._line.decode(self)
                        self._freed()

        parts = tuple(workshop.artifacts.part(job.id, index) for index in range(job.plan.num_outputs))
        return await workshop.engine.generate(job.plan, kept.landing, kept.manifest, landed.media, parts, hear)

    async def _finish(self, result: ClipResult) -> None:
        """In the order in which jobs were made: the one before may still be published."""
        workshop, job = self._workshop, self.job
        await self._line.end(self)
        with span("publish"):
            await asyncio.to_thread(workshop.artifacts.publish, job.id, job.plan.num_outputs)
        now, retention_s = workshop.clock(), workshop.rules.retention_s
        ended = await workshop.change(
            job.id, lambda before: self._with_trace(before.complete(result, now, retention_s), now)
        )
        workshop.learn(ended)
        await workshop.ended(ended)

    # Progress

    def reach(self, phase: Phase) -> None:
        """A phase begins; see `handover.Watcher`."""
        match phase:
            case "encoding":
                self._reached("media", 0, 1, 0)
            case "transferring" | "denoising" as stage:
                self._reached(stage, 0, 1, 0)
            case _:
                raise ValueError(f"{phase} is told by the ranks")

    def encoded(self, progress: EncodeProgress) -> None:
        """A part of the encoding is finished; see `handover.Watcher`."""
        self._reached(progress.stage, progress.done, progress.of, 0)

    def starve(self, starving: bool) -> None:
        """See `handover.Watcher`."""
        self.starving = starving
        blocked = self._line.blocked_by() if starving else None
        if blocked is not None:
            blocked.stop("put_back")

    def _reached(self, stage: Stage, done: int, of: int, output: int) -> None:
        if self._stage is None or phase_of(self._stage) != phase_of(stage):
            self._turned.set()
        self._stage = stage
        if self.course is not None:
            self.course = self.course.reached(stage, done, of, output, self._workshop.ticks())
        self._write_soon()

    def _write_soon(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())

    async def _begin(self) -> None:
        """The job is in progress, in the store too."""
        async with self._beginning:
            if self.course is not None:
                return
            self.begun = True
            workshop, now = self._workshop, self._workshop.clock()
            await workshop.change(self.id, lambda job: job.start(now))
            if self._limited:  # else it failed already, and the writer of its progress comes too late
                self._limit.reschedule(asyncio.get_running_loop().time() + workshop.rules.job_timeout_s)
            ticks = workshop.ticks()
            self.course = Course.begin(workshop.pace, self.job.plan, ticks)
            if self._stage is not None:
                self.course = self.course.reached(self._stage, 0, 1, 0, ticks)

    async def _write(self) -> None:
        """A job that is first and has been touched is in progress; then what was reached, the latest first."""
        if self._stage is None or not (self.begun or self._line.first is self):
            return
        with contextlib.suppress(Transition, NotFound):
            await self._begin()
            written = None
            while self.course is not None and written != (now_at := (phase_of(self.course.stage), self.course.percent)):
                self._turned.clear()
                await self._workshop.change(self.id, _advancing(*now_at))
                written = now_at
                with contextlib.suppress(TimeoutError):
                    now = self._workshop.ticks()
                    short = now - self.course.started + (self.course.left(now) or 0.0) < SHORT_JOB_S
                    async with asyncio.timeout(0 if short else PERCENT_EVERY_S):
                        await self._turned.wait()

    # Ends

    async def _parting(self) -> None:
        """The task was cancelled: say in the store what becomes of the job."""
        await self._quiet()
        with contextlib.suppress(Transition, NotFound, TimeoutError):
            async with asyncio.timeout(PARTING_S):
                await self._part()

    async def _part(self) -> None:
        workshop = self._workshop
        now, retention_s = workshop.clock(), workshop.rules.retention_s

        def cancelled(job: Job) -> Job:
            return self._with_trace(job.cancel(now, retention_s), now)

        match self._stop:
            case "cancelled":
                await workshop.ended(await workshop.change(self.id, cancelled))
            case "lost":
                logger.warning("job %s is another service's now", self.id)
            case _:
                await workshop.change(self.id, lambda job: job.handed_back())

    async def _failed(self, error: Exception) -> None:
        await self._quiet()
        failure = failure_of(error)
        if failure.code == "internal_error":
            logger.error("job %s failed", self.id, exc_info=error)
        workshop = self._workshop
        now, retention_s = workshop.clock(), workshop.rules.retention_s
        with contextlib.suppress(Transition, NotFound):
            failed = partial(_failing, failure=failure, now=now, retention_s=retention_s)
            job = await workshop.change(self.id, lambda before: self._with_trace(failed(before), now))
            if job.finished:
                logger.warning("job %s failed: %s: %s", job.id, failure.code, failure.message)
                await workshop.ended(job)
            else:
                logger.warning("job %s goes back to the queue: %s", job.id, failure.message)

    def _with_trace(self, job: Job, now: float) -> Job:
        return job.traced(self._trace.ended(job, now)) if job.finished else job

    async def _quiet(self) -> None:
        """From here on nobody stops the task, and nothing of the job's progress is written. Half a clip goes."""
        self._ending = True
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer])
        await asyncio.to_thread(self._workshop.artifacts.drop_part, self.id)


def _advancing(phase: Phase, percent: int) -> Callable[[Job], Job]:
    return lambda job: job.advance(phase, percent)


def _failing(job: Job, *, failure: JobFailure, now: float, retention_s: float) -> Job:
    """The job after a failure; one that failed ahead of its turn has begun by that."""
    begun = job.start(now) if job.status == "queued" else job
    return begun.requeue() if begun.may_retry(failure) else begun.fail(failure, now, retention_s)
