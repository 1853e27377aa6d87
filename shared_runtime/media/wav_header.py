"""Whether a WAV's header knows how long its sound is. Runs in API threads and in encoder ranks."""

import os
from pathlib import Path

_PLACEHOLDER = 0x7FFF_F000
"""Bytes: SoX's for a size that it does not know yet, FFmpeg's is 0xffffffff; no file that is read here is as large."""


def ends_with_file(path: Path) -> bool:
    """Whether the size of a WAV's sound was left open, as who writes to a pipe has to: all that follows is sound."""
    with path.open("rb") as file:
        if file.read(12)[:4] != b"RIFF":
            return False
        while len(head := file.read(8)) == 8:
            size = int.from_bytes(head[4:], "little")
            if head[:4] == b"data":
                return size == 0 or size >= _PLACEHOLDER
            file.seek(size + size % 2, os.SEEK_CUR)
    return False
