"""Drives jobs: encode, transfer, generate, publish; the next one is encoded while this one is made.

Runs in the diffusion API process. Every job under way is one `_Conduct` with one asyncio task. The oldest of them is
the one that is `in_progress`; another may be encoded ahead of its turn and still shows as queued.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from diffusion_service.commands import ClipDone, DiffusionEvent, Muxing, PayloadTaken, StepDone
from diffusion_service.encoder_client import EncoderAway
from diffusion_service.engine import Engine
from diffusion_service.handover import Handover, Landed
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.job import ClipResult, Job, JobFailure, Transition
from diffusion_service.jobs.store import JobStore
from shared_schema.errors import (
    H3Error,
    JobFailed,
    NotFound,
    NotReady,
    PayloadError,
    RankDied,
    RankFailed,
    RequestError,
    TransportError,
)
from shared_schema.videos import Phase

logger = logging.getLogger(__name__)

SWEEP_S = 1.0
UNDER_WAY = 2
"""Jobs at once: one that is made, one that is encoded ahead."""


@dataclass
class _Conduct:
    """One job under way."""

    job: Job
    task: asyncio.Task[None] | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    started: bool = False
    phase: Phase = "queued"
    done: int = 0
    of: int = 1
    writer: asyncio.Task[None] | None = None
    """Writes progress to the store as fast as the store takes it."""
    cancelled: bool = False
    """Its caller does not want it any more; otherwise a cancelled task means that the service stops."""


class JobRunner:
    """The only one that changes jobs after they were accepted."""

    def __init__(
        self,
        store: JobStore,
        artifacts: Artifacts,
        handover: Handover,
        engine: Engine,
        *,
        retention_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._handover = handover
        self._engine = engine
        self._retention_s = retention_s
        self._clock = clock
        self._under_way: dict[str, _Conduct] = {}
        self._woken = asyncio.Event()
        self._encode_turn = asyncio.Lock()
        self._generate_turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._admitting = True

    # What the API asks

    def wake(self) -> None:
        """A job was added."""
        self._woken.set()

    async def cancel(self, job_id: str) -> Job:
        """Stop a job; returns once it is final and nothing works on it any more. Repeating it changes nothing.

        Raises:
            NotFound: no such job.
        """
        conduct = self._under_way.get(job_id)
        if conduct is not None and conduct.task is not None:
            conduct.cancelled = True
            # A task that is cancelled before its first step never runs, not even its clean-up.
            await conduct.begun.wait()
            conduct.task.cancel()
            await asyncio.wait([conduct.task])
        else:
            with contextlib.suppress(Transition):
                await self._store.change(job_id, lambda job: job.cancel(self._clock(), self._retention_s))
                await self._ended(job_id)
        job = await self._store.get(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}")
        return job

    async def remove(self, job_id: str) -> None:
        """Stop a job and forget it with everything that belongs to it.

        Raises:
            NotFound: no such job.
        """
        await self.cancel(job_id)
        await self._store.remove(job_id)
        await asyncio.to_thread(self._artifacts.remove, job_id)

    async def wait(self, job_id: str, timeout_s: float) -> Job | None:
        """The job once it is final, or None if that takes longer than `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    changed = self._changed
                    job = await self._store.get(job_id)
                    if job is None or job.finished:
                        return job
                    await changed.wait()
        return None

    def eta(self, job: Job) -> float | None:
        """Seconds until the job is final, judged by its own pace so far; None while there is none."""
        if job.status != "in_progress" or job.started_at is None or job.progress < 1:
            return None
        spent = self._clock() - job.started_at
        return round(spent * (100 - job.progress) / job.progress, 1)

    # Life

    async def recover(self) -> None:
        """After a start: what was under way begins again, once; half-written files and lost inputs go."""
        for job in await self._store.unfinished():
            if job.status == "in_progress":
                await self._again_or_fail(job, JobFailure(code="worker_died", message="the service stopped"))
        unfinished = {job.id for job in await self._store.unfinished()}
        removed = await asyncio.to_thread(self._artifacts.sweep, await self._store.ids(), unfinished)
        if removed:
            logger.info("removed %d leftovers of jobs that are over", removed)

    async def run(self) -> None:
        """Work until cancelled; jobs under way are then put back."""
        sweeping = asyncio.create_task(self._sweep(), name="sweep jobs")
        try:
            while True:
                self._woken.clear()
                if not await self._admit():
                    await self._woken.wait()
        finally:
            sweeping.cancel()
            for conduct in list(self._under_way.values()):
                if conduct.task is not None:
                    conduct.task.cancel()
            tasks = [conduct.task for conduct in self._under_way.values() if conduct.task is not None]
            if tasks:
                await asyncio.wait(tasks)

    async def drain(self, limit_s: float) -> None:
        """Admit nothing new and let the job that is being made finish, for at most `limit_s` seconds."""
        self._admitting = False
        first = next(iter(self._under_way.values()), None)
        if first is not None and first.task is not None:
            await asyncio.wait([first.task], timeout=limit_s)

    async def _admit(self) -> bool:
        """Take the next queued job, if there is one and room for it."""
        if not self._admitting or len(self._under_way) >= UNDER_WAY:
            return False
        job = await self._store.next_queued(skip=tuple(self._under_way))
        if job is None:
            return False
        conduct = self._under_way[job.id] = _Conduct(job)
        conduct.task = asyncio.create_task(self._conduct(conduct), name=job.id)
        return True

    async def _conduct(self, conduct: _Conduct) -> None:
        """One job from queue to end, whatever that is."""
        job = conduct.job
        conduct.begun.set()
        try:
            try:
                await self._make(conduct)
            finally:
                if conduct.writer is not None:
                    conduct.writer.cancel()
        except asyncio.CancelledError:
            await self._stopped(conduct)
        except Transition as error:
            logger.info("%s", error)
        except Exception as error:
            await self._failed(conduct, error)
        finally:
            del self._under_way[job.id]
            self.wake()
            await self._promote()

    async def _make(self, conduct: _Conduct) -> None:
        async with self._encode_turn:
            landed = await self._land(conduct)
        if landed is None:
            return
        try:
            async with self._generate_turn:
                await self._promote()
                await self._generate(conduct, landed)
        finally:
            self._handover.release(landed)

    async def _land(self, conduct: _Conduct) -> Landed | None:
        """The job's payload in its landing, or None if the job was cancelled while it waited for the encoder."""
        job = conduct.job
        while True:
            await self._engine.until_ready()
            await self._handover.until_ready(job)
            current = await self._store.get(job.id)
            if current is None or current.finished:
                return None
            await self._promote()
            try:
                return await self._handover.land(job, lambda phase: self._reach(conduct, phase, 0, 1))
            except NotReady:
                # It has not begun: its ranks went since we last looked, and come again.
                self._handover.lost()

    async def _generate(self, conduct: _Conduct, landed: Landed) -> None:
        job = conduct.job
        await self._engine.until_ready()
        await self._store.change(job.id, lambda now: now.encoded(landed.references, landed.durations))
        self._reach(conduct, "denoising", 0, 1)

        def hear(event: DiffusionEvent) -> None:
            match event:
                case PayloadTaken():
                    self._handover.release(landed)
                case StepDone(done, of):
                    self._reach(conduct, "denoising", done, of)
                case ClipDone(done, of):
                    self._reach(conduct, "decoding", done, of)
                case Muxing():
                    self._reach(conduct, "muxing", 0, 1)

        parts = tuple(self._artifacts.part(job.id, index) for index in range(job.plan.num_outputs))
        generated = await self._engine.generate(job.plan, landed.landing, landed.manifest, landed.media, parts, hear)
        result = ClipResult(
            outputs=generated.outputs,
            stage_durations=generated.timings,
            execution=self._engine.execution,
            warnings=generated.warnings,
            peak_memory_mb=generated.peak_memory_mb,
        )
        await asyncio.to_thread(self._artifacts.publish, job.id, job.plan.num_outputs)
        await self._store.change(job.id, lambda now: now.complete(result, self._clock(), self._retention_s))
        await self._ended(job.id)

    # Progress

    async def _promote(self) -> None:
        """The oldest job under way is the one in progress."""
        conduct = next(iter(self._under_way.values()), None)
        if conduct is None or conduct.started:
            return
        conduct.started = True
        with contextlib.suppress(Transition, NotFound):
            await self._store.change(conduct.job.id, lambda job: job.start(self._clock()))
            await self._write(conduct)

    def _reach(self, conduct: _Conduct, phase: Phase, done: int, of: int) -> None:
        """Note progress; it is written as fast as the store takes it, the latest first."""
        conduct.phase, conduct.done, conduct.of = phase, done, of
        if conduct.started and (conduct.writer is None or conduct.writer.done()):
            conduct.writer = asyncio.create_task(self._write(conduct))

    async def _write(self, conduct: _Conduct) -> None:
        written = None
        while written != (now := (conduct.phase, conduct.done, conduct.of)):
            with contextlib.suppress(Transition, NotFound):
                await self._store.change(conduct.job.id, _reaching(*now))
            written = now

    # Ends

    async def _stopped(self, conduct: _Conduct) -> None:
        """The task was cancelled: by the job's caller, or because the service stops."""
        job_id = conduct.job.id
        with contextlib.suppress(Transition, NotFound):
            if conduct.cancelled:
                await self._store.change(job_id, lambda job: job.cancel(self._clock(), self._retention_s))
                await self._ended(job_id)
            else:
                await self._store.change(job_id, lambda job: job.put_back())

    async def _failed(self, conduct: _Conduct, error: Exception) -> None:
        failure = failure_of(error)
        if failure.code == "internal_error":
            logger.error("job %s failed", conduct.job.id, exc_info=error)
        if isinstance(error, EncoderAway | RankDied):
            self._handover.lost()
        with contextlib.suppress(Transition, NotFound):
            job = await self._store.change(conduct.job.id, _begun(self._clock()))
            await self._again_or_fail(job, failure)

    async def _again_or_fail(self, job: Job, failure: JobFailure) -> None:
        if job.may_retry(failure):
            logger.warning("job %s goes back to the queue: %s", job.id, failure.message)
            await self._store.change(job.id, lambda now: now.requeue())
            return
        logger.warning("job %s failed: %s: %s", job.id, failure.code, failure.message)
        await self._store.change(job.id, lambda now: now.fail(failure, self._clock(), self._retention_s))
        await self._ended(job.id)

    async def _ended(self, job_id: str) -> None:
        """A job is final: its inputs and half-written clip go, and whoever waits is told."""
        await asyncio.to_thread(self._artifacts.drop_inputs, job_id)
        await asyncio.to_thread(self._artifacts.drop_part, job_id)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _sweep(self) -> None:
        """Records and files of a job expire together."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for job in await self._store.expired(self._clock()):
                await self._store.remove(job.id)
                await asyncio.to_thread(self._artifacts.remove, job.id)
            self._handover.expire()


def _reaching(phase: Phase, done: int, of: int) -> Callable[[Job], Job]:
    return lambda job: job.advance(phase, done, of)


def _begun(now: float) -> Callable[[Job], Job]:
    """A transition to `in_progress` for a job that failed before its turn came."""
    return lambda job: job.start(now) if job.status == "queued" else job


def failure_of(error: Exception) -> JobFailure:
    """Why a job failed, for its caller."""
    match error:
        case JobFailed() | RankFailed():
            return JobFailure(code=error.code, message=error.message, param=error.param)
        case RankDied():
            return JobFailure(code="worker_died", message=error.message)
        case EncoderAway():
            return JobFailure(code="encoder_unavailable", message=error.message)
        case PayloadError() | TransportError():
            return JobFailure(code="transfer_failed", message=error.message)
        case RequestError() if error.status < 500:
            return JobFailure(code="invalid_input", message=error.message, param=error.param)
        case H3Error():
            return JobFailure(code="encoder_unavailable", message=error.message)
        case _:
            return JobFailure(code="internal_error", message=f"{type(error).__name__}: {error}")
