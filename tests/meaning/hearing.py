"""What a clip sounds like: its tone, its clicks, and from where it comes. From the decoded sound alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared_runtime.demo.scene import HERTZ, Pitch
from shared_runtime.demo.world import CLICK_HERTZ
from shared_schema.tasks import FPS, SAMPLE_RATE

Floats = NDArray[np.float64]

WINDOW, HOP = 128, 32
"""Samples of a look at the clicks' band, and from one to the next."""
QUIET = 1e-3
"""Amplitude below which a tone is none."""
LOUD = 0.03
"""Amplitude that a click has at least, next to a tone of 0.25."""
APART = 0.15
"""Seconds from one click to the next at least."""


@dataclass(frozen=True)
class Heard:
    """The sound of a clip."""

    pitch: Pitch | None
    """None where no tone stands out."""
    clicks: Floats
    """Seconds."""
    sides: Floats
    """By frame, from 0 (left) to 1 (right); NaN where it is too quiet to tell."""


def hear(sound: NDArray[np.float32], num_frames: int) -> Heard:
    """Listen to `(2, samples)` at 32 kHz, that last as long as `num_frames`."""
    pitch = _pitch(sound)
    hertz = HERTZ[pitch] if pitch is not None else HERTZ[Pitch.MIDDLE]
    return Heard(pitch, _clicks(sound.sum(0).astype(np.float64)), _sides(sound, hertz, num_frames))


def _amplitudes(wave: Floats, hertz: int, edges: NDArray[np.int64]) -> Floats:
    """How strong a frequency is between neighbouring `edges`."""
    turning = np.exp(-2j * np.pi * hertz * np.arange(len(wave)) / SAMPLE_RATE) * wave
    summed = np.concatenate([[0], np.cumsum(turning)])
    strengths: Floats = 2 * np.abs(np.diff(summed[edges])) / np.maximum(np.diff(edges), 1)
    return strengths


def _pitch(sound: NDArray[np.float32]) -> Pitch | None:
    edges = np.arange(0, sound.shape[1] + 1, 800)
    strength = {p: np.square([_amplitudes(side, hz, edges) for side in sound]).mean() for p, hz in HERTZ.items()}
    best, second = sorted(strength, key=lambda each: -strength[each])[:2]
    if strength[best] < QUIET**2 or strength[best] < 4 * strength[second]:
        return None
    return best


def _clicks(wave: Floats) -> Floats:
    """When the band of the clicks rises far over what it is otherwise."""
    starts = np.arange(0, len(wave) - WINDOW, HOP)
    pieces = np.lib.stride_tricks.sliding_window_view(wave, WINDOW)[starts] * np.hanning(WINDOW)
    band = np.abs(np.fft.rfftfreq(WINDOW, 1 / SAMPLE_RATE) - CLICK_HERTZ) < 900
    strength = np.sqrt(np.square(np.abs(np.fft.rfft(pieces)[:, band])).sum(1)) * 4 / WINDOW
    needed = max(LOUD, 6 * float(np.median(strength)))
    found: list[float] = []
    gap = int(APART * SAMPLE_RATE / HOP)
    rest = strength.copy()
    while rest.max(initial=0) > needed:
        peak = int(rest.argmax())
        begin = max(peak - gap // 4, 0)
        rising = begin + int(np.argmax(strength[begin : peak + 1] > 0.5 * strength[peak]))
        found.append((starts[rising] + WINDOW / 2) / SAMPLE_RATE)
        rest[max(peak - gap, 0) : peak + gap] = 0
    return np.array(sorted(found))


def _sides(sound: NDArray[np.float32], hertz: int, num_frames: int) -> Floats:
    edges = np.round(np.arange(num_frames + 1) * SAMPLE_RATE / FPS).astype(np.int64).clip(0, sound.shape[1])
    left, right = (_amplitudes(side.astype(np.float64), hertz, edges) for side in sound)
    sides: Floats = np.arctan2(right, left) / (np.pi / 2)
    return np.where(np.hypot(left, right) > 0.04, sides, np.nan)
