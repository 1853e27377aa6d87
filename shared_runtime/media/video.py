"""Videos: frames upright, with square pixels, on 24 a second. Runs in API processes' threads and in encoder ranks."""

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain
from math import floor
from pathlib import Path
from typing import Any, Self, TypeVar

import av
import numpy as np
from av.sidedata.sidedata import Type
from numpy.typing import NDArray
from PIL import Image

from shared_runtime.media.boundary import DEFAULT_CAPS, check_bytes, decoding
from shared_runtime.media.container import frames, open_container, picture_stream, prepare_pictures, seek_back
from shared_runtime.media.formats import expect
from shared_runtime.media.sound import Waveform, read_waveform
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import FPS, SAMPLE_RATE, MediaCaps

Picture = NDArray[np.uint8]
"""`(height, width, 3)` RGB."""
Result = TypeVar("Result")

HDR_TRANSFERS = {16: "PQ (SMPTE ST 2084)", 18: "HLG (ARIB STD-B67)"}
"""Codes of ITU-T H.273."""
FINE_CLOCK = Fraction(1, 1000)
"""Seconds: a clock at least this fine rounds a constant rate's moments to within a tick."""
REORDERED = 16
"""Frames by which decoding may be ahead of showing, at most; an index may go by either."""


@dataclass(frozen=True)
class DecodedVideo:
    """A video on the model's clock."""

    frames: NDArray[np.uint8]
    """`(n, height, width, 3)` RGB, 24 a second."""
    waveform: Waveform | None
    """`(2, samples)` float32 at 32 kHz from the first frame's moment on; None where no sound is wanted or there."""


@dataclass(frozen=True)
class View:
    """How the stored frames of a stream become the pictures that are meant to be seen."""

    stored: tuple[int, int]
    """Width and height of a stored frame."""
    square: tuple[int, int]
    """Width and height with square pixels, before turning."""
    transposed: bool
    mirrored: bool
    """Left and right exchanged, after transposing."""
    flipped: bool
    """Top and bottom exchanged, after transposing."""

    @classmethod
    def of(cls, frame: Any, stream: Any, caps: MediaCaps) -> Self:
        """Read a stream's first frame: display matrix (to the nearest quarter turn) and sample aspect ratio.

        Raises:
            InvalidRequest: HDR, or a side is too long.
        """
        codes = (int(frame.color_trc or 0), int(stream.codec_context.color_trc or 0))
        for transfer in codes:
            if transfer in HDR_TRANSFERS:
                raise InvalidRequest(f"HDR video, {HDR_TRANSFERS[transfer]}, is not read here, send SDR")
        aspect = Fraction(stream.sample_aspect_ratio or 1)
        square = (round(frame.width * aspect), frame.height)
        if not 1 <= min(square) <= max(*square, frame.width) <= caps.max_side:
            raise InvalidRequest(f"the video is {square[0]}x{square[1]}, at most {caps.max_side} a side are read")
        a, b, c, d = _matrix(frame)
        if abs(a) + abs(d) >= abs(b) + abs(c):
            return cls((frame.width, frame.height), square, False, a < 0, d < 0)
        return cls((frame.width, frame.height), square, True, c < 0, b < 0)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as shown."""
        return (self.square[1], self.square[0]) if self.transposed else self.square

    def picture(self, frame: Any) -> Picture:
        """A frame as it is meant to be seen.

        Raises:
            InvalidRequest: the stream changes its size, or the decoder had to invent parts of the frame.
        """
        if (frame.width, frame.height) != self.stored:
            raise InvalidRequest(f"the video changes its size from {self.stored} to {(frame.width, frame.height)}")
        pixels: Picture = frame.to_ndarray(format="rgb24")
        if self.square != self.stored:
            pixels = np.asarray(Image.fromarray(pixels).resize(self.square, Image.Resampling.LANCZOS))
        if self.transposed:
            pixels = pixels.swapaxes(0, 1)
        pixels = pixels[:: -1 if self.flipped else 1, :: -1 if self.mirrored else 1]
        return np.ascontiguousarray(pixels)


def _matrix(frame: Any) -> tuple[int, int, int, int]:
    """The display matrix' a, b, c, d: a pixel at (x, y) is shown at (ax + cy, bx + dy)."""
    data = frame.side_data.get(Type.DISPLAYMATRIX)
    if data is None:
        return 1, 0, 0, 1
    a, b, _, c, d = struct.unpack("=5i", bytes(data)[:20])
    return a, b, c, d


