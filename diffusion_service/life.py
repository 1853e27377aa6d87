"""What runs beside the HTTP of the diffusion service, and how all of it ends. Runs in the API process."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from diffusion_service.encoders import Encoders
from diffusion_service.health import ServiceHealth
from diffusion_service.jobs.feed import JobFeed
from diffusion_service.jobs.runner import JobRunner
from diffusion_service.jobs.store import JobStore
from diffusion_service.webhooks import Webhooks
from shared_runtime.ranks.group import ProcessGroup
from shared_schema.errors import DeployError


@dataclass(frozen=True)
class ServiceLife:
    """Everything of the service that lives by itself."""

    group: ProcessGroup
    encoders: Encoders
    store: JobStore
    runner: JobRunner
    feed: JobFeed
    webhooks: Webhooks | None
    """None where no host may be told."""
    health: ServiceHealth
    drain_s: float

    async def supervise(self, ready: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run until cancelled, or until a part of it fails; `ready` is called whenever the ranks have become ready.

        Raises:
            DeployError: the ranks cannot start with these settings.
        """
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self.group.supervise(ready))
                parts.create_task(self.runner.run())
                parts.create_task(self.encoders.watch())
                if self.store.shared:
                    parts.create_task(self.feed.follow(self.store))
                if self.webhooks is not None:
                    parts.create_task(self.webhooks.run())
        except ExceptionGroup as failed:
            wrong = failed.subgroup(DeployError)
            if wrong is None:
                raise
            # What `except*` raises would come out as a group again.
            raise DeployError(str(wrong.exceptions[0])) from failed
        finally:
            self.feed.close()

    async def drain(self) -> None:
        """Take no new job, let the one that is made finish if it can in time, and let go of all who wait."""
        self.health.draining = True
        await self.runner.drain(self.drain_s)
        self.feed.close()
        self.group.stop_gently()
