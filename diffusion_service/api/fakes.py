"""Stand-ins for runner and health, for tests of the API alone: nothing is made unless the test says so."""

import asyncio
from collections.abc import Callable

from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.job import ClipResult, Job, JobFailure
from diffusion_service.jobs.store import JobStore
from shared_schema.errors import NotFound
from shared_schema.health import Health
from shared_schema.videos import Execution, VideoOutput


class FakeHealth:
    """Says what it is told."""

    def __init__(self) -> None:
        self.draining = False
        self.reason: str | None = None

    def report(self) -> Health:
        """Healthy without a reason."""
        return Health(status="unhealthy" if self.reason else "healthy", reason=self.reason)


class FakeRunner:
    """Holds every job where it is until `finish` or `fail` is called."""

    def __init__(self, store: JobStore, artifacts: Artifacts, clock: Callable[[], float], retention_s: float) -> None:
        self._store = store
        self._artifacts = artifacts
        self._clock = clock
        self._retention_s = retention_s
        self._ended = asyncio.Condition()
        self.wakes = 0
        self.cancelled: list[str] = []

    def wake(self) -> None:
        """Counted."""
        self.wakes += 1

    async def finish(self, job_id: str, *clips: bytes) -> Job:
        """The job completes with these bytes as its clips."""
        for index, clip in enumerate(clips):
            self._artifacts.part(job_id, index).write_bytes(clip)
        self._artifacts.publish(job_id, len(clips))
        execution = Execution(
            device="cpu", torch="0", tp=1, ulysses=1, precision="fp32", attention="native", load_format="safetensors"
        )
        outputs = tuple(
            VideoOutput(index=index, seed=1 + index, frames_sha256="0" * 64, audio_sha256="0" * 64, bytes=len(clip))
            for index, clip in enumerate(clips)
        )
        result = ClipResult(outputs=outputs, stage_durations={"denoise": 1.0}, execution=execution)
        now = self._clock()
        await self._store.change(job_id, lambda job: job.start(now))
        return await self._end(job_id, lambda job: job.complete(result, now, self._retention_s))

    async def fail(self, job_id: str, failure: JobFailure) -> Job:
        """The job fails."""
        return await self._end(job_id, lambda job: job.fail(failure, self._clock(), self._retention_s))

    async def cancel(self, job_id: str) -> Job:
        """See `Runner.cancel`."""
        self.cancelled.append(job_id)
        return await self._end(
            job_id, lambda job: job if job.finished else job.cancel(self._clock(), self._retention_s)
        )

    async def remove(self, job_id: str) -> None:
        """See `Runner.remove`."""
        if await self._store.get(job_id) is None:
            raise NotFound(f"there is no video {job_id}")
        await self._store.remove(job_id)
        self._artifacts.remove(job_id)
        async with self._ended:
            self._ended.notify_all()

    async def wait(self, job_id: str, timeout_s: float) -> Job | None:
        """See `Runner.wait`."""
        try:
            async with asyncio.timeout(timeout_s), self._ended:
                while (job := await self._store.get(job_id)) is not None and not job.finished:
                    await self._ended.wait()
                return job
        except TimeoutError:
            return None

    def eta(self, job: Job, position: int | None = None) -> float | None:
        """One second a job."""
        return float(job.sequence)

    def step(self, job: Job) -> int | None:
        """The second step of whatever is denoised."""
        return 2 if job.status == "in_progress" and job.phase == "denoising" else None

    async def _end(self, job_id: str, transition: Callable[[Job], Job]) -> Job:
        ended = await self._store.change(job_id, transition)
        async with self._ended:
            self._ended.notify_all()
        return ended
