"""Tells the end of jobs to the URLs that their callers gave: signed, at least once. Runs in the diffusion API process.

What is due, and how often it was tried, is in the store, so that neither a restart nor the end of this service loses a
message: whoever shares the store delivers it once the claim of the one who took it has lapsed.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from diffusion_service.accounts import WebhookAccounts
from diffusion_service.jobs.job import Job
from diffusion_service.jobs.public import video_of
from diffusion_service.jobs.store import JobStore
from diffusion_service.jobs.webhook import Webhook, delay_s
from diffusion_service.signature import Signer
from shared_runtime.tracing import Errand, working_for
from shared_schema.errors import NotFound, OutboundError, StoreUnavailable

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Messages under way: a slow receiver holds up none of the others."""
POLL_S = 1.0
JSON = {"content-type": "application/json"}
GRACE_S = 30.0
"""How much longer than one try a claim lasts."""


class Post(Protocol):
    """One POST in one hop; see `outbound.PinnedClient.post`."""

    async def __call__(self, url: str, content: bytes, headers: Mapping[str, str], *, timeout_s: float) -> int:
        """The status of the answer.

        Raises:
            OutboundError: this server does not dial that URL, or nobody answers there.
        """


class Webhooks:
    """Delivers what is due until it is cancelled."""

    def __init__(
        self,
        store: JobStore,
        post: Post,
        signer: Signer,
        accounts: WebhookAccounts,
        *,
        timeout_s: float,
        attempts: int,
        clock: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._post = post
        self._signer = signer
        self._accounts = accounts
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._clock = clock
        self._draw = draw
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Work until cancelled. What is under way then is tried again later, here or elsewhere."""
        async with asyncio.TaskGroup() as group:
            while True:
                jobs = await self._due()
                for job in jobs:
                    task = group.create_task(self._deliver(job), name=f"webhook of {job.id}")
                    self._under_way.add(task)
                    task.add_done_callback(self._under_way.discard)
                if not jobs:
                    await asyncio.sleep(POLL_S)

    async def _due(self) -> list[Job]:
        room = AT_ONCE - len(self._under_way)
        if not room:
            return []
        try:
            return await self._store.due_webhooks(self._clock(), self._timeout_s + GRACE_S, room)
        except StoreUnavailable as error:
            logger.warning("webhooks wait: %s", error)
            return []

    async def _deliver(self, job: Job) -> None:
        if job.webhook is None:
            return
        with working_for(Errand(job.request_id)):
            await self._told(job, job.webhook)

    async def _told(self, job: Job, before: Webhook) -> None:
        status, why = await self._send(job, before.url)
        self._accounts.tried("delivered" if why is None else "unreachable" if status is None else "refused")
        now, tried = self._clock(), before.attempts
        next_at = now + delay_s(tried, self._draw())

        def settled(hook: Webhook) -> Webhook:
            if why is None:
                return hook.answered(status, now)
            return hook.refused(status, why, next_at=next_at, limit=self._attempts)

        logger.info("webhook of job %s, try %d: %s", job.id, tried, why or f"delivered, {status}")
        try:
            after = await self._store.change(job.id, lambda kept: kept.hooked(settled))
            if after.webhook is not None and after.webhook.state == "failed":
                self._accounts.given_up()
        except NotFound:
            logger.info("job %s was deleted while its webhook was delivered", job.id)
        except StoreUnavailable as error:
            logger.warning("the webhook of job %s will be sent again: %s", job.id, error)

    async def _send(self, job: Job, url: str) -> tuple[int | None, str | None]:
        """Send the message once: the status of the answer, and why that is no success."""
        body = message(job)
        signed = self._signer.headers(f"msg_{job.request_id}", self._clock(), body)
        try:
            status = await self._post(url, body, {**JSON, **signed}, timeout_s=self._timeout_s)
        except OutboundError as error:
            return None, error.message
        return status, None if 200 <= status < 300 else f"the receiver answered {status}"


def message(job: Job) -> bytes:
    """What is sent: the same bytes at every try."""
    shown = {
        "id": f"evt_{job.request_id}",
        "object": "event",
        "type": f"video.{job.status}",
        "created_at": int(job.completed_at or 0),
        "data": video_of(job).model_dump(mode="json", exclude={"webhook"}),
    }
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()
