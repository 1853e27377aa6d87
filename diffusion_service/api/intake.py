"""From a request to a job that is kept, or to an error that leaves nothing behind. Runs in the API process."""

import asyncio
import secrets
import unicodedata
from dataclasses import dataclass

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from diffusion_service.api.deps import ApiDeps
from diffusion_service.api.disk import full_disk_is_said
from diffusion_service.api.fields import Fields, read_fields
from diffusion_service.api.forms import ENCODER_OUTPUT, read_form
from diffusion_service.api.gate import caller_of, note_job
from diffusion_service.api.hooks import read_webhook
from diffusion_service.api.lora import ChosenLora, choose_lora
from diffusion_service.api.plan import check_model, check_prompt, plan_payload, plan_video
from diffusion_service.api.references import inspect, payload_kinds, read_payload
from diffusion_service.api.repeats import identify, read_key
from diffusion_service.api.room import check_room
from diffusion_service.jobs.artifacts import UploadFolder
from diffusion_service.jobs.idempotency import Idempotency
from diffusion_service.jobs.job import Job, VideoPlan
from diffusion_service.jobs.webhook import Webhook
from diffusion_service.keys import Caller
from shared_schema.errors import InvalidRequest, NotReady, NotServed
from shared_schema.tasks import MAX_PROMPT_TOKENS, Task

_PROBES_AT_ONCE = 2
"""A picture of the largest legal size is some 150 MB once decoded."""


@dataclass(frozen=True)
class Accepted:
    """The job that answers a request."""

    job: Job
    fresh: bool
    """False: an earlier request made it, and this one repeats that."""


@dataclass(frozen=True)
class _Asked:
    """A request that may become a job."""

    plan: VideoPlan
    priority: int
    webhook: Webhook | None
    claim: Idempotency


class Intake:
    """Takes requests in. Each one either becomes a whole job or never was."""

    def __init__(self, deps: ApiDeps) -> None:
        self._deps = deps
        self._limiter = CapacityLimiter(_PROBES_AT_ONCE)

    async def accept(self, request: Request) -> Accepted:
        """Read, check and keep one request, or find the job that it repeats.

        Raises:
            RequestError: it is refused; no job and no file is left.
        """
        caller = caller_of(request, "create")
        self._check_open()
        read_key(request.headers)
        self._deps.disk.check(_announced(request))
        with full_disk_is_said():
            accepted = await self._accepted(request, caller)
        note_job(request, accepted.job.id)
        return accepted

    async def _accepted(self, request: Request, caller: Caller) -> Accepted:
        upload = await run_in_threadpool(self._deps.artifacts.open_upload)
        try:
            return await self._keep(await self._ask(request, upload), upload, caller)
        finally:
            await run_in_threadpool(upload.discard)

    def _check_open(self) -> None:
        if self._deps.health.draining:
            raise NotReady("the service is about to end; try again")
        if not self._deps.limits.accept_when_not_ready and self._deps.health.report().status == "unhealthy":
            raise NotReady("the service is not ready; try again later")

    async def _ask(self, request: Request, upload: UploadFolder) -> _Asked:
        limits = self._deps.limits
        caps = limits.caps
        largest = max(caps.image_bytes, caps.video_bytes, caps.audio_bytes)
        form = await read_form(request, upload, limits.body, largest, self._deps.disk.check)
        fields = await run_in_threadpool(read_fields, form)
        if fields.encoder_output is not None and not limits.takes_encoder_output:
            why = "this server runs the text-only split, in which a payload holds no media: send prompt and media"
            raise NotServed(f"encoder_output is not taken: {why}", param=ENCODER_OUTPUT)
        check_model(fields.create, limits)
        check_prompt(fields.create, optional=fields.encoder_output is not None)
        webhook = read_webhook(fields.create.webhook_url, limits)
        claim = identify(request.headers, fields)
        await self._check_tokens(fields.create.prompt or "")
        if self._deps.fetcher is not None:
            fields = await self._deps.fetcher.fetch(fields, upload, limits)
        plan = await run_sync(self._check_media, fields, limiter=self._limiter)
        return _Asked(plan, fields.create.priority or 0, webhook, claim)

    def _check_media(self, fields: Fields) -> VideoPlan:
        limits, drawn = self._deps.limits, secrets.randbelow(2**32)
        if fields.encoder_output is None:
            media = inspect(fields, limits)
            lora = self._choose_lora(fields, media.task)
            plan = plan_video(fields, media.task, media.references, limits, drawn, lora)
            check_room(plan, limits)
            return plan
        layout = read_payload(fields.encoder_output, limits)
        kinds = payload_kinds(fields, limits)
        lora = self._choose_lora(fields, layout.task)
        return plan_payload(fields, fields.encoder_output, layout, kinds, limits, drawn, lora)

    def _choose_lora(self, fields: Fields, task: Task) -> ChosenLora | None:
        return choose_lora(fields.create.lora, task, self._deps.limits.lora, self._deps.adapters)

    async def _check_tokens(self, prompt: str) -> None:
        # A token is at least a byte of what the tokenizer makes of it first, which can be three times as long.
        if len(unicodedata.normalize("NFC", prompt).encode()) <= MAX_PROMPT_TOKENS:
            return
        tokens = await self._deps.count_tokens(prompt)
        if tokens > MAX_PROMPT_TOKENS:
            raise InvalidRequest(f"prompt has at most {MAX_PROMPT_TOKENS} tokens, not {tokens}", param="prompt")

    async def _keep(self, asked: _Asked, upload: UploadFolder, caller: Caller) -> Accepted:
        """Files first, then the record, then the runner: whoever sees the job finds it whole."""
        work = asyncio.create_task(self._add(asked, upload, caller))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # A caller that leaves now leaves a whole job or none.
            await asyncio.wait({work})
            raise

    async def _add(self, asked: _Asked, upload: UploadFolder, caller: Caller) -> Accepted:
        deps, limits = self._deps, self._deps.limits
        job = Job(
            id=f"video_{secrets.token_hex(16)}",
            sequence=0,
            plan=asked.plan,
            priority=asked.priority,
            key=caller.name,
            webhook=asked.webhook,
            created_at=deps.clock(),
        )
        await run_in_threadpool(deps.artifacts.claim, upload, job.id)
        fresh = False
        try:
            key_limit = None if caller.name is None else limits.jobs_per_key
            kept = await deps.store.add(job, limits.queue_limit, key_limit=key_limit, claim=asked.claim)
            fresh = kept.id == job.id
        finally:
            if not fresh:
                await run_in_threadpool(deps.artifacts.drop_inputs, job.id)
        if fresh:
            deps.runner.wake()
        return Accepted(kept, fresh)


def _announced(request: Request) -> int:
    """Bytes that the body says it has; 0 where it does not say."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 16 else 0
