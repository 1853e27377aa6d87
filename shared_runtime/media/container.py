"""Opening a file with FFmpeg so that it can do no harm, and reading its packets. API threads and encoder ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from av.stream import Disposition

from shared_runtime.media.boundary import DEFAULT_CAPS
from shared_runtime.media.mp4_index import check_index
from shared_schema.errors import InvalidRequest

MAX_PIXELS = DEFAULT_CAPS.max_side**2
"""What a decoder may allocate for one frame, whatever size the stream announces later on."""
TIMEOUT_S = 30.0
"""For one call into FFmpeg: a file of at most 50 MiB needs a fraction of a second."""
DECODER_THREADS = 4
"""At least two: with frame threads FFmpeg marks the frames that it had to conceal."""
PICTURE_CODECS = frozenset({"h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg", "prores"})
SOUND_CODECS = frozenset({"aac", "ac3", "alac", "eac3", "flac", "mp1", "mp2", "mp3", "opus", "vorbis"})
NO_PICTURE = Disposition.attached_pic | Disposition.timed_thumbnails
"""Streams that are a cover, not a film."""


@contextmanager
def open_container(path: Path, reader: str) -> Iterator[Any]:
    """Open a file with one FFmpeg demuxer, named, so that no playlist or script is ever followed elsewhere."""
    if reader == "mov":
        check_index(path)
    options = {"protocol_whitelist": "file", "max_pixels": str(MAX_PIXELS)}
    with av.open(f"file:{path}", format=reader, container_options=options, timeout=TIMEOUT_S) as container:
        yield container


def picture_stream(container: Any) -> Any | None:
    """The first stream of moving pictures, or None."""
    return next((stream for stream in container.streams.video if not stream.disposition & NO_PICTURE), None)


def sound_stream(container: Any) -> Any | None:
    """The first stream of sound, or None."""
    return next(iter(container.streams.audio), None)


def prepare_pictures(stream: Any) -> Any:
    """Set a picture stream's decoder up to refuse what is broken or too large; returns the stream.

    Raises:
        InvalidRequest: its codec is not read here.
    """
    _check_codec(stream, PICTURE_CODECS)
    stream.codec_context.options = {"err_detect": "explode", "max_pixels": str(MAX_PIXELS)}
    stream.thread_type = "FRAME"
    stream.codec_context.thread_count = DECODER_THREADS
    return stream


def prepare_sound(stream: Any) -> Any:
    """Check a sound stream's codec; returns the stream.

    Raises:
        InvalidRequest: its codec is not read here.
    """
    _check_codec(stream, SOUND_CODECS)
    return stream


def _check_codec(stream: Any, known: frozenset[str]) -> None:
    context = stream.codec_context
    name = "unknown" if context is None else context.codec.canonical_name
    if name not in known and not (stream.type == "audio" and name.startswith("pcm_")):
        raise InvalidRequest(f"the {stream.type} codec {name!r} is not read here")


def packets(container: Any, stream: Any, *, whole: bool = True, open_end: bool = False) -> Iterator[Any]:
    """A stream's packets in file order, the last one empty (it flushes the decoder).

    Where they are read from the start (`whole`), an MP4 that ends before its index does is noticed. FFmpeg marks a
    packet that the file's end cuts short, which is as it should be where the file says no other end (`open_end`).

    Raises:
        InvalidRequest: a packet is cut short, or the file ends early.
    """
    count = 0
    for packet in container.demux(stream):
        count += bool(packet.size)
        if packet.is_corrupt and not open_end:
            raise InvalidRequest("the file is damaged or ends early")
        yield packet
    expected = len(stream.index_entries) if whole and container.format.name.startswith("mov") else 0
    if count < expected:
        raise InvalidRequest(f"the file ends early: {count} of {expected} packets of its {stream.type} are there")


def frames(container: Any, stream: Any, *, whole: bool = True, open_end: bool = False) -> Iterator[Any]:
    """A stream's decoded frames in the order in which they are shown; raises as `packets` does."""
    for packet in packets(container, stream, whole=whole, open_end=open_end):
        yield from packet.decode()


def seek_back(container: Any, stream: Any, ticks: int) -> None:
    """Go to the key frame at or before `ticks`; a file without an index stays where it is."""
    try:
        container.seek(ticks, stream=stream)
    except av.FFmpegError:
        return


def seconds(ticks: int, stream: Any) -> Fraction:
    """Ticks of a stream's clock as exact seconds."""
    return Fraction(ticks * stream.time_base)
