"""From a job to a verified payload in the slab: encode, reserve, push, prove. Runs in the diffusion API process."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diffusion_service.commands import MediaFiles
from diffusion_service.encoder_link import EncoderLink
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.job import Job, VideoPlan
from shared_runtime.transport.accounts import TransportAccounts
from shared_runtime.transport.base import Receiver, Sender
from shared_runtime.transport.codec import check_values
from shared_runtime.transport.inline import from_safetensors
from shared_schema.encode import EncodeRequest, Encoding, PushReceipt, ReferenceInput, ShmLanding, UsedReference
from shared_schema.encoder_output import TEXT, EncoderOutput, Manifest
from shared_schema.errors import (
    H3Error,
    LayoutInvalid,
    NotReady,
    RankDied,
    SlabFull,
    SlotMissing,
    SlotUnexpected,
    WrongShape,
)
from shared_schema.layout import LAYOUT, Layout
from shared_schema.videos import Phase

FULL_PAUSE_S = 0.1
"""Between looks for room in a full slab."""


@dataclass(frozen=True)
class Landed:
    """A payload that is proved and waits for the ranks."""

    landing: ShmLanding
    manifest: Manifest
    references: tuple[UsedReference, ...]
    durations: dict[str, float]
    media: MediaFiles | None = None
    """What the ranks still have to encode: in the text-only split the payload is text alone."""


@dataclass(frozen=True)
class PayloadRules:
    """What every payload of this service must be, whatever its request."""

    text_only: bool
    text_dim: int


class Handover:
    """The way of a payload into the slab that this service owns."""

    def __init__(
        self,
        link: EncoderLink,
        receiver: Receiver[ShmLanding],
        own_sender: Sender[ShmLanding],
        artifacts: Artifacts,
        lease_s: float,
        rules: PayloadRules,
        accounts: TransportAccounts,
    ) -> None:
        self._link = link
        self._receiver = receiver
        self._own_sender = own_sender
        self._artifacts = artifacts
        self._lease_s = lease_s
        self._rules = rules
        self._accounts = accounts

    async def until_ready(self, job: Job) -> None:
        """Wait until this job can be encoded; one that brought its payload needs no encoder."""
        if job.plan.encoder_output is None:
            await self._link.until_ready()

    def lost(self) -> None:
        """The encoder did not answer: wait for it before the next job."""
        self._link.lost()

    async def land(self, job: Job, reach: Callable[[Phase], None]) -> Landed:
        """Encode a job, or take the payload it brought, and have it in a landing.

        Raises:
            H3Error: whatever went wrong, its type kept; nothing is left reserved.
        """
        if job.plan.encoder_output is not None:
            return await self._land_own(job, reach, job.plan.encoder_output)
        reach("encoding")
        start = time.perf_counter()
        request, files = _request(job), self._files(job)
        encoding = await self._encoded(request, files)
        encoded = time.perf_counter()
        try:
            check_manifest(encoding.manifest, job.plan, self._rules)
            reach("transferring")
            landing = await self._room(encoding.manifest.nbytes, job.request_id, encoding)
        except BaseException:
            with contextlib.suppress(H3Error):
                await self._link.client.drop(encoding)
            raise
        async with self._released_on_error(landing):
            receipt = await self._link.client.push(encoding, self._receiver.for_sender(landing))
            await self._prove(landing, encoding.manifest, receipt)
        durations = {
            **{f"encode_{name}": round(seconds, 6) for name, seconds in encoding.timings.items()},
            "encode": round(encoded - start, 6),
            "transfer": round(time.perf_counter() - encoded, 6),
        }
        media = MediaFiles(request, files) if self._rules.text_only else None
        return Landed(landing, encoding.manifest, encoding.references, durations, media)

    async def _encoded(self, request: EncodeRequest, files: tuple[Path, ...]) -> Encoding:
        """Have it encoded; an encoder that is not ready now has not begun, and is waited for."""
        while True:
            try:
                return await self._link.client.encode(request, files)
            except NotReady as error:
                self._link.lost(error.message)
                await self._link.until_ready()
            except RankDied as error:
                self._link.lost(error.message)
                raise

    async def _land_own(self, job: Job, reach: Callable[[Phase], None], file: str) -> Landed:
        reach("transferring")
        start = time.perf_counter()
        payload = await asyncio.to_thread(_read_payload, self._artifacts.input(job.id, file))
        landing = await self._room(payload.manifest.nbytes, job.request_id, None)
        async with self._released_on_error(landing):
            receipt = await asyncio.to_thread(self._own_sender.push, landing, payload)
            await self._prove(landing, payload.manifest, receipt)
        return Landed(landing, payload.manifest, (), {"transfer": round(time.perf_counter() - start, 6)})

    @contextlib.asynccontextmanager
    async def _released_on_error(self, landing: ShmLanding):  # type: ignore[no-untyped-def]
        try:
            yield
        except BaseException as error:
            self._receiver.release(landing)
            if isinstance(error, H3Error):
                self._accounts.failed(landing.kind, error.code)
            raise

    async def _room(self, nbytes: int, request_id: str, encoding: Encoding | None) -> ShmLanding:
        """A landing; while the slab is full the push waits, and the encoding's lease is renewed."""
        begun = renewed = time.monotonic()
        waited = False
        while True:
            try:
                landing = self._receiver.reserve(nbytes, request_id, self._lease_s, time.time())
            except SlabFull:
                waited = True
                await asyncio.sleep(FULL_PAUSE_S)
            else:
                if waited:
                    self._accounts.waited(landing.kind, time.monotonic() - begun)
                return landing
            if encoding is not None and time.monotonic() - renewed > self._lease_s / 3:
                await self._link.client.renew(encoding)
                renewed = time.monotonic()

    async def _prove(self, landing: ShmLanding, manifest: Manifest, receipt: PushReceipt) -> None:
        """Generation and checksum, then the payload's own rules; the bytes are read in a worker thread."""
        await asyncio.to_thread(self._receiver.verify, landing, receipt.checksum)
        EncoderOutput(manifest=manifest, data=self._receiver.view(landing))
        self._accounts.pushed(landing.kind, receipt.bytes, receipt.seconds)

    def _files(self, job: Job) -> tuple[Path, ...]:
        return tuple(self._artifacts.input(job.id, each.file) for each in job.plan.references)

    def release(self, landed: Landed) -> None:
        """Give a landing back; harmless when repeated."""
        self._receiver.release(landed.landing)

    def expire(self) -> None:
        """End the leases of senders that are gone."""
        self._receiver.expire(time.time())


