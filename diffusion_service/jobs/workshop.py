"""What jobs are made with, and the calls that outlast a database which is away. Diffusion API process."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from diffusion_service.engine import Engine
from diffusion_service.handover import Handover
from diffusion_service.jobs.accounts import JobAccounts
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.audit import log_end
from diffusion_service.jobs.job import Job
from diffusion_service.jobs.progress import Pace
from diffusion_service.jobs.store import JobStore, Transit
from shared_runtime.spans_out import Export
from shared_schema.errors import StorageUnavailable, StoreUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

AWAY_PAUSE_S = 0.5
"""Between tries while the database does not answer."""


@dataclass(frozen=True)
class RunnerRules:
    """How much is worked on at once and for how long. Seconds."""

    retention_s: float
    look_ahead: int
    """Jobs that are encoded while another one is made."""
    running_per_key: int | None
    job_timeout_s: float
    lease_s: float
    """Without a renewal, other services take this one's jobs after so long."""
    encoder_ranks: int
    diffusion_ranks: int
    """What the seconds of a stage are multiplied by in the audit line of a job."""


@dataclass
class Workshop:
    """Store, files, encoders and ranks of one service instance."""

    store: JobStore
    artifacts: Artifacts
    handover: Handover
    engine: Engine
    rules: RunnerRules
    accounts: JobAccounts
    export: Export
    """Takes this service's spans of a job that has ended; the encoder sends its own."""
    instance: str
    """Names this start of the service in the store."""
    clock: Callable[[], float]
    """Unix seconds."""
    ticks: Callable[[], float] = time.monotonic
    """Seconds that never jump, for progress."""
    pace: Pace = field(default_factory=Pace)
    """What finished jobs taught about the time that jobs take."""

    async def change(self, job_id: str, transition: Transit) -> Job:
        """Change a job that this instance owns, as soon as the database answers.

        Raises:
            LeaseLost, Transition, NotFound.
        """
        return await insist(lambda: self.store.change(job_id, transition, instance=self.instance))

    def learn(self, job: Job) -> None:
        """Take a job's times into account, if it completed."""
        if job.status == "completed" and job.started_at is not None and job.completed_at is not None:
            whole_s = job.completed_at - job.started_at
            self.pace = self.pace.learned(job.plan, job.stage_durations, whole_s)

    async def ended(self, job: Job) -> None:
        """A job is final: the audit hears; inputs and half-written clips go, whole ones too unless it completed.

        What a store of clips that is away keeps is found by a later sweep.
        """
        self.accounts.ended(job)
        if job.spans:
            self.export(job.request_id, [each for each in job.spans if each.process.startswith("diffusion-")])
        log_end(job, encoder_ranks=self.rules.encoder_ranks, diffusion_ranks=self.rules.diffusion_ranks)
        drops = [self.artifacts.drop_part, self.artifacts.drop_inputs]
        if job.status != "completed":
            drops.append(self.artifacts.drop_clips)
        for drop in drops:
            try:
                await asyncio.to_thread(drop, job.id)
            except StorageUnavailable as error:
                logger.warning("files of job %s stay for now: %s", job.id, error.message)


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """The call's result, tried again for as long as the database does not answer."""
    warned = False
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            if not warned:
                logger.warning("waiting for the database: %s", error.message)
            warned = True
            await asyncio.sleep(AWAY_PAUSE_S)
