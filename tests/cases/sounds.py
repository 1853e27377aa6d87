"""Fixture sounds: tones in every format, rate and layout, and files that must be refused."""

import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

RATE = 32_000
Samples = NDArray[np.float64]
"""`(samples, channels)`, -1 to 1."""


def tone(seconds: float, rate: int, frequencies: tuple[float, ...] = (440, 660), amplitude: float = 0.5) -> Samples:
    """One sine for every channel."""
    time = np.arange(int(seconds * rate)) / rate
    return np.stack([amplitude * np.sin(2 * np.pi * frequency * time) for frequency in frequencies], axis=1)


def write_wav(path: Path, samples: Samples, rate: int) -> None:
    """Write 16-bit PCM."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())


def write_coded(path: Path, codec: str, samples: Samples, rate: int, layout: str = "stereo") -> None:
    """Write `samples` with one of PyAV's encoders, in the container that the name ends in."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.layout = layout
        if codec == "vorbis":
            stream.codec_context.options = {"strict": "experimental"}
        resampler = av.AudioResampler(format=stream.format.name, layout=layout, rate=rate)
        interleaved = np.ascontiguousarray(samples, np.float32).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(interleaved, format="flt", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for part in resampler.resample(frame):
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))


def write(folder: Path) -> None:
    """Write all sounds."""
    _wavs(folder)
    _coded(folder)
    _refused(folder)


def _wavs(folder: Path) -> None:
    write_wav(folder / "aud_stereo_32k.wav", tone(5, RATE), RATE)
    write_wav(folder / "aud_mono_32k.wav", tone(5, RATE, (440,)), RATE)
    write_wav(folder / "aud_mono_96k.wav", tone(5, 96_000, (440,)), 96_000)
    write_wav(folder / "aud_stereo_44k.wav", tone(5, 44_100), 44_100)
    write_wav(folder / "aud_silence.wav", np.zeros((5 * RATE, 2)), RATE)
    write_wav(folder / "aud_fullscale.wav", np.sign(tone(5, RATE)), RATE)
    write_wav(folder / "aud_15s.wav", tone(15, RATE), RATE)
    write_wav(folder / "aud_15s5.wav", tone(15.5, RATE), RATE)
    write_wav(folder / "aud_1s.wav", tone(1, RATE), RATE)
    write_wav(folder / "aud_6ch.wav", np.sign(tone(3, 48_000, (440,))).repeat(6, axis=1), 48_000)
    write_wav(folder / "aud_10ch.wav", np.sign(tone(3, 48_000, (440,))).repeat(10, axis=1), 48_000)


def _coded(folder: Path) -> None:
    stereo = tone(5, 48_000)
    write_coded(folder / "aud_stereo.mp3", "libmp3lame", stereo, 48_000)
    write_coded(folder / "aud_stereo.ogg", "libopus", stereo, 48_000)
    write_coded(folder / "aud_vorbis.ogg", "vorbis", stereo, 48_000)
    write_coded(folder / "aud_stereo.m4a", "aac", stereo, 48_000)
    write_coded(folder / "aud_stereo.flac", "flac", stereo, 48_000)
    write_coded(folder / "aud_5_1.m4a", "aac", tone(5, 48_000, (300, 350, 400, 60, 450, 500)), 48_000, "5.1")
    write_coded(folder / "aud_7_1.flac", "flac", np.sign(tone(3, 48_000, (440,))).repeat(8, axis=1), 48_000, "7.1")


def _refused(folder: Path) -> None:
    (folder / "aud_bad.wav").write_bytes(np.random.default_rng(0).bytes(4096))
    sound = bytearray((folder / "aud_stereo.mp3").read_bytes())
    middle = slice(len(sound) // 2, len(sound) // 2 + 4096)
    sound[middle] = np.random.default_rng(1).bytes(4096)
    (folder / "aud_broken_middle.mp3").write_bytes(sound)
    with av.open(str(folder / "aud_2h.flac"), "w") as container:
        stream = container.add_stream("flac", rate=RATE)
        stream.layout, stream.format = "stereo", "s16"
        minute = np.zeros((1, 2 * RATE * 60), np.int16)
        for number in range(120):
            frame = av.AudioFrame.from_ndarray(minute, format="s16", layout="stereo")
            frame.sample_rate, frame.pts = RATE, number * RATE * 60
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
