"""Event streams of jobs: every change is read and encoded once, however many listen. Runs in the API process."""

import asyncio
import logging
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from diffusion_service.api.sse import COMMENT, RETRY, deleted_frame, event_frame, last_event_id, state_frame
from diffusion_service.jobs.feed import JobFeed
from diffusion_service.jobs.job import Job
from diffusion_service.jobs.store import JobStore
from shared_schema.errors import StoreUnavailable
from shared_schema.videos import FINAL

COMMENT_S = 15.0
"""A stream says at least this often that it lives."""
WOKEN_AT_ONCE = 16
"""Readers that send in one turn of the event loop: answers to polls go out between the turns."""

logger = logging.getLogger(__name__)


class _EventResponse(StreamingResponse):
    """Lets go of the stream in the moment in which its reader leaves."""

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._frames = frames

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._frames):
            await super().stream_response(send)


@dataclass
class _Log:
    """What the streams of one job have to send, oldest first."""

    revisions: list[int] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    over: bool = False
    """Nothing follows."""
    readers: set[asyncio.Event] = field(default_factory=set)
    """One for each, set when there is more."""

    @property
    def last(self) -> int:
        """Revision of the newest frame."""
        return self.revisions[-1] if self.revisions else 0

    def add(self, revision: int, frame: bytes, *, final: bool) -> None:
        """One more frame."""
        self.revisions.append(revision)
        self.frames.append(frame)
        self.over = final

    def after(self, revision: int) -> bytes:
        """All frames after that revision."""
        return b"".join(self.frames[bisect_right(self.revisions, revision) :])

    async def wake(self) -> None:
        """Let the readers look, a few at a time."""
        for number, reader in enumerate(list(self.readers), 1):
            reader.set()
            if number % WOKEN_AT_ONCE == 0:
                await asyncio.sleep(0)

    def end(self) -> None:
        """Nothing follows: let all readers see that."""
        self.over = True
        for reader in self.readers:
            reader.set()


class EventStreams:
    """Every open stream of this process. A job that nobody listens to costs nothing."""

    def __init__(self, store: JobStore, feed: JobFeed) -> None:
        self._store = store
        self._feed = feed
        self._logs: dict[str, _Log] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def answer(self, job: Job, last_seen: str | None) -> Response:
        """The stream of the job's events after the one that the client names in `Last-Event-ID`.

        204 if that was the last one: it keeps a browser from coming again.

        Raises:
            InvalidRequest: it names none of ours.
        """
        after = last_event_id(last_seen)
        if after and job.finished and not await self._store.events(job.id, after):
            return Response(status_code=204)
        return _EventResponse(self.frames(job.id, after))

    async def frames(self, job_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """What to send of a job's events after that revision; ends with the job, or when the service ends.

        A reader that is slow gets what it missed in one piece; it holds nobody up.
        """
        clock = asyncio.get_running_loop().time
        yield RETRY
        with self._reading(job_id) as (log, grown):
            beat = clock() + COMMENT_S
            while True:
                grown.clear()
                if frames := log.after(after):
                    after = log.last
                    yield frames
                    continue
                if log.over:
                    return
                try:
                    async with asyncio.timeout_at(beat):
                        await grown.wait()
                except TimeoutError:
                    beat = clock() + COMMENT_S
                    yield COMMENT

    @contextmanager
    def _reading(self, job_id: str) -> Iterator[tuple[_Log, asyncio.Event]]:
        log = self._logs.get(job_id)
        if log is None:
            log = self._logs[job_id] = _Log()
            self._tasks[job_id] = asyncio.create_task(self._fill(job_id, log), name=f"events of {job_id}")
        grown = asyncio.Event()
        log.readers.add(grown)
        try:
            yield log, grown
        finally:
            log.readers.discard(grown)
            if not log.readers:
                del self._logs[job_id]
                self._tasks.pop(job_id).cancel()

    async def _fill(self, job_id: str, log: _Log) -> None:
        """Read what is new of the job into its log, after each change."""
        try:
            with self._feed.watch(job_id) as watch:
                while not log.over:
                    await self._read(job_id, log)
                    await log.wake()
                    if not log.over and not await watch.changed():
                        break
        except StoreUnavailable as error:
            # Its readers come again, with the last that they saw.
            logger.warning("the event stream of job %s ends: %s", job_id, error)
        finally:
            log.end()

    async def _read(self, job_id: str, log: _Log) -> None:
        events = await self._store.events(job_id, log.last)
        for event in events:
            log.add(event.revision, event_frame(event), final=event.status in FINAL)
        if events:
            return
        job = await self._store.get(job_id)
        if job is None:
            log.add(log.last + 1, deleted_frame(job_id), final=True)
        elif job.finished:
            # It ended before events were kept.
            log.add(log.last + 1, state_frame(job), final=True)
