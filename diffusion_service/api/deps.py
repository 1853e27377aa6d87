"""What the public API is built from: its collaborators as protocols, handed over once. Runs in the API process."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry

from diffusion_service.adapters.catalog import Catalog
from diffusion_service.api.disk import DiskGuard
from diffusion_service.api.fetch import MediaFetcher
from diffusion_service.api.limits import ServerLimits
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.feed import JobFeed
from diffusion_service.jobs.job import Job
from diffusion_service.jobs.store import JobStore
from shared_schema.health import Health


class Runner(Protocol):
    """Works on the store's jobs, one after the other."""

    def wake(self) -> None:
        """A job was added."""

    async def cancel(self, job_id: str) -> Job:
        """End the job as `cancelled`, unless it has ended already; its work has stopped when this returns.

        Raises:
            NotFound: no such job.
        """

    async def remove(self, job_id: str) -> None:
        """Cancel the job if it runs, then forget its record and its files.

        Raises:
            NotFound: no such job.
        """

    async def wait(self, job_id: str, timeout_s: float) -> Job | None:
        """The job once it has ended, or None when it has not in time, or is gone."""

    def eta(self, job: Job, position: int | None = None) -> float | None:
        """Seconds until the job ends, as far as one can tell; `position` is that of a queued one, from 1."""

    def step(self, job: Job) -> int | None:
        """Forwards finished of the output that is being made; None unless it is being denoised here."""


class HealthSource(Protocol):
    """What the service knows about itself."""

    @property
    def draining(self) -> bool:
        """Whether the process is about to end and takes no more jobs."""

    def report(self) -> Health:
        """Ranks, encoder link and the reasons why the service is not ready."""


@dataclass(frozen=True)
class ApiDeps:
    """Everything the API uses."""

    store: JobStore
    artifacts: Artifacts
    runner: Runner
    limits: ServerLimits
    health: HealthSource
    count_tokens: Callable[[str], Awaitable[int]]
    """Tokens of a prompt, by the encoder; raises `NotReady` while it is away."""
    clock: Callable[[], float]
    """Unix time."""
    feed: JobFeed
    """Tells which job changed."""
    disk: DiskGuard
    model_info: Mapping[str, object] = field(default_factory=dict)
    """What `/v1/models` says besides the name: the effective layout and load format."""
    fetcher: MediaFetcher | None = None
    """None: media by URL is off."""
    adapters: Catalog | None = None
    """What requests may name with `lora`. None: nothing."""
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    """What `/metrics` shows."""
