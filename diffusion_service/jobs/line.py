"""The jobs that one service works on, in the order in which they are made. Diffusion API process."""

import asyncio
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from diffusion_service.scheduler import Turn


class InLine(Protocol):
    """What the line needs to know of a job under way."""

    begun: bool
    """It is in progress: it keeps its place until it leaves."""
    decoded: bool
    """The ranks have made its clips and are free for the next job; the last file is still being finished."""
    landed: bool
    """Its payload is there."""
    starving: bool
    """Its push, or the probe of its encoder, waits for room in the slab."""

    @property
    def id(self) -> str:
        """Of the job."""

    @property
    def turn(self) -> Turn:
        """Lower ones are made first."""


T = TypeVar("T", bound=InLine)


class Line(Generic[T]):
    """Jobs under way. Encoding ahead never reorders: a job is made once it is first, whoever was encoded before it.

    While the file of one job is finished the ranks make the next one, and no third one. They end in order.
    """

    def __init__(self) -> None:
        self._jobs: list[T] = []
        self._moved = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[T]:
        """In order; changes meanwhile are not seen."""
        return iter(tuple(self._jobs))

    @property
    def first(self) -> T | None:
        """The one that the ranks make now, or will next; None if nobody is there, or two wait for their files."""
        return next((job for job in self._jobs[:2] if not job.decoded), None)

    @property
    def ahead(self) -> int:
        """Jobs that still need the ranks."""
        return sum(not job.decoded for job in self._jobs)

    @property
    def last_ahead(self) -> T | None:
        """The one that has to wait longest; None if nobody waits."""
        return self._jobs[-1] if self._jobs and not self._jobs[-1].begun else None

    def find(self, job_id: str) -> T | None:
        """The job of that id, if it is under way here."""
        return next((job for job in self._jobs if job.id == job_id), None)

    def join(self, job: T) -> None:
        """Take a job in, at its place."""
        self._jobs.append(job)
        # What has begun is in the order in which it began.
        self._jobs.sort(key=lambda each: (True, each.turn) if not each.begun else (False, (0, 0)))

    def decode(self, job: T) -> None:
        """The ranks are done with it."""
        job.decoded = True
        self._move()

    def leave(self, job: T) -> None:
        """It ended, one way or another."""
        self._jobs.remove(job)
        self._move()

    async def turn(self, job: T) -> None:
        """Wait until the ranks may make the job."""
        while self.first is not job:
            await self._moved.wait()

    async def end(self, job: T) -> None:
        """Wait until every job before this one has left."""
        while self._jobs[0] is not job:
            await self._moved.wait()

    def blocked_by(self) -> T | None:
        """The job that has to give its room in the slab back, if any.

        While the first job has no payload yet and a push or a probe waits for room, the room of those behind it would
        be given back only after it: they would wait for each other for ever.
        """
        first = self.first
        if first is None or first.landed or not any(job.starving for job in self._jobs):
            return None
        return next((job for job in reversed(self._jobs) if job.landed and not job.begun), None)

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
