"""Where jobs are kept, as a protocol: `jobs/memory.py` and `jobs/sql/` keep it. Runs in the diffusion API process.

Every change of a job is one transaction around one pure transition of `jobs/job.py`, with its line of history. Several
diffusion services may share one store; each is an *instance* and owns the jobs that it works on for as long as it
renews its lease.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from diffusion_service.jobs.idempotency import Idempotency
from diffusion_service.jobs.job import Job, LeaseLost, Transition
from diffusion_service.scheduler import Waiting
from shared_schema.errors import InvalidRequest, KeyBusy, NotFound, QueueFull
from shared_schema.videos import Phase, VideoStatus

Order = Literal["asc", "desc"]
Transit = Callable[[Job], Job]
"""A pure transition; what it raises is raised and changes nothing."""
Choose = Callable[[Sequence[Waiting], Mapping[str | None, int]], str | None]
"""From the jobs that wait, and how many each key has under way, to the id of the next one or None."""
Tell = Callable[[str], None]
"""Is called on the event loop with a job's id once a change of it is kept."""


@dataclass(frozen=True)
class JobPage:
    """Some jobs by their sequence, and whether more follow in that order."""

    jobs: tuple[Job, ...]
    has_more: bool


@dataclass(frozen=True)
class JobEvent:
    """One line of a job's history: what its caller can see has changed."""

    revision: int
    """Rises over all jobs of the store."""
    job_id: str
    at: float
    """Unix seconds."""
    status: VideoStatus
    phase: Phase
    progress: int


@dataclass(frozen=True)
class Changes:
    """Which jobs have new events, and the revision from which to ask next."""

    revision: int
    jobs: frozenset[str]


@dataclass(frozen=True)
class Held:
    """The jobs that an instance still owns, and those of them that it is asked to cancel."""

    jobs: frozenset[str]
    cancelled: frozenset[str]


class JobStore(Protocol):
    """What API and runner ask of a store. A finished call is kept, whatever happens to the process afterwards.

    Every call may raise `StoreUnavailable`: the database does not answer. `now` is Unix seconds.
    """

    @property
    def shared(self) -> bool:
        """Whether other processes change these jobs too."""

    async def add(self, job: Job, limit: int, *, key_limit: int | None = None, claim: Idempotency | None = None) -> Job:
        """Keep a new job and give it its sequence number, higher than any before.

        Returns the kept job: an earlier one, with its own id, if `claim` says that this is the same request.

        Raises:
            Conflict: `claim` names a key that came with another request; nothing was kept.
            QueueFull: `limit` jobs are queued already; nothing was kept.
            KeyBusy: the job's key has `key_limit` unfinished jobs already; nothing was kept.
        """

    async def get(self, job_id: str) -> Job | None:
        """The job, or None."""

    async def change(self, job_id: str, transition: Transit, *, instance: str | None = None) -> Job:
        """Read, apply `transition`, write.

        Raises:
            NotFound: no such job.
            LeaseLost: `instance` is given and does not own the job.
        """

    async def page(self, after: str | None, limit: int, order: Order, *, key: str | None = None) -> JobPage:
        """At most `limit` jobs, of that key alone if one is given, that follow the job `after` in `order`.

        Raises:
            InvalidRequest: `after` names no such job.
        """

    async def places(self, jobs: Sequence[Job]) -> dict[str, int]:
        """By id, from 1: the place in the queue of those of the jobs that are queued. Priority goes before age.

        Not the order in which they will be made: how keys take turns depends on what is under way by then.
        """

    async def queued(self) -> int:
        """How many jobs are queued, owned or not: what `limit` of `add` is about."""

    async def unfinished(self) -> list[Job]:
        """Queued and running jobs, oldest first."""

    async def expired(self, now: float) -> list[Job]:
        """Finished jobs whose time is over, the longest first."""

    async def ids(self, status: VideoStatus | None = None) -> frozenset[str]:
        """Every job that is kept, or that is kept and has this status."""

    async def remove(self, job_id: str) -> None:
        """Forget the job and its history; an unknown one is forgotten already."""

    # Ownership

    async def claim(self, instance: str, now: float, lease_s: float, choose: Choose) -> Job | None:
        """Make the job that `choose` picks, out of the queued ones that nobody owns, the instance's own.

        `choose` is told how many jobs of each key are owned, by whomever. The job stays queued.
        """

    async def renew(self, instance: str, now: float, lease_s: float) -> Held:
        """The instance lives: what it owns stays its own until `now + lease_s`."""

    async def reclaim(self, now: float, transition: Transit) -> list[Job]:
        """Apply `transition`, which ends ownership, to every owned job whose lease is over; returns them, changed."""

    # History

    async def events(self, job_id: str, after: int | None = None) -> list[JobEvent]:
        """A job's events with a higher revision than `after`, oldest first."""

    async def changes(self, after: int | None) -> Changes:
        """The jobs that have events with a higher revision than `after`; with None, only what the revision is."""

    async def due_webhooks(self, now: float, hold_s: float, limit: int) -> list[Job]:
        """At most `limit` jobs whose webhook is due, the longest due first; nobody else delivers them for `hold_s`."""

    async def close(self) -> None:
        """Finish what is being written."""


def silent(_job_id: str) -> None:
    """A `Tell` that tells nobody."""


def queue_full(limit: int) -> QueueFull:
    """The error of `JobStore.add`."""
    return QueueFull(f"{limit} jobs are waiting already; try again later")


def key_busy(limit: int) -> KeyBusy:
    """The error of `JobStore.add`."""
    return KeyBusy(f"this key has {limit} unfinished jobs already; try again when one has ended")


def no_such_job(job_id: str) -> NotFound:
    """The error of `JobStore.change`."""
    return NotFound(f"there is no video {job_id!a}", param="video_id")


def no_such_cursor(after: str) -> InvalidRequest:
    """The error of `JobStore.page`."""
    return InvalidRequest(f"there is no video {after!a} to list after", param="after")


def check_owner(job: Job, instance: str | None) -> None:
    """The fence of `JobStore.change`.

    Raises:
        LeaseLost: an instance is named and does not own the job.
    """
    if instance is not None and job.owner != instance:
        raise LeaseLost(f"job {job.id} is not this service's any more")


def freed(job: Job) -> Job:
    """What the transition of `JobStore.reclaim` made, which nobody owns.

    Raises:
        Transition: it has an owner.
    """
    if job.owner is not None:
        raise Transition(f"job {job.id} would stay with an owner that is gone")
    return job


def is_event(before: Job | None, after: Job) -> bool:
    """Whether a change belongs into the job's history."""
    seen = [(job.status, job.phase, job.progress) for job in (before, after) if job is not None]
    return len(seen) == 1 or seen[0] != seen[1]


def webhook_claimed(job: Job, now: float, hold_s: float) -> Job:
    """The job with its webhook in somebody's hands."""
    return job.model_copy(update={"webhook": job.webhook and job.webhook.claimed(now, hold_s)})
