"""An MP4 may not announce more samples than fit in memory, however it hides them."""

import struct
from pathlib import Path

import pytest

from shared_runtime.media import classify
from shared_runtime.media.mp4_index import MAX_SAMPLES, check_index
from shared_schema.errors import InvalidRequest


def box(name: bytes, body: bytes, *, long_size: bool = False) -> bytes:
    if long_size:
        return struct.pack(">I4sQ", 1, name, 16 + len(body)) + body
    return struct.pack(">I4s", 8 + len(body), name) + body


SIZES = struct.pack(">III", 0, 1, MAX_SAMPLES + 1)
FEW = struct.pack(">III", 0, 1, 10)


@pytest.mark.parametrize(
    "hidden",
    [
        box(b"moov", box(b"trak", box(b"stsz", SIZES))),
        box(b"moov", box(b"trak", box(b"stsz", SIZES, long_size=True))),
        box(b"mdat", bytes(50), long_size=True) + box(b"free", box(b"moov", box(b"stz2", SIZES))),
        box(b"moof", box(b"trun", struct.pack(">II", 0, MAX_SAMPLES + 1))),
        box(b"moov", b"".join(box(b"stsz", struct.pack(">III", 0, 1, MAX_SAMPLES // 2)) for _ in range(3))),
        box(b"moov", b"\xff\xff\xff\xffstsz" + SIZES),
        box(b"sidx", bytes(8)) + box(b"mdat", box(b"moof", box(b"trun", struct.pack(">II", 0, MAX_SAMPLES + 1)))),
    ],
    ids=["table", "long size", "behind mdat", "fragment", "several tracks", "size past the file", "behind a jump"],
)
def test_too_many_samples_are_found_wherever_they_are_announced(tmp_path: Path, hidden: bytes) -> None:  # case 67
    path = tmp_path / "bomb.mp4"
    path.write_bytes(box(b"ftyp", b"isom\0\0\0\0") + hidden)
    with pytest.raises(InvalidRequest, match="announces"):
        classify(path)


def test_a_compressed_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "packed.mp4"
    path.write_bytes(box(b"ftyp", b"isom\0\0\0\0") + box(b"moov", box(b"cmov", box(b"dcom", b"zlib"))))
    with pytest.raises(InvalidRequest, match="compressed index"):
        classify(path)


def test_pictures_may_spell_the_name_by_chance(tmp_path: Path) -> None:
    path = tmp_path / "fine.mp4"
    path.write_bytes(box(b"mdat", b"stsz" + b"\xff" * 40) + box(b"moov", box(b"stsz", FEW)))
    check_index(path)


@pytest.mark.parametrize(
    "tail", [b"\0\0\0\2mdatstsz" + b"\xff" * 40, b"\0\0\0\0freestsz" + b"\xff" * 40], ids=["too small", "to the end"]
)
def test_what_follows_a_strange_size_is_looked_at_too(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "odd.mp4"
    path.write_bytes(box(b"mdat", b"") + tail)
    with pytest.raises(InvalidRequest, match="announces"):
        check_index(path)


def test_real_files_pass(cases: Path) -> None:
    for name in ("vid_24fps.mp4", "vid_4h.mp4", "vid_quicktime.mov", "aud_stereo.m4a", "vid_broken_middle.mp4"):
        check_index(cases / name)
