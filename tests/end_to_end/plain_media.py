"""Reads fixture files with plain PyAV and Pillow, apart from the product's own code."""

import io
import math
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

FPS = 24
SAMPLE_RATE = 32_000


def upright_image(path: Path) -> Image.Image:
    """The picture as it is meant to be seen, RGB."""
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def upright_frames(path: Path) -> NDArray[np.uint8]:
    """Frames of a video on 24 a second by their timestamps, `(n, height, width, 3)`."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        shown = list(container.decode(stream))
        times = [float(frame.time) for frame in shown]
        held = float(shown[-1].duration * shown[-1].time_base) if shown[-1].duration else 1 / float(stream.average_rate)
        turns = round(shown[-1].rotation / 90) % 4
        pictures = np.stack([frame.to_ndarray(format="rgb24") for frame in shown])
    ends = [*times, times[-1] + held]
    slots = [math.floor((time - times[0]) * FPS + 0.5) for time in ends]
    pictures = np.repeat(pictures, np.diff(slots), axis=0)
    return np.ascontiguousarray(np.rot90(pictures, k=turns, axes=(1, 2)))


def stereo_sound(path: Path) -> NDArray[np.float32] | None:
    """The first sound stream of a freshly opened file, `(2, samples)` at 32 kHz; None where there is none."""
    with av.open(str(path)) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        channels, rate = stream.codec_context.channels, stream.codec_context.sample_rate
        if channels not in (1, 2):
            raise ValueError(f"{path.name} has {channels} channels: not a file for the reference")
        layout = "mono" if channels == 1 else "stereo"
        resampler = av.AudioResampler(format="fltp", layout=layout, rate=SAMPLE_RATE)
        parts = [out.to_ndarray() for frame in container.decode(stream) for out in resampler.resample(frame)]
        if rate != SAMPLE_RATE:
            parts += [out.to_ndarray() for out in resampler.resample(None)]
    sound: NDArray[np.float32] = np.concatenate(parts, axis=1).astype(np.float32)
    return np.repeat(sound, 2, axis=0) if channels == 1 else sound


@dataclass(frozen=True)
class ReadClip:
    """An MP4 as a player sees it: uint8 frames `(n, height, width, 3)`, float32 sound `(2, samples)` at 32 kHz."""

    frames: NDArray[np.uint8]
    sound: NDArray[np.float32]
    fps: float

    @property
    def size(self) -> str:
        """`WIDTHxHEIGHT`."""
        return f"{self.frames.shape[2]}x{self.frames.shape[1]}"


def read_clip(data: bytes) -> ReadClip:
    """Decode a served MP4 whole; raises where it is not one with a picture and stereo sound at 32 kHz."""
    with av.open(io.BytesIO(data)) as container:
        fps = float(container.streams.video[0].average_rate)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        if (stream.codec_context.sample_rate, stream.codec_context.channels) != (SAMPLE_RATE, 2):
            raise ValueError(
                f"sound is {stream.codec_context.sample_rate} Hz, {stream.codec_context.channels} channels"
            )
        sound = np.concatenate([frame.to_ndarray() for frame in container.decode(stream)], axis=1)
    return ReadClip(frames, sound, fps)
