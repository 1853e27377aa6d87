"""The receiver's slab: memory that its owner reserves piece by piece for senders. Diffusion API process; no torch.

A landing's life: reserved (the lease runs) -> held (its push was verified, no lease any more) -> gone. A lease that
ends makes it lapsed. Memory of a lapsed or released landing is given to another only once no sender holds the
landing's claim (see claims.py): until then it is in quarantine.
"""

import math
import mmap
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Literal, Self

from shared_runtime.transport.allocator import FirstFit
from shared_runtime.transport.claims import drop_claim, try_claim
from shared_runtime.transport.codec import checksum as checksum_of
from shared_runtime.transport.files import SlabFile, create_slab_file
from shared_runtime.transport.header import (
    HEADER_BYTES,
    LANDING_OVERHEAD,
    PAGE,
    LandingState,
    read_header,
    write_checksum,
    write_header,
    write_state,
)
from shared_schema.encode import ShmLanding
from shared_schema.errors import ChecksumMismatch, LeaseExpired, PayloadError, SlabFull, TransportError, WrongRequest

_LEAD = LANDING_OVERHEAD - HEADER_BYTES
"""Bytes before a header: payloads begin in the middle of a page. Large buffers begin near the start of one, and where
source and target are equally far into their pages, memcpy has to take a path three to four times slower."""


@dataclass(frozen=True)
class SlabStats:
    """What a slab holds now, and what it has seen."""

    size: int
    bytes_in_use: int
    """Of reserved, held and quarantined landings, headers and rounding included."""
    high_water: int
    """The most that `bytes_in_use` has been."""
    landings: int
    """Reserved or held now."""
    quarantined: int
    """Lapsed or released, but a sender still holds the claim."""
    reserved_total: int
    lapsed_total: int
    swept_total: int
    """Slabs of dead owners that were removed when this one was made."""


class _Phase(Enum):
    RESERVED = auto()
    HELD = auto()
    QUARANTINED = auto()


@dataclass
class _Entry:
    landing: ShmLanding
    phase: _Phase = _Phase.RESERVED


