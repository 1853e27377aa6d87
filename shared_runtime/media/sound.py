"""Sound: any rate, layout and codec -> 32 kHz stereo, in its place on a time line. API threads and encoder ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from shared_runtime.media.boundary import DEFAULT_CAPS, check_bytes, decoding
from shared_runtime.media.container import frames, open_container, prepare_sound, seconds, sound_stream
from shared_runtime.media.formats import expect
from shared_runtime.media.wav_header import ends_with_file
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import AUDIO_CHANNELS, SAMPLE_RATE, MediaCaps

MIN_RATE, MAX_RATE = 2_000, 768_000
"""Hz: what a file may carry. Below, one coded frame would grow to gigabytes."""
MAX_CHANNELS = 16
MAX_LEVEL = 64.0
"""Full scale is 1; past 36 dB over it a float file holds no sound."""
NEAR_END = Fraction(1, 10)
"""Seconds by which a decoder may give more than the container declares: a coded frame's padding."""
GAP = Fraction(1, 20)
"""Seconds: what lies between two frames and is not the rounding of a clock."""

_CENTRE = 0.5**0.5
_USUAL_LAYOUTS = {3: "3.0", 4: "quad", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
"""Layouts that a file means when it only counts its channels."""

Waveform = NDArray[np.float32]
"""`(2, samples)` at 32 kHz, full scale 1."""


def decode_audio(
    path: Path,
    *,
    max_seconds: float,
    start_seconds: float = 0.0,
    caps: MediaCaps = DEFAULT_CAPS,
    param: str | None = None,
) -> Waveform:
    """Decode a sound file from `start_seconds` on, at most `max_seconds` of it: `(2, samples)` float32 at 32 kHz.

    Raises:
        InvalidRequest: not a sound, too many bytes, nothing to decode there, or it cannot be decoded.
    """
    found = expect(path, "audio", param)
    check_bytes(path, caps.audio_bytes, "sound", param)
    limit = int(max_seconds * SAMPLE_RATE)
    with decoding("sound", param):
        waveform = read_waveform(path, found.readers[0], origin=None, start=Fraction(start_seconds), limit=limit)
    if waveform is None:
        raise InvalidRequest(f"the sound has nothing after {start_seconds:g} seconds", param=param)
    return waveform


def read_waveform(path: Path, reader: str, *, origin: Fraction | None, start: Fraction, limit: int) -> Waveform | None:
    """At most `limit` samples of a freshly opened file's first sound, or None where it has none.

    Sample 0 lies `start` seconds after `origin` (None: after the sound's own beginning). A sound that begins later
    has silence before it, one with a gap has silence in it; one that began earlier is cut.
    """
    waveform, end = np.zeros((AUDIO_CHANNELS, limit), np.float32), 0
    with open_container(path, reader) as container:
        stream = sound_stream(container)
        if stream is None:
            return None
        for begin, run in groupby(_decoded(path, reader, container, stream), _Clock(stream).run_of):
            origin = begin if origin is None else origin
            at = round((begin - origin - start) * SAMPLE_RATE)
            for part in _stereo(run):
                kept = part[:, max(0, -at) : max(0, limit - at)]
                waveform[:, max(0, at) : max(0, at) + kept.shape[1]] = kept
                at += part.shape[1]
                end = min(at, limit)
                if end == limit:
                    return waveform
    return np.ascontiguousarray(waveform[:, :end]) if end > 0 else None


def _decoded(path: Path, reader: str, container: Any, stream: Any) -> Iterator[Any]:
    return frames(container, prepare_sound(stream), open_end=reader == "wav" and ends_with_file(path))


class _Clock:
    """When a sound's frames are heard: each after the one before it, but for those that say to come clearly later."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._run: Fraction | None = None
        self.end = Fraction(0)
        """Of the frame that was asked for last."""

    def run_of(self, frame: Any) -> Fraction:
        """When the frames began that lead to this one without a gap."""
        check_shape(frame)
        moment = self.end if frame.pts is None else seconds(frame.pts, self._stream)
        if self._run is None or moment > self.end + GAP:
            self._run = self.end = moment
        self.end += Fraction(frame.samples, frame.sample_rate)
        return self._run


def _stereo(run: Iterator[Any]) -> Iterator[Waveform]:
    """The frames as stereo at 32 kHz. FFmpeg's own mixing is used for nothing: it lowers mono and sums 5.1 past 1."""
    first = next(run)
    channels = first.layout.nb_channels
    # Packed samples past stereo, because PyAV reads planes of more than seven channels out of bounds.
    sample_format = "fltp" if channels <= AUDIO_CHANNELS else "flt"
    layout = {1: "mono", 2: "stereo"}.get(channels, first.layout)
    resampler = av.AudioResampler(format=sample_format, layout=layout, rate=SAMPLE_RATE)
    mix = _mixer(first.layout)
    for frame in chain([first], run, [None]):
        for resampled in resampler.resample(frame):
            part = mix(resampled.to_ndarray())
            if not np.abs(part).max(initial=0) <= MAX_LEVEL:
                raise InvalidRequest("the sound holds values that are no sound (not finite, or far past full scale)")
            yield part


def check_shape(frame: Any) -> None:
    """Refuse a sample rate or a number of channels that no sound has.

    Raises:
        InvalidRequest: outside the limits.
    """
    if not MIN_RATE <= frame.sample_rate <= MAX_RATE:
        raise InvalidRequest(f"a sound has {MIN_RATE} to {MAX_RATE} samples a second, not {frame.sample_rate}")
    if not 1 <= frame.layout.nb_channels <= MAX_CHANNELS:
        raise InvalidRequest(f"a sound has 1 to {MAX_CHANNELS} channels, not {frame.layout.nb_channels}")


def _mixer(layout: Any) -> Callable[[Waveform], Waveform]:
    """What makes stereo of resampled samples: mono twice, stereo as it is, more mixed so that nothing can clip."""
    channels = layout.nb_channels
    if channels == 1:
        return lambda samples: np.repeat(samples, AUDIO_CHANNELS, axis=0)
    if channels == AUDIO_CHANNELS:
        return lambda samples: samples
    weights = _weights(_channel_names(layout))
    return lambda samples: np.matmul(weights, samples.reshape(-1, channels).T)


def _channel_names(layout: Any) -> list[str]:
    names = [channel.name for channel in layout.channels]
    usual = _USUAL_LAYOUTS.get(len(names))
    if usual is not None and set(names) == {"NONE"}:
        return [channel.name for channel in av.AudioLayout(usual).channels]
    return names


def _weights(names: list[str]) -> NDArray[np.float32]:
    """`(2, channels)`: a side to its side, fronts whole and others at -3 dB, no LFE; each row sums to 1 at most."""
    weights = np.zeros((AUDIO_CHANNELS, len(names)), np.float64)
    for index, name in enumerate(names):
        level = 1.0 if name in ("FL", "FR") else _CENTRE
        if not name.startswith("LFE"):
            weights[:, index] = level * ("R" not in name), level * ("L" not in name)
    if not weights.any():
        weights[:] = 1.0
    normalised: NDArray[np.float32] = (weights / weights.sum(axis=1).max()).astype(np.float32)
    return normalised


@dataclass(frozen=True)
class SoundExtent:
    """Where a sound lies on its file's clock, exact seconds."""

    begin: Fraction
    end: Fraction


def measure(path: Path, reader: str, until: Fraction) -> SoundExtent | None:
    """Decode a file's first sound, keeping nothing, as far as `until` seconds after its beginning; None without sound.

    Raises:
        InvalidRequest: it cannot be decoded.
    """
    with open_container(path, reader) as container:
        stream = sound_stream(container)
        if stream is None:
            return None
        begin, clock, stopped = None, _Clock(stream), False
        for frame in _decoded(path, reader, container, stream):
            run = clock.run_of(frame)
            begin = run if begin is None else begin
            stopped = clock.end - begin > until + NEAR_END
            if stopped:
                break
        if begin is None:
            return None
        return SoundExtent(begin, begin + _length(clock.end - begin, stream, stopped))


def _length(decoded: Fraction, stream: Any, stopped: bool) -> Fraction:
    """What was decoded, unless the decoder was stopped or only adds padding: then the declared length."""
    declared = seconds(stream.duration, stream) if stream.duration else decoded
    if stopped:
        return max(decoded, declared)
    return declared if 0 <= decoded - declared <= NEAR_END else decoded
