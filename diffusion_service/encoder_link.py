"""Whether the encoder can be trusted with a job: it answers, it fits, and the way between the two was proved.

Runs in the diffusion API process, beside everything else, for ever.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from diffusion_service.encoder_client import EncoderClient
from shared_runtime.transport.base import Receiver
from shared_schema.deploy.model import ConnectorName
from shared_schema.encode import READ_VERSIONS, EncoderIdentity, ShmLanding
from shared_schema.errors import EncoderAway, H3Error, JobFailed, PayloadError, ReceiverBusy, SlabFull, TransportError

PERIOD_S = 1.0
STARVING_S = 0.25
"""Between looks while the probe waits for room."""
PROBE_BYTES = 64 * 2**20
_HINTS: dict[ConnectorName, str] = {
    "SharedMemoryConnector": "shared memory needs one host and one slab folder; two hosts need NixlConnector",
    "NixlConnector": "NIXL needs a network on which the encoder reaches this host (UCX_NET_DEVICES, UCX_TLS, firewall)",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Expected:
    """What an encoder must say of itself."""

    weights_revision: str
    text_only: bool
    connector: ConnectorName
    probe_bytes: int
    vae_encode_precision: str = "fp32"
    gpus: tuple[str, ...] = ()
    """UUIDs of our own GPUs, which the encoder must leave alone unless both stages share."""
    share_devices: bool = False


class EncoderLink:
    """Watches one encoder; `reason` is None while jobs may be sent to it.

    `make_room` gives up something in the slab that is only kept, for the probe; False where there is nothing.
    """

    def __init__(
        self,
        client: EncoderClient,
        receiver: Receiver[ShmLanding],
        expected: Expected,
        lease_s: float,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self.client = client
        self._receiver = receiver
        self._expected = expected
        self._lease_s = lease_s
        self._make_room = make_room
        self._proved: tuple[str, int] | None = None
        """The encoder instance to which the way was proved, and how often its ranks had been started anew."""
        self.reason: str | None = "the encoder has not answered yet"
        self.starving = False
        """The probe waits for room in the slab, and nothing else is wrong."""

    def lost(self, reason: str) -> None:
        """A call just failed: nothing is asked of the encoder until it looks well again."""
        self.reason = reason

    async def watch(self) -> None:
        """Look every second, more often while the probe waits for room, for ever."""
        while True:
            before = self.reason
            try:
                self.reason, self.starving, waits = await self._look(), False, False
            except SlabFull as full:
                self.reason = f"the probe of the transport waits: {full}"
                self.starving, waits = not isinstance(full, ReceiverBusy), True
            if self.reason != before:
                logger.info("encoder at %s: %s", self.client.url, self.reason or "ready")
            await asyncio.sleep(STARVING_S if waits else PERIOD_S)

    async def _look(self) -> str | None:
        if self._receiver.trouble is not None:
            return self._receiver.trouble
        try:
            identity = await self.client.identity()
            mismatch = self._mismatch(identity)
            if mismatch is not None:
                return mismatch
            health = await self.client.health()
            if health.status != "healthy":
                return f"the encoder is not ready: {health.reason}"
            instance = (identity.instance_id, health.restarts)
            if self._proved != instance:
                await self._prove()
                self._proved = instance
        except SlabFull:
            raise
        except (H3Error, OSError) as error:
            return str(error)
        return None

    def _mismatch(self, identity: EncoderIdentity) -> str | None:
        if identity.schema_version not in READ_VERSIONS:
            return f"the encoder speaks schema version {identity.schema_version}, not {sorted(READ_VERSIONS)}"
        for name in ("weights_revision", "text_only", "connector", "vae_encode_precision"):
            theirs, ours = getattr(identity, name), getattr(self._expected, name)
            if theirs != ours:
                return f"encoder and diffusion service differ in {name}: {theirs} there, {ours} here"
        shared = sorted(set(identity.gpus) & set(self._expected.gpus))
        if shared and not (identity.share_devices and self._expected.share_devices):
            fix = "give each service its own devices, or set share_devices: true in both stages"
            return f"encoder and diffusion service both use {', '.join(shared)}: {fix}"
        return None

    def _reserve(self, nbytes: int) -> ShmLanding:
        while True:
            try:
                return self._receiver.reserve(nbytes, uuid.uuid4().hex, self._lease_s, time.time())
            except SlabFull as full:
                if isinstance(full, ReceiverBusy) or not self._make_room():
                    raise

    async def _prove(self) -> None:
        """One full-size push through the configured transport between exactly these two processes."""
        nbytes = self._expected.probe_bytes
        landing = self._reserve(nbytes)
        try:
            receipt = await self.client.probe(self._receiver.for_sender(landing), nbytes)
            await asyncio.to_thread(self._receiver.verify, landing, receipt.checksum)
        except (JobFailed, TransportError, PayloadError) as error:
            hint = _HINTS[self._expected.connector]
            raise EncoderAway(f"the probe of the transport failed: {error}; {hint}") from error
        finally:
            with contextlib.suppress(H3Error):
                self._receiver.release(landing)
        logger.info("probe of %d MiB: %.2f GiB/s", nbytes >> 20, nbytes / 2**30 / max(receipt.seconds, 1e-9))
