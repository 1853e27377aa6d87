"""What an MP4's index announces, read before FFmpeg builds it in memory. Runs in API threads and in encoder ranks."""

import mmap
from collections.abc import Iterator
from pathlib import Path

from shared_schema.errors import InvalidRequest

MAX_SAMPLES = 3_000_000
"""FFmpeg spends some 60 bytes on each: 180 MB. Fifteen seconds of PCM at 192 kHz are 2.9 million."""
_COMPRESSED = b"dcomzlib"
_COUNT_AT = {b"stsz": 12, b"stz2": 12, b"trun": 8}
"""Boxes that announce samples -> bytes from the box' name to its 32-bit count."""
_JUMPS = (b"sidx", b"mfra")
"""Boxes that let FFmpeg read boxes from anywhere, so also from inside of `mdat`."""


def check_index(path: Path) -> None:
    """Refuse an MP4 whose index would not fit in memory: twelve bytes can announce four thousand million samples.

    Names are looked for in all bytes outside of `mdat` and not along the boxes, so that no nesting hides one.

    Raises:
        InvalidRequest: too many samples, or a compressed index.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        ranges = list(_outside_mdat(data))
        if any(data.find(name, start, end) >= 0 for name in _JUMPS for start, end in ranges):
            ranges = [(0, len(data))]
        if any(data.find(_COMPRESSED, start, end) >= 0 for start, end in ranges):
            raise InvalidRequest("an MP4 with a compressed index is not read here")
        total = sum(_announced(data, name, start, end) for name in _COUNT_AT for start, end in ranges)
    if total > MAX_SAMPLES:
        raise InvalidRequest(f"the file announces {total} samples, at most {MAX_SAMPLES} are read")


def _outside_mdat(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Start and end of every top-level box but `mdat`; what follows a box without a legal size is one range."""
    at = 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4])
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16])
        end = len(data) if size == 0 or size < 8 else min(at + size, len(data))
        if (size and size < 8) or data[at + 4 : at + 8] != b"mdat":
            yield at, end
        at = end


def _announced(data: mmap.mmap, name: bytes, start: int, end: int) -> int:
    """The samples that all boxes of one name between `start` and `end` announce."""
    total = 0
    at = data.find(name, start, end)
    while at >= 0:
        long_size = 8 if data[max(0, at - 4) : at] == b"\0\0\0\1" else 0
        count_at = at + _COUNT_AT[name] + long_size
        total += int.from_bytes(data[count_at : count_at + 4])
        at = data.find(name, at + 1, end)
    return total
