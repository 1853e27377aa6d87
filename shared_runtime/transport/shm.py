"""Shared memory, the side that does not own the slab: the sender's push, and the ranks' reading. No torch.

`ShmSender` runs in the encoder's leader, `SlabReader` in the diffusion service's ranks.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from xxhash import xxh3_64

from shared_runtime.transport.base import Source
from shared_runtime.transport.claims import drop_claim, try_claim
from shared_runtime.transport.codec import copy
from shared_runtime.transport.files import MappedSlab, OnMap, SlabFolder
from shared_runtime.transport.header import (
    HEADER_BYTES,
    Header,
    LandingState,
    read_header,
    write_checksum,
    write_state,
)
from shared_schema.encode import PushReceipt, ShmLanding
from shared_schema.encoder_output import EncoderOutput
from shared_schema.errors import LeaseExpired, TransportError, WrongRequest

_PIECE = 2**20
"""Bytes that are copied and then summed in one go."""
Copy = Callable[[memoryview, memoryview], None]
"""Copies the second view over the first, of equal length."""


class ShmSender:
    """Writes payloads into landings of slabs in one folder. Thread-safe: one push at a time."""

    def __init__(
        self, folder: Path, *, clock: Callable[[], float] = time.time, copy: Copy = copy, on_map: OnMap | None = None
    ) -> None:
        self._slabs = SlabFolder(folder.absolute(), on_map)
        self._clock = clock
        self._copy = copy
        self._lock = threading.Lock()

    def push(self, landing: ShmLanding, payload: EncoderOutput, *, checksum: str | None = None) -> PushReceipt:
        """Write the payload's bytes into its landing.

        `checksum` is the payload's, where the caller has made it beforehand; a push is one memcpy then. Without it,
        it is made here, beside the copy.

        Raises:
            LeaseExpired: the landing's deadline has passed, or its owner gave it up; nothing of it is used.
            WrongRequest: the landing there is another request's or another generation's.
            TransportError: the slab cannot be opened, or the landing is no landing of this payload.
        """
        return self.push_bytes(landing, payload.data[: payload.manifest.nbytes], checksum=checksum)

    def push_bytes(self, landing: ShmLanding, data: memoryview, *, checksum: str | None = None) -> PushReceipt:
        """Write any bytes into a landing of just their length. Errors as `push`."""
        plain = data.cast("B")

        def write(target: memoryview) -> str:
            if checksum is None:
                return self._copy_and_sum(target, plain)
            self._copy(target, plain)
            return checksum

        return self._push(landing, plain.nbytes, write)

    def push_source(self, landing: ShmLanding, source: Source) -> PushReceipt:
        """Have a source write itself into a landing of just its length. Errors as `push`."""
        return self._push(landing, source.nbytes, source.write_into)

    def _push(self, landing: ShmLanding, nbytes: int, write: Callable[[memoryview], str]) -> PushReceipt:
        if nbytes != landing.length:
            raise TransportError(f"a landing of {landing.length} bytes was given for {nbytes} bytes")
        with self._lock:
            slab = self._slabs.open(landing.path)
            if not try_claim(slab.fd, landing.generation):
                # The owner marks a landing before it takes the claim to give it away.
                self._check_reserved(slab, landing)
                raise TransportError(f"landing {landing.generation} is being written by another sender")
            try:
                self._check_reserved(slab, landing)
                return self._write(slab, landing, write)
            finally:
                drop_claim(slab.fd, landing.generation)

    def _write(self, slab: MappedSlab, landing: ShmLanding, write: Callable[[memoryview], str]) -> PushReceipt:
        start = landing.offset + HEADER_BYTES
        target = slab.view[start : start + landing.length]
        begun = time.perf_counter()
        known = write(target)
        seconds = time.perf_counter() - begun
        self._check_reserved(slab, landing)
        write_checksum(slab.view, landing.offset, known)
        write_state(slab.view, landing.offset, LandingState.WRITTEN)
        return PushReceipt(bytes=landing.length, checksum=known, seconds=seconds)

    def _copy_and_sum(self, target: memoryview, data: memoryview) -> str:
        """Copy, and the checksum of the sender's own bytes, so that a copy gone wrong is found.

        Piece by piece: each is still in the processor's cache when it is read the second time.
        """
        digest = xxh3_64()
        for start in range(0, data.nbytes, _PIECE):
            piece = data[start : start + _PIECE]
            self._copy(target[start : start + _PIECE], piece)
            digest.update(piece)
        return digest.hexdigest()

    def _check_reserved(self, slab: MappedSlab, landing: ShmLanding) -> None:
        header = _header_of(slab, landing, late=self._clock() >= landing.deadline)
        if header.state in (LandingState.FREE, LandingState.LAPSED) or self._clock() >= header.deadline:
            raise LeaseExpired(f"the lease of landing {landing.generation} has ended")
        if header.state != LandingState.RESERVED:
            raise TransportError(f"landing {landing.generation} has been written already")

    def forget_removed(self) -> None:
        """Unmap slabs whose owner has removed them. Every push does it too; call it now and then while idle."""
        with self._lock:
            self._slabs.forget_removed()

    def close(self) -> None:
        """Unmap everything."""
        with self._lock:
            self._slabs.close()


class SlabReader:
    """Reads landings that the owner has verified and holds. For the diffusion ranks; not thread-safe."""

    def __init__(self, folder: Path, on_map: OnMap | None = None) -> None:
        self._slabs = SlabFolder(folder.absolute(), on_map)

    def view(self, landing: ShmLanding) -> memoryview:
        """The payload's bytes, valid until the owner releases the landing. Writable only because torch wants it so.

        Raises:
            WrongRequest: the landing there is another's, or has not been written.
            LeaseExpired: the owner has given it up.
            TransportError: the slab cannot be opened.
        """
        slab = self._slabs.open(landing.path)
        header = _header_of(slab, landing, late=False)
        if header.state in (LandingState.FREE, LandingState.LAPSED):
            raise LeaseExpired(f"landing {landing.generation} was given up by its owner")
        if header.state != LandingState.WRITTEN:
            raise WrongRequest(f"landing {landing.generation} has not been written")
        start = landing.offset + HEADER_BYTES
        return slab.view[start : start + landing.length]

    def whole(self, path: str) -> memoryview:
        """The whole slab at `path`, mapped from now on.

        Raises:
            TransportError: it is not on this host, or cannot be opened.
        """
        return self._slabs.open(path).view

    def close(self) -> None:
        """Unmap everything."""
        self._slabs.close()


def _header_of(slab: MappedSlab, landing: ShmLanding, *, late: bool) -> Header:
    """The landing's header; what else lies there of a `late` landing only says that it lapsed and was reused."""
    if landing.offset + HEADER_BYTES + landing.length > slab.size:
        raise TransportError(f"landing {landing.generation} reaches past the end of its slab")
    try:
        header = read_header(slab.view, landing.offset)
    except TransportError:
        if late:
            raise LeaseExpired(f"landing {landing.generation} lapsed and its memory was given away") from None
        raise
    if not header.belongs_to(landing):
        if header.generation > landing.generation:
            raise LeaseExpired(f"landing {landing.generation} lapsed: its memory belongs to {header.generation} now")
        raise WrongRequest(f"landing {landing.generation} of request {landing.request_id} is not there")
    return header
