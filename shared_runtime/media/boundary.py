"""The boundary to Pillow and FFmpeg: whatever they raise over a file is the file's fault. API threads and ranks."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
from PIL import Image, ImageCms, UnidentifiedImageError

from shared_schema.errors import InvalidRequest
from shared_schema.tasks import MediaCaps, ReferenceLimits

DEFAULT_CAPS = MediaCaps()
DEFAULT_RULES = ReferenceLimits()

_FOREIGN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImageCms.PyCMSError,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    av.FFmpegError,
    struct.error,
    zlib.error,
)
"""All that decoders have been seen to raise over broken files, from `SyntaxError` for a PNG to `MemoryError`."""


@contextmanager
def decoding(what: str, param: str | None) -> Iterator[None]:
    """Turn any error of a decoder into an `InvalidRequest` about `what`; one of ours gets its `param` here."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None or param is None:
            raise
        raise InvalidRequest(error.message, param=param) from error
    except _FOREIGN as error:
        raise InvalidRequest(f"the {what} cannot be decoded: {_reason(error)}", param=param) from error


def _reason(error: Exception) -> str:
    """What a decoder complained about, without the server's path."""
    if isinstance(error, UnidentifiedImageError):
        return "its header is damaged"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def check_bytes(path: Path, cap: int, what: str, param: str | None) -> None:
    """Refuse a file over its byte cap.

    Raises:
        InvalidRequest: the file is larger than `cap` bytes.
    """
    size = path.stat().st_size
    if size > cap:
        raise InvalidRequest(f"the {what} has {size} bytes, at most {cap} are read", param=param)
