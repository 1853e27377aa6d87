"""What a file says of its own size before anything of it is decoded: hints, not facts. Runs in ranks; no torch."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from shared_runtime.media.boundary import decoding
from shared_runtime.media.container import open_container, picture_stream, seconds
from shared_runtime.media.formats import sniff
from shared_schema.errors import InvalidRequest


@dataclass(frozen=True)
class Header:
    """The size of a picture or of a video's frames, pixels."""

    width: int
    height: int
    seconds: float | None = None
    """How long a video says that it is; None where it does not say."""


def read_header(path: Path, kind: Literal["image", "video"]) -> Header | None:
    """What the file says; None where it says nothing: its decoding will find out what is wrong with it."""
    try:
        with decoding(kind, None):
            readers = sniff(path, None).readers
            if kind == "image":
                with Image.open(path, formats=readers) as image:
                    return Header(*image.size)
            with open_container(path, readers[0]) as container:
                stream = picture_stream(container)
                return None if stream is None else _of(container, stream)
    except InvalidRequest:
        return None


def _of(container: Any, stream: Any) -> Header:
    """A container's clock counts microseconds, a stream's own may be missing."""
    length = seconds(stream.duration, stream) if stream.duration else (container.duration or 0) / 1e6
    width = stream.width * Fraction(stream.sample_aspect_ratio or 1)
    return Header(round(width), stream.height, float(length) or None)
