"""The 64 bytes in front of every payload in a slab. Runs in API processes and in ranks; pure, no torch.

The owner of the slab writes a header when it reserves a landing, the sender writes state and checksum when its bytes
are there. Single fields are written with one aligned store each, because the other side may be reading.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from shared_schema.encode import ShmLanding
from shared_schema.errors import TransportError

HEADER_BYTES = 64
PAGE = 4096
"""Landings begin on pages, so that no two share one."""
LANDING_OVERHEAD = PAGE // 2
"""What a landing takes beside its payload, before it is rounded up to pages: half a page with the header at its end."""
VERSION = 1
_MAGIC = b"H3EO"
_FORMAT = struct.Struct("<4sIII16sQQQd")
_STATE_AT, _CHECKSUM_AT = 8, 48


class LandingState(IntEnum):
    """How far a landing is, as the header says it."""

    FREE = 0
    RESERVED = 1
    WRITTEN = 2
    LAPSED = 3


@dataclass(frozen=True)
class Header:
    """What the header of one landing says."""

    state: int
    request_id: str
    generation: int
    length: int
    checksum: int
    deadline: float
    """Unix seconds."""

    def belongs_to(self, landing: ShmLanding) -> bool:
        """Whether this header was written for exactly this landing."""
        mine = (self.request_id, self.generation, self.length)
        return mine == (landing.request_id, landing.generation, landing.length)


def write_header(slab: memoryview, landing: ShmLanding) -> None:
    """Write the header of a fresh landing."""
    packed = _FORMAT.pack(
        _MAGIC,
        VERSION,
        LandingState.RESERVED,
        0,
        bytes.fromhex(landing.request_id),
        landing.generation,
        landing.length,
        0,
        landing.deadline,
    )
    slab[landing.offset : landing.offset + HEADER_BYTES] = packed


def read_header(slab: memoryview, offset: int) -> Header:
    """Read the header at `offset` bytes.

    Raises:
        TransportError: there is no header, or one of another version.
    """
    magic, version, state, _, request_id, *rest = _FORMAT.unpack_from(slab, offset)
    if magic != _MAGIC:
        raise TransportError(f"no landing begins at offset {offset} of the slab")
    if version != VERSION:
        raise TransportError(f"the slab has headers of version {version}, this program reads version {VERSION}")
    generation, length, checksum, deadline = rest
    return Header(state, request_id.hex(), generation, length, checksum, deadline)


def write_state(slab: memoryview, offset: int, state: LandingState) -> None:
    """Change the state in the header at `offset`."""
    slab[offset + _STATE_AT : offset + _STATE_AT + 4] = struct.pack("<I", state)


def write_checksum(slab: memoryview, offset: int, checksum: str) -> None:
    """Note the checksum (16 hex digits) in the header at `offset`."""
    slab[offset + _CHECKSUM_AT : offset + _CHECKSUM_AT + 8] = struct.pack("<Q", int(checksum, 16))
