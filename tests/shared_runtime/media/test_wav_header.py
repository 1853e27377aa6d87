"""Only a WAV that leaves its size open may end anywhere."""

import struct
from pathlib import Path

import pytest

from shared_runtime.media.wav_header import ends_with_file

OPEN = 0xFFFFFFFF


def chunk(name: bytes, size: int, content: bytes = b"") -> bytes:
    return name + struct.pack("<I", size) + content


@pytest.mark.parametrize(
    ("start", "chunks", "expected"),
    [
        (b"RIFF", chunk(b"fmt ", 16, bytes(16)) + chunk(b"data", OPEN), True),
        (b"RIFF", chunk(b"LIST", 5, b"data\0\0") + chunk(b"data", 0), True),
        (b"RIFF", chunk(b"LIST", 8, chunk(b"data", OPEN)) + chunk(b"data", 4), False),
        (b"RF64", chunk(b"ds64", 28, bytes(28)) + chunk(b"data", OPEN), False),
        (b"RIFF", chunk(b"LIST", 100), False),
        (b"RIFF", b"dat", False),
    ],
)
def test_what_a_header_leaves_open(tmp_path: Path, start: bytes, chunks: bytes, expected: bool) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(start + struct.pack("<I", OPEN) + b"WAVE" + chunks)
    assert ends_with_file(path) is expected