class Slab:
    """A slab that this process owns. Thread-safe. Build it with `create`, end it with `close`."""

    def __init__(self, file: SlabFile, size: int) -> None:
        self.path = file.path
        self.size = size
        self._fd = file.fd
        self._swept = file.swept
        # Populating touches every page once: no request pays page faults later.
        self._map = mmap.mmap(file.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._view = memoryview(self._map)
        self._room = FirstFit(size, PAGE)
        self._entries: dict[int, _Entry] = {}
        self._generation = self._lapsed = self._high_water = 0
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def create(cls, folder: Path, size: int, owner: str) -> Self:
        """Make a slab of `size` bytes in `folder`, after removing slabs there that no living process owns.

        `owner` becomes part of the file's name. The whole size is allocated and touched here.

        Raises:
            DeployError: folder or room do not do; the message says what is needed, what was found, what to change.
        """
        size = -(-size // PAGE) * PAGE
        file = create_slab_file(folder.absolute(), size, owner)
        try:
            return cls(file, size)
        except BaseException:
            file.path.unlink(missing_ok=True)
            os.close(file.fd)
            raise

    @property
    def largest_landing(self) -> int:
        """Payload bytes that fit into the empty slab."""
        return self.size - LANDING_OVERHEAD

    def reserve(self, length: int, request_id: str, lease_s: float, now: float) -> ShmLanding:
        """Set room for `length` bytes of payload aside until `now + lease_s` (Unix seconds).

        Raises:
            SlabFull: no room at present: try again after a release.
            TransportError: the slab is too small even when empty, or is closed.
            ValueError: the lease is not a positive, finite number of seconds.
        """
        if not (math.isfinite(lease_s) and lease_s > 0):
            raise ValueError(f"a lease is a positive, finite number of seconds, not {lease_s}")
        with self._lock:
            offset = self._take(_LEAD + HEADER_BYTES + length) + _LEAD
            self._generation += 1
            landing = ShmLanding(
                path=str(self.path),
                offset=offset,
                length=length,
                generation=self._generation,
                request_id=request_id,
                deadline=now + lease_s,
            )
            write_header(self._view, landing)
            self._entries[landing.generation] = _Entry(landing)
            self._high_water = max(self._high_water, self._room.in_use)
            return landing

    def _take(self, need: int) -> int:
        self._check_open()
        if self._room.rounded(need) > self._room.size:
            raise TransportError(
                f"the slab is too small for this payload: needed {need} bytes, found {self.size}; "
                "set a larger service.slab_bytes"
            )
        offset = self._room.take(need)
        if offset is None:
            self._collect()
            offset = self._room.take(need)
        if offset is None:
            raise SlabFull(f"the slab has no room for {need} bytes now: {self._room.in_use} of {self.size} in use")
        return offset

    def for_sender(self, landing: ShmLanding) -> ShmLanding:
        """What the sender is told: the landing itself."""
        return landing

    @property
    def kind(self) -> Literal["shm"]:
        """Senders reach it by themselves."""
        return "shm"

    @property
    def trouble(self) -> None:
        """Nothing can keep a slab from receiving."""

    def written(self, landing: ShmLanding, checksum: str) -> None:
        """Note what a sender that cannot reach the header has said: its bytes are there.

        Raises:
            LeaseExpired: the landing lapsed or was released already.
        """
        with self._lock:
            self._live(landing)
            write_checksum(self._view, landing.offset, checksum)
            write_state(self._view, landing.offset, LandingState.WRITTEN)

    def view(self, landing: ShmLanding) -> memoryview:
        """The payload's bytes, valid until the landing is released.

        Raises:
            LeaseExpired: it lapsed or was released already.
        """
        with self._lock:
            return self._payload(self._live(landing).landing)

    def verify(self, landing: ShmLanding, checksum: str) -> None:
        """Prove that the push for this landing is complete and unharmed, and end its lease: it is held from here.

        The claim to the landing and its expiry are decided under one lock, so a lease cannot end while bytes are
        being read. After an error the lease runs on. Takes as long as one read of the payload: call it in a thread.

        Raises:
            LeaseExpired: the landing lapsed or was released before.
            WrongRequest: no finished push, or one of another request or generation.
            ChecksumMismatch: the bytes are not those the sender had.
        """
        entry = self._hold(landing)
        try:
            self._prove(entry.landing, checksum)
        except (PayloadError, TransportError):
            with self._lock:
                if entry.phase is _Phase.HELD:
                    entry.phase = _Phase.RESERVED
            raise

    def _prove(self, landing: ShmLanding, checksum: str) -> None:
        header = read_header(self._view, landing.offset)
        if not header.belongs_to(landing) or header.state != LandingState.WRITTEN:
            raise WrongRequest(f"landing {landing.generation} holds no finished push of request {landing.request_id}")
        found = checksum_of(self._payload(landing))
        if not found == checksum == f"{header.checksum:016x}":
            raise ChecksumMismatch(
                f"landing {landing.generation}: the sender said {checksum}, the header {header.checksum:016x}, "
                f"the bytes make {found}"
            )

    def _hold(self, landing: ShmLanding) -> _Entry:
        with self._lock:
            entry = self._live(landing)
            entry.phase = _Phase.HELD
            return entry

    def release(self, landing: ShmLanding) -> None:
        """Give the memory back, whatever state the landing is in. Harmless when repeated."""
        with self._lock:
            entry = self._entries.get(landing.generation)
            if entry is not None and entry.landing.request_id == landing.request_id and not self._closed:
                self._retire(entry)

    def expire(self, now: float) -> list[ShmLanding]:
        """End the leases that `now` (Unix seconds) has passed and empty the quarantine; the landings that lapsed."""
        with self._lock:
            if self._closed:
                return []
            late = [e for e in self._entries.values() if e.phase is _Phase.RESERVED and e.landing.deadline <= now]
            for entry in late:
                self._lapsed += 1
                self._retire(entry)
            self._collect()
            return [entry.landing for entry in late]

    def _retire(self, entry: _Entry) -> None:
        entry.phase = _Phase.QUARANTINED
        write_state(self._view, entry.landing.offset, LandingState.LAPSED)
        self._free(entry.landing)

    def _collect(self) -> None:
        for entry in [e for e in self._entries.values() if e.phase is _Phase.QUARANTINED]:
            self._free(entry.landing)

    def _free(self, landing: ShmLanding) -> None:
        if not try_claim(self._fd, landing.generation):
            return
        write_state(self._view, landing.offset, LandingState.FREE)
        self._room.give(landing.offset - _LEAD)
        del self._entries[landing.generation]
        drop_claim(self._fd, landing.generation)

    def _live(self, landing: ShmLanding) -> _Entry:
        self._check_open()
        entry = self._entries.get(landing.generation)
        if entry is None or entry.phase is _Phase.QUARANTINED:
            raise LeaseExpired(f"landing {landing.generation} of request {landing.request_id} lapsed or was released")
        if entry.landing != landing:
            raise WrongRequest(f"landing {landing.generation} is not that of request {landing.request_id}")
        return entry

    def _payload(self, landing: ShmLanding) -> memoryview:
        start = landing.offset + HEADER_BYTES
        return self._view[start : start + landing.length]

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the slab is closed")

    @property
    def stats(self) -> SlabStats:
        """Counters for health, metrics and tests."""
        with self._lock:
            quarantined = sum(entry.phase is _Phase.QUARANTINED for entry in self._entries.values())
            return SlabStats(
                size=self.size,
                bytes_in_use=self._room.in_use,
                high_water=self._high_water,
                landings=len(self._entries) - quarantined,
                quarantined=quarantined,
                reserved_total=self._generation,
                lapsed_total=self._lapsed,
                swept_total=self._swept,
            )

    def close(self) -> None:
        """Remove the file and unmap it. Views that somebody still holds stay readable. Harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            with suppress(BufferError):
                self._view.release()
                self._map.close()