@dataclass(frozen=True)
class TimeLine:
    """The moments of a stream's frames, counted from its first one."""

    first: int
    """Ticks at which the stream begins."""
    tick: Fraction
    """Seconds."""
    rate: Fraction
    """Frames a second on average."""
    start: Fraction
    """Seconds after the first frame at which slot 0 lies."""

    @classmethod
    def of(cls, frame: Any, stream: Any, start: Fraction) -> Self:
        """The time line of a stream whose first frame is given."""
        rate = Fraction(stream.average_rate or stream.guessed_rate or FPS)
        return cls(frame.pts or 0, Fraction(stream.time_base), rate, start)

    @property
    def origin(self) -> Fraction:
        """Slot 0 less `start`, in seconds of the file's clock."""
        return self.first * self.tick

    def slot(self, ticks: int) -> int:
        """The 24 fps slot that a moment falls into."""
        return floor((self._moment(ticks) - self.start) * FPS + Fraction(1, 2))

    def _moment(self, ticks: int) -> Fraction:
        """Seconds after the first frame; on a constant rate's own moment where only the clock's rounding is between."""
        moment = (ticks - self.first) * self.tick
        even = round(moment * self.rate) / self.rate
        return even if self.tick <= FINE_CLOCK and abs(even - moment) <= self.tick else moment

    def spans(self, shown: Iterator[Any]) -> Iterator[tuple[Any, int, int]]:
        """Each frame with its slot and the slot that ends it: the next frame's, or for the last one its own end's."""
        held, slot = next(shown, None), 0
        if held is None:
            return
        ticks = held.pts or 0
        slot = self.slot(ticks)
        for frame in shown:
            ticks = ticks + 1 if frame.pts is None else max(ticks, frame.pts)
            following = max(slot, self.slot(ticks))
            yield held, slot, following
            held, slot = frame, following
        yield held, slot, max(slot, self.slot(ticks + self.duration(held.duration)))

    def duration(self, ticks: int | None) -> int:
        """How long a frame is shown, in ticks; one that does not say is shown as long as the average one."""
        return ticks or round(1 / self.rate / self.tick)


def decode_video(
    path: Path,
    *,
    max_frames: int,
    use_audio: bool,
    start_seconds: float = 0.0,
    fit: Callable[[Picture], Picture] | None = None,
    caps: MediaCaps = DEFAULT_CAPS,
    param: str | None = None,
) -> DecodedVideo:
    """Decode a video from `start_seconds` on: at most `max_frames` frames and as much sound.

    Frame i takes slot floor(t_i x 24 + 0.5) and is held until the next frame's slot. `fit` is applied to each decoded
    frame before it is kept (a resize, so that memory is the canvas' and not the file's).

    Raises:
        InvalidRequest: not a video, HDR, too large, nothing to decode there, or it cannot be decoded.
    """
    found = expect(path, "video", param)
    check_bytes(path, caps.video_bytes, "video", param)
    with decoding("video", param):
        start = Fraction(start_seconds)
        read = partial(_read_pictures, path, found.readers[0], max_frames, start, fit, caps)
        pictures, origin = from_nearby(read) if start else read(nearby=False)
        limit = int(max_frames / FPS * SAMPLE_RATE)
        waveform = None
        if use_audio:
            waveform = read_waveform(path, found.readers[0], origin=origin, start=start, limit=limit)
        return DecodedVideo(pictures, waveform)


def _read_pictures(
    path: Path,
    reader: str,
    max_frames: int,
    start: Fraction,
    fit: Callable[[Picture], Picture] | None,
    caps: MediaCaps,
    *,
    nearby: bool,
) -> tuple[NDArray[np.uint8], Fraction]:
    """All slots' pictures, and the moment of the first frame on the file's clock.

    `nearby` decodes from a key frame near the start and not from the beginning.
    """
    with open_container(path, reader) as container:
        stream = picture_stream(container)
        if stream is None:
            raise InvalidRequest("the file holds no moving picture")
        first, shown = first_frame(container, prepare_pictures(stream))
        view, line = View.of(first, stream, caps), TimeLine.of(first, stream, start)
        if nearby:
            ticks = int(start / line.tick) - REORDERED * line.duration(None)
            seek_back(container, stream, line.first + max(0, ticks))
            shown = frames(container, stream, whole=False)
        else:
            shown = chain([first], shown)
        pictures = Pictures(max_frames)
        for frame, slot, end in line.spans(shown):
            slots = min(end, max_frames) - max(slot, 0)
            if slots > 0:
                if frame.is_corrupt:
                    raise InvalidRequest("a frame is damaged")
                if slot > pictures.count:
                    raise InvalidRequest("the frame at the start cannot be decoded")
                picture = view.picture(frame)
                pictures.add(picture if fit is None else fit(picture), slots)
            if end >= max_frames:
                break
    return pictures.all(), line.origin


def from_nearby(read: Callable[..., Result]) -> Result:
    """What `read` makes of a video from a key frame near to what is wanted or, where that fails, from the beginning.

    In an open group of pictures, frames after the key frame may build on frames before it: H.264's decoder takes them
    for damage, HEVC's leaves them out.
    """
    with suppress(InvalidRequest, av.FFmpegError):
        return read(nearby=True)
    return read(nearby=False)


class Pictures:
    """Pictures of one size, each filling some slots of one array."""

    def __init__(self, max_frames: int) -> None:
        self._max_frames = max_frames
        self._stacked: NDArray[np.uint8] | None = None
        self.count = 0
        """Slots that are filled."""

    def add(self, picture: Picture, slots: int) -> None:
        """Fill the next `slots` slots."""
        if self._stacked is None:
            # As large as it can become: pages that are never written cost no memory, a second copy would.
            self._stacked = np.empty((self._max_frames, *picture.shape), np.uint8)
        self._stacked[self.count : self.count + slots] = picture
        self.count += slots

    def all(self) -> NDArray[np.uint8]:
        """`(n, height, width, 3)`.

        Raises:
            InvalidRequest: no slot was filled.
        """
        if self._stacked is None:
            raise InvalidRequest("the video has nothing after its start")
        return self._stacked[: self.count]


def first_frame(container: Any, stream: Any) -> tuple[Any, Iterator[Any]]:
    """A stream's first frame, and the iterator over those after it.

    Raises:
        InvalidRequest: there is none.
    """
    shown = frames(container, stream)
    first = next(shown, None)
    if first is None:
        raise InvalidRequest("the video has no frame")
    return first, shown
