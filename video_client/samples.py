"""Pictures and sounds that the demo makes itself, in its own process: nothing is downloaded."""

import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffusion_service.mux import ClipWriter, samples_for_frames
from shared_schema.tasks import FPS, SAMPLE_RATE

PICTURE = (640, 360)
"""Width x height; the released model wants at least 256 pixels a side too."""
VIDEO = (480, 272)
VIDEO_FRAMES = 60
VOICE_SECONDS = 3.0
PITCH_HZ = 120.0
VOWELS: tuple[tuple[float, float, float], ...] = ((730, 1090, 2440), (270, 2290, 3010), (570, 840, 2410))
"""First three formants in Hz of a, i and o."""
FORMANT_WIDTH_HZ = 90.0


@dataclass(frozen=True)
class Samples:
    """The files that the demo uploads."""

    picture: Path
    video: Path
    voice: Path


def make_samples(folder: Path) -> Samples:
    """Write a picture, 2.5 s of video with sound and 3 s of something like a voice."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = Samples(folder / "picture.png", folder / "video.mp4", folder / "voice.wav")
    Image.fromarray(landscape(*PICTURE, sun=0.7)).save(samples.picture)
    write_video(samples.video)
    write_voice(samples.voice)
    return samples


def landscape(width: int, height: int, *, sun: float) -> NDArray[np.uint8]:
    """A sky, a hill and a sun at `sun` (0 left, 1 right): `(height, width, 3)`."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    picture = np.stack([90 + 120 * y, 140 + 60 * y, 230 - 60 * y], axis=-1)
    hill = y > 0.75 - 0.12 * np.sin(3 * np.pi * x)
    picture[hill] = np.stack([40 + 30 * x, 110 + 60 * y, 50 + 0 * x], axis=-1)[hill]
    disc = (x - sun) ** 2 * (width / height) ** 2 + (y - 0.3) ** 2 < 0.01
    picture[disc] = (255, 220, 90)
    return picture.round().astype(np.uint8)


def write_video(path: Path) -> None:
    """A sun that crosses the sky while a tone rises."""
    width, height = VIDEO
    samples = samples_for_frames(VIDEO_FRAMES)
    time = np.arange(samples) / SAMPLE_RATE
    tone = 0.4 * np.sin(2 * np.pi * (300 * time + 100 * time**2))
    with ClipWriter(path, height, width, VIDEO_FRAMES) as writer:
        for second in range(0, VIDEO_FRAMES, FPS):
            places = np.arange(second, min(second + FPS, VIDEO_FRAMES)) / VIDEO_FRAMES
            writer.write_frames(np.stack([landscape(width, height, sun=place) for place in places]))
        writer.write_sound(np.stack([tone, tone]).astype(np.float32))
        writer.finish()


def write_voice(path: Path) -> None:
    """Six syllables, mono, 16 bit."""
    with wave.open(str(path), "wb") as target:
        target.setnchannels(1)
        target.setsampwidth(2)
        target.setframerate(SAMPLE_RATE)
        target.writeframes((voice(VOICE_SECONDS) * 32767).round().astype("<i2").tobytes())


def voice(seconds: float) -> NDArray[np.float64]:
    """Harmonics of a wavering pitch under moving formants, in half-second syllables; peak 0.8."""
    time = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    pitch = PITCH_HZ * (1 + 0.08 * np.sin(2 * np.pi * 0.7 * time) + 0.01 * np.sin(2 * np.pi * 5.5 * time))
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    syllable = np.minimum((time / 0.5).astype(int), round(seconds / 0.5) - 1) % len(VOWELS)
    formants = np.array(VOWELS)[syllable]
    sound = np.zeros_like(time)
    for harmonic in range(1, 31):
        distance = (harmonic * pitch[:, None] - formants) / FORMANT_WIDTH_HZ
        sound += (1 / (1 + distance**2)).sum(axis=1) / harmonic**0.5 * np.sin(harmonic * phase)
    loudness = np.sin(np.pi * (time % 0.5) / 0.5) ** 0.5
    sound *= loudness
    return np.asarray(0.8 / np.abs(sound).max() * sound, np.float64)