def _request(job: Job) -> EncodeRequest:
    plan = job.plan
    return EncodeRequest(
        request_id=job.request_id,
        task=plan.task,
        prompt=plan.prompt,
        height=plan.height,
        width=plan.width,
        num_frames=plan.num_frames,
        keyframes=plan.keyframes,
        references=tuple(
            ReferenceInput(kind=each.kind, use_audio=each.use_audio, start_seconds=each.start_seconds)
            for each in plan.references
        ),
    )


def check_manifest(manifest: Manifest, plan: VideoPlan, rules: PayloadRules) -> None:
    """The manifest's own rules, that it is of this split and model, and that it is of this request.

    Raises:
        PayloadError: the subclass says which rule is broken.
    """
    manifest.check()
    if manifest.text_only and not rules.text_only:
        raise SlotMissing("the encoder sent text alone, in the full split", slot=LAYOUT)
    if rules.text_only and not manifest.text_only:
        raise SlotUnexpected("the encoder sent media too, in the text-only split", slot=LAYOUT)
    if manifest.text_dim != rules.text_dim:
        raise WrongShape(f"slot {TEXT} has {manifest.text_dim} columns, not {rules.text_dim}", slot=TEXT)
    if manifest.text_only:
        return
    layout = Layout.unpack(manifest.layout)
    asked = (plan.task, plan.height, plan.width, plan.num_frames, plan.keyframes, len(plan.references))
    found = (layout.task, layout.height, layout.width, layout.num_frames, layout.keyframes, len(layout.blocks))
    if found != asked:
        raise LayoutInvalid(f"the encoder answered for another request: {found}, not {asked}", slot=LAYOUT)


def _read_payload(path: Path) -> EncoderOutput:
    payload = from_safetensors(path.read_bytes())
    check_values(payload)
    return payload
