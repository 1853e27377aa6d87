"""Payloads that wait in the encoder's leader, and their way out. Runs in the leader; torch.

A payload on a GPU stays there until its push, which writes it straight into a slab; over NIXL, which is slower out of
a GPU's memory, it goes through page-locked memory that is kept, unless the deploy file has NIXL read the GPU's. One on
the host has its checksum made while it waits, so that its push is one memcpy.
"""

from dataclasses import dataclass

import torch

from encoder_service.commands import Pushed
from shared_runtime.conditioning.packing import Packed
from shared_runtime.device_memory import PageLocker, Staging, TensorSource
from shared_runtime.transport.codec import check_values, checksum
from shared_runtime.transport.inline import to_safetensors
from shared_runtime.transport.nixl import DeviceBytes
from shared_runtime.transport.nixl_sender import NixlSender
from shared_runtime.transport.shm import ShmSender
from shared_schema.encode import InlineLanding, Landing, NixlLanding, PushReceipt, ShmLanding
from shared_schema.encoder_output import EncoderOutput, Manifest
from shared_schema.errors import LeaseExpired, TransportError

_PATTERN_BYTES = 1_048_583
"""Of the probe's pattern, a prime; then it begins again. As a whole, 64 MiB would take half a GiB to make."""


@dataclass(frozen=True)
class _OnHost:
    payload: EncoderOutput
    checksum: str

    def on_host(self) -> "_OnHost":
        return self


@dataclass(frozen=True)
class _OnDevice:
    packed: Packed

    def on_host(self) -> _OnHost:
        payload = self.packed.on_host()
        return _OnHost(payload, checksum(payload.data))


def on_device(raw: torch.Tensor) -> DeviceBytes:
    """Flat bytes of a GPU as NIXL is told of them."""
    return DeviceBytes(raw.data_ptr(), raw.numel(), raw.device.index or 0, raw)


class Outbox:
    """What is encoded and not pushed, by the encoding's id."""

    def __init__(
        self,
        shm: ShmSender | None,
        nixl: NixlSender | None,
        locker: PageLocker | None = None,
        *,
        gpu_direct: bool = False,
    ) -> None:
        """The sender of the deployment's connector, and no other; `gpu_direct` is of NIXL's."""
        self._gpu_direct = gpu_direct
        self._staging = Staging(page_locked=torch.cuda.is_available())
        self._shm = shm
        self._nixl = nixl
        self._locker = locker
        """What page-locks the slabs that `shm` maps."""
        self._waiting: dict[str, _OnHost | _OnDevice] = {}

    def keep(self, encoding_id: str, packed: Packed) -> Manifest:
        """Prove a payload's values and keep it.

        Raises:
            PayloadError: it is not legal; nothing is kept.
        """
        if packed.raw.device.type == "cpu":
            payload = packed.on_host()
            check_values(payload)
            self._waiting[encoding_id] = _OnHost(payload, checksum(payload.data))
        else:
            packed.check_values()
            self._waiting[encoding_id] = _OnDevice(packed)
        return packed.manifest

    def push(self, encoding_id: str, landing: Landing) -> Pushed:
        """Write a payload into its landing and forget it; after an error it still waits.

        Raises:
            LeaseExpired: it does not wait here, or the landing has lapsed.
            TransportError, PayloadError: see the senders' `push`; a landing of another connector too.
        """
        waiting = self._waiting.get(encoding_id)
        if waiting is None:
            raise LeaseExpired(f"encoding {encoding_id} is not here: it was pushed, dropped, or lapsed")
        pushed = self._deliver(landing, waiting)
        self._waiting.pop(encoding_id, None)
        return pushed

    def _deliver(self, landing: Landing, waiting: _OnHost | _OnDevice) -> Pushed:
        match landing:
            case ShmLanding():
                return Pushed(self._to_slab(landing, waiting))
            case NixlLanding():
                return Pushed(self._to_agent(landing, waiting))
            case InlineLanding():
                blob = to_safetensors(waiting.on_host().payload)
                return Pushed(PushReceipt(bytes=len(blob), checksum=checksum(memoryview(blob)), seconds=0.0), blob)

    def _to_slab(self, landing: ShmLanding, waiting: _OnHost | _OnDevice) -> PushReceipt:
        match waiting:
            case _OnHost(payload, known):
                return self._through_memory().push(landing, payload, checksum=known)
            case _OnDevice(packed):
                return self._through_memory().push_source(landing, TensorSource(packed.raw, self._locker))

    def _to_agent(self, landing: NixlLanding, waiting: _OnHost | _OnDevice) -> PushReceipt:
        match waiting:
            case _OnHost(payload, known):
                return self._over_nixl().push(landing, payload, checksum=known)
            case _OnDevice(packed):
                # The checksum is made of bytes on the host in any case.
                with self._staging.holding(packed.raw) as (data, known):
                    sent = on_device(packed.raw) if self._gpu_direct else data
                    return self._over_nixl().push_bytes(landing, sent, checksum=known)

    def _through_memory(self) -> ShmSender:
        if self._shm is None:
            raise TransportError("a landing in shared memory was given to an encoder that sends over NixlConnector")
        return self._shm

    def _over_nixl(self) -> NixlSender:
        if self._nixl is None:
            raise TransportError("a landing for NIXL was given to an encoder that sends over SharedMemoryConnector")
        return self._nixl

    def probe(self, landing: Landing, nbytes: int) -> Pushed:
        """Write a known pattern, to prove the way."""
        pattern = _pattern(nbytes).numpy().data
        match landing:
            case ShmLanding():
                return Pushed(self._through_memory().push_bytes(landing, pattern))
            case NixlLanding():
                return Pushed(self._over_nixl().push_bytes(landing, pattern))
            case InlineLanding():
                return Pushed(PushReceipt(bytes=nbytes, checksum=checksum(pattern), seconds=0.0), bytes(pattern))

    def drop(self, encoding_id: str) -> None:
        """Forget a payload; one that is not here is forgotten already."""
        self._waiting.pop(encoding_id, None)

    def tidy(self) -> None:
        """Let go of slabs whose owners are gone."""
        for sender in (self._shm, self._nixl):
            if sender is not None:
                sender.forget_removed()


def _pattern(nbytes: int) -> torch.Tensor:
    """Bytes that repeat nowhere near a page, so that a shifted or partial write shows."""
    block = (torch.arange(_PATTERN_BYTES, dtype=torch.int64) * 2_654_435_761 >> 7).to(torch.uint8)
    return block.repeat(-(-nbytes // _PATTERN_BYTES))[:nbytes]
