"""From a request to a job that is kept, or to an error that leaves nothing behind. Runs in the API process."""

import asyncio
import secrets

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from diffusion_service.api.deps import ApiDeps
from diffusion_service.api.fields import Fields, read_fields
from diffusion_service.api.forms import ENCODER_OUTPUT, read_form
from diffusion_service.api.plan import check_model, check_prompt, plan_payload, plan_video
from diffusion_service.api.references import inspect, payload_kinds, read_payload
from diffusion_service.jobs.artifacts import UploadFolder
from diffusion_service.jobs.job import Job, VideoPlan
from shared_schema.errors import InvalidRequest, NotReady, NotServed
from shared_schema.tasks import MAX_PROMPT_TOKENS

_PROBES_AT_ONCE = 2
"""A picture of the largest legal size is some 150 MB once decoded."""


class Intake:
    """Takes requests in. Each one either becomes a whole job or never was."""

    def __init__(self, deps: ApiDeps) -> None:
        self._deps = deps
        self._limiter = CapacityLimiter(_PROBES_AT_ONCE)

    async def accept(self, request: Request) -> Job:
        """Read, check and keep one request.

        Raises:
            RequestError: it is refused; no job and no file is left.
        """
        self._check_open()
        upload = await run_in_threadpool(self._deps.artifacts.open_upload)
        try:
            plan = await self._plan(request, upload)
            return await self._keep(plan, upload)
        finally:
            await run_in_threadpool(upload.discard)

    def _check_open(self) -> None:
        if self._deps.health.draining:
            raise NotReady("the service is about to end; try again")
        if not self._deps.limits.accept_when_not_ready and self._deps.health.report().status == "unhealthy":
            raise NotReady("the service is not ready; try again later")

    async def _plan(self, request: Request, upload: UploadFolder) -> VideoPlan:
        limits = self._deps.limits
        caps = limits.caps
        largest = max(caps.image_bytes, caps.video_bytes, caps.audio_bytes)
        form = await read_form(request, upload, limits.body, largest)
        fields = await run_in_threadpool(read_fields, form)
        if fields.encoder_output is not None and not limits.takes_encoder_output:
            why = "this server runs the text-only split, in which a payload holds no media: send prompt and media"
            raise NotServed(f"encoder_output is not taken: {why}", param=ENCODER_OUTPUT)
        check_model(fields.create, limits)
        check_prompt(fields.create, optional=fields.encoder_output is not None)
        await self._check_tokens(fields.create.prompt or "")
        return await run_sync(self._check_media, fields, limiter=self._limiter)

    def _check_media(self, fields: Fields) -> VideoPlan:
        limits, drawn = self._deps.limits, secrets.randbelow(2**32)
        if fields.encoder_output is None:
            media = inspect(fields, limits)
            return plan_video(fields, media.task, media.references, limits, drawn)
        layout = read_payload(fields.encoder_output, limits)
        kinds = payload_kinds(fields, limits)
        return plan_payload(fields, fields.encoder_output, layout, kinds, limits, drawn)

    async def _check_tokens(self, prompt: str) -> None:
        # A token is at least a byte.
        if len(prompt.encode()) <= MAX_PROMPT_TOKENS:
            return
        tokens = await self._deps.count_tokens(prompt)
        if tokens > MAX_PROMPT_TOKENS:
            raise InvalidRequest(f"prompt has at most {MAX_PROMPT_TOKENS} tokens, not {tokens}", param="prompt")

    async def _keep(self, plan: VideoPlan, upload: UploadFolder) -> Job:
        """Files first, then the record, then the runner: whoever sees the job finds it whole."""
        work = asyncio.create_task(self._add(plan, upload))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # A caller that leaves now leaves a whole job or none.
            await asyncio.wait({work})
            raise

    async def _add(self, plan: VideoPlan, upload: UploadFolder) -> Job:
        deps = self._deps
        job = Job(id=f"video_{secrets.token_hex(16)}", sequence=0, plan=plan, created_at=deps.clock())
        await run_in_threadpool(deps.artifacts.claim, upload, job.id)
        kept = False
        try:
            job = await deps.store.add(job, deps.limits.queue_limit)
            kept = True
        finally:
            if not kept:
                await run_in_threadpool(deps.artifacts.drop_inputs, job.id)
        deps.runner.wake()
        return job
