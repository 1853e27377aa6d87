"""From a job to a verified payload in the slab: encode, reserve, push, prove. Runs in the diffusion API process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from diffusion_service.commands import MediaFiles
from diffusion_service.conditioning_cache import ConditioningCache, Kept, Use, conditioning_key
from diffusion_service.encoder_link import EncoderLink
from diffusion_service.encoders import Encoders
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.job import CacheUse, Job, VideoPlan
from diffusion_service.scheduler import Turn
from shared_runtime.tracing import span
from shared_runtime.transport.accounts import TransportAccounts, TransportName
from shared_runtime.transport.base import Receiver, Sender
from shared_runtime.transport.codec import check_values
from shared_runtime.transport.inline import from_safetensors
from shared_schema.encode import EncodeProgress, EncodeRequest, Encoding, PushReceipt, ReferenceInput, ShmLanding
from shared_schema.encoder_output import TEXT, EncoderOutput, Manifest
from shared_schema.errors import (
    EncoderAway,
    H3Error,
    LayoutInvalid,
    NotReady,
    RankDied,
    ReceiverBusy,
    SlabFull,
    SlotMissing,
    SlotUnexpected,
    WrongShape,
)
from shared_schema.layout import LAYOUT, Layout
from shared_schema.videos import Phase

PROGRESS_S = 0.2
"""Between looks at how far an encoding is."""
FULL_PAUSE_S = 0.1
"""Between looks for room in a full slab."""


@dataclass(frozen=True)
class Landed:
    """A payload that is proved and waits for the ranks."""

    use: Use
    durations: dict[str, float]
    media: MediaFiles | None = None
    """What the ranks still have to encode: in the text-only split the payload is text alone."""
    cache: CacheUse | None = None
    """Whether the payload was there already; None where nothing is kept."""

    @property
    def kept(self) -> Kept:
        """Landing, manifest, and what the encoder reported."""
        return self.use.kept


@dataclass(frozen=True)
class PayloadRules:
    """What every payload of this service must be, whatever its request."""

    text_only: bool
    text_dim: int
    weights_revision: str = ""


class Watcher(Protocol):
    """The job whose payload is on its way."""

    @property
    def turn(self) -> Turn:
        """Its place among the jobs that want an encoder; the lowest goes first."""

    def reach(self, phase: Phase) -> None:
        """A phase begins."""

    def encoded(self, progress: EncodeProgress) -> None:
        """A part of its encoding is finished."""

    def starve(self, starving: bool) -> None:
        """Its push, or the probe of the encoder that it needs, waits for room in the slab, or no longer does."""


class Handover:
    """The way of a payload into the slab that this service owns."""

    def __init__(
        self,
        encoders: Encoders,
        receiver: Receiver[ShmLanding],
        own_sender: Sender[ShmLanding],
        artifacts: Artifacts,
        lease_s: float,
        rules: PayloadRules,
        cache: ConditioningCache,
        accounts: TransportAccounts,
    ) -> None:
        self._encoders = encoders
        self._receiver = receiver
        self._own_sender = own_sender
        self._artifacts = artifacts
        self._lease_s = lease_s
        self._rules = rules
        self._cache = cache
        self._accounts = accounts

    async def land(self, job: Job, watcher: Watcher) -> Landed:
        """Encode a job, find what an equal one was encoded to, or take the payload it brought; have it in a landing.

        Waits for an encoder as long as none is there.

        Raises:
            H3Error: whatever went wrong, its type kept; nothing is left reserved.
        """
        plan, rules = job.plan, self._rules
        if plan.references or plan.encoder_output is not None:
            await asyncio.to_thread(self._artifacts.bring_inputs, job.id)
        if plan.encoder_output is not None:
            return await self._land_own(job, watcher, plan.encoder_output)
        request, files = _request(job), self._files(job)
        media = MediaFiles(request, files) if rules.text_only else None
        if not self._cache.enabled:
            kept, durations = await self._encode(job, request, files, watcher)
            return Landed(self._cache.pass_by(kept), durations, media)
        digests = tuple(each.sha256 for each in plan.references)
        key = conditioning_key(request, digests, rules.weights_revision, text_only=rules.text_only)
        async with self._cache.turn(key):
            found = self._cache.find(key)
            if found is not None:
                return Landed(found, {"encode": 0.0, "transfer": 0.0}, media, "hit")
            kept, durations = await self._encode(job, request, files, watcher)
            return Landed(self._cache.keep(key, kept), durations, media, "miss")

    async def _encode(
        self, job: Job, request: EncodeRequest, files: tuple[Path, ...], watcher: Watcher
    ) -> tuple[Kept, dict[str, float]]:
        """Have it encoded and pushed. An encoder that is away or not ready has not begun: the next one is asked."""
        while True:
            async with self._encoders.one(watcher.turn, watcher.starve) as link:
                watcher.reach("encoding")
                start = time.perf_counter()
                try:
                    async with _followed(link, request.request_id, watcher):
                        with span("encode"):
                            encoding = await link.client.encode(request, files)
                    encoded = time.perf_counter()
                    with span("transfer"):
                        landing = await self._transfer(job, link, encoding, watcher)
                except (NotReady, EncoderAway) as error:
                    link.lost(error.message)
                    continue
                except RankDied as error:
                    link.lost(error.message)
                    raise
            durations = {
                **{f"encode_{name}": round(seconds, 6) for name, seconds in encoding.timings.items()},
                "encode": round(encoded - start, 6),
                "transfer": round(time.perf_counter() - encoded, 6),
            }
            return Kept(landing, encoding.manifest, encoding.references), durations

    async def _transfer(self, job: Job, link: EncoderLink, encoding: Encoding, watcher: Watcher) -> ShmLanding:
        """Have an encoding pushed into a landing; if that fails, nobody keeps anything of it."""
        try:
            check_manifest(encoding.manifest, job.plan, self._rules)
            watcher.reach("transferring")
            renew = partial(link.client.renew, encoding)
            with span("wait for room"):
                landing = await self._room(encoding.manifest.nbytes, job.request_id, watcher, renew)
            async with self._released_on_error(landing, self._receiver.kind):
                with span("push"):
                    receipt = await link.client.push(encoding, self._receiver.for_sender(landing))
                await self._prove(landing, encoding.manifest, receipt)
                self._accounts.pushed(self._receiver.kind, receipt.bytes, receipt.seconds)
        except EncoderAway as error:
            raise RankDied("the encoder ended before it pushed what it had encoded") from error
        except BaseException:
            with contextlib.suppress(H3Error):
                await link.client.drop(encoding)
            raise
        return landing

    async def _land_own(self, job: Job, watcher: Watcher, file: str) -> Landed:
        watcher.reach("transferring")
        start = time.perf_counter()
        payload = await asyncio.to_thread(_read_payload, self._artifacts.input(job.id, file))
        landing = await self._room(payload.manifest.nbytes, job.request_id, watcher, None)
        async with self._released_on_error(landing, landing.kind):
            receipt = await asyncio.to_thread(self._own_sender.push, landing, payload)
            await self._prove(landing, payload.manifest, receipt)
            self._accounts.pushed(landing.kind, receipt.bytes, receipt.seconds)
        use = self._cache.pass_by(Kept(landing, payload.manifest, ()))
        return Landed(use, {"transfer": round(time.perf_counter() - start, 6)})

    @contextlib.asynccontextmanager
    async def _released_on_error(self, landing: ShmLanding, transport: TransportName) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            self._receiver.release(landing)
            if isinstance(error, H3Error):
                self._accounts.failed(transport, error.code)
            raise

    async def _room(
        self, nbytes: int, request_id: str, watcher: Watcher, renew: Callable[[], Awaitable[None]] | None
    ) -> ShmLanding:
        """A landing. What is kept of earlier jobs makes room; while there is none, the push waits and `renew` is called
        so that the encoding stays."""
        begun = renewed = time.monotonic()
        waited = False
        try:
            while True:
                try:
                    landing = self._receiver.reserve(nbytes, request_id, self._lease_s, time.time())
                    break
                except SlabFull as full:
                    busy = isinstance(full, ReceiverBusy)
                    if not busy and self._cache.make_room():
                        continue
                waited = True
                # Nothing need be given up for a receiver that is ready again in a moment.
                watcher.starve(not busy)
                await asyncio.sleep(FULL_PAUSE_S)
                if renew is not None and time.monotonic() - renewed > self._lease_s / 3:
                    await renew()
                    renewed = time.monotonic()
        finally:
            watcher.starve(False)
        if waited:
            self._accounts.waited(self._receiver.kind, time.monotonic() - begun)
        return landing

    async def _prove(self, landing: ShmLanding, manifest: Manifest, receipt: PushReceipt) -> None:
        """Generation and checksum, then the payload's own rules; the bytes are read in a worker thread."""
        with span("verify"):
            await asyncio.to_thread(self._receiver.verify, landing, receipt.checksum)
            EncoderOutput(manifest=manifest, data=self._receiver.view(landing))

    def _files(self, job: Job) -> tuple[Path, ...]:
        return tuple(self._artifacts.input(job.id, each.file) for each in job.plan.references)

    def expire(self) -> None:
        """End the leases of senders that are gone."""
        self._receiver.expire(time.time())


@contextlib.asynccontextmanager
async def _followed(link: EncoderLink, request_id: str, watcher: Watcher) -> AsyncIterator[None]:
    """Within it, the watcher is told how far the encoding is."""
    following = asyncio.create_task(_follow(link, request_id, watcher))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait([following])


async def _follow(link: EncoderLink, request_id: str, watcher: Watcher) -> None:
    """For ever. An encoder that has nothing to say, or is another one behind the same URL, costs progress alone."""
    seen = None
    while True:
        await asyncio.sleep(PROGRESS_S)
        with contextlib.suppress(H3Error):
            now = await link.client.progress(request_id)
            if now != seen:
                watcher.encoded(now)
                seen = now


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
