"""The little world as pictures and sound: a scene to RGB frames at 24 a second and stereo at 32 kHz. Any process.

Written once for two array libraries: `xp` is numpy, or torch where the training draws thousands of clips on a GPU.
Lengths are pixels, times seconds; y goes down.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared_runtime.demo.scene import BACKGROUNDS, COLOURS, HERTZ, Motion, Scene, Shape, Speed
from shared_schema.tasks import FPS, SAMPLE_RATE

Floats = NDArray[np.float64]

RADIUS = 0.19
"""Of the thing, in short edges."""
PACE = {Speed.SLOW: 0.25, Speed.FAST: 0.75}
"""Short edges a second, to a side, up or down."""
BOUNCE = {Speed.SLOW: 1.0, Speed.FAST: 0.5}
"""Seconds from contact to contact: six frames, or ten latents of sound, are half of the shorter one."""
LEAP = 0.8
"""Height of a bounce, of what there is."""
SMALLEST, LARGEST = 0.09, 0.32
"""Radius of a thing that grows, in short edges: where it begins and where it stays."""
GROWTH = {Speed.SLOW: 0.055, Speed.FAST: 0.2}
"""Short edges a second."""

TONE, OVERTONE = 0.25, 0.25
"""Amplitude of the tone, and of its third harmonic in it."""
CLICK, CLICK_HERTZ, CLICK_DECAY = 0.7, 4800, 0.004
_REACH = {Shape.DISC: 0.88, Shape.SQUARE: 1.0, Shape.TRIANGLE: 0.725}
"""From the middle to the lowest edge, in radii. A square is larger than a disc: of one area, their latents differ by a
hundredth of the latents' variance, which is less than what a small DiT is off by; so they differ by a tenth."""
_APEX = 2 * _REACH[Shape.TRIANGLE]
_FARTHEST = {**_REACH, Shape.TRIANGLE: _APEX}
"""From the middle to the farthest edge, up or to a side."""
_QUARTER = np.pi / 4


@dataclass(frozen=True)
class Track:
    """Where a thing is at some times; each of the shape of the times."""

    x: Floats
    y: Floats
    radius: Floats
    shown: Floats
    """1 on the canvas, falling to 0 where it has left it: how loud it is."""


def track(scene: Scene, times: Floats, height: int, width: int) -> Track:
    """Where the thing of `scene` is at `times`, on a canvas of that size."""
    short = min(height, width)
    radius = np.full_like(times, RADIUS * short)
    widest = LARGEST if scene.motion is Motion.GROW else RADIUS
    margin = _FARTHEST[scene.shape] * widest * short + 1
    across_x, across_y = (margin + (length - 2 * margin) * scene.place for length in (width, height))
    x, y, shown = np.full_like(times, across_x), np.full_like(times, height / 2), np.ones_like(times)
    pace = PACE[scene.speed] * short
    match scene.motion:
        case Motion.LEFT | Motion.RIGHT:
            sign = 1 if scene.motion is Motion.RIGHT else -1
            x, shown = _round(scene.phase, sign * pace * times, width, margin)
            y = np.full_like(times, across_y)
        case Motion.UP | Motion.DOWN:
            sign = 1 if scene.motion is Motion.DOWN else -1
            y, shown = _round(scene.phase, sign * pace * times, height, margin)
        case Motion.BOUNCE:
            y = _bounce(scene, times, height, short)
        case Motion.GROW:
            radius = np.minimum(SMALLEST + GROWTH[scene.speed] * times, LARGEST) * short
        case Motion.STILL:
            y = np.full_like(times, margin + (height - 2 * margin) * scene.phase)
    return Track(x, y, radius, shown)


def _round(phase: float, moved: Floats, length: int, margin: float) -> tuple[Floats, Floats]:
    """Out at one side and in at the other: places, and how much of the thing is still there."""
    whole = length + 2 * margin
    at = (phase * whole + moved) % whole - margin
    return at, np.clip((length / 2 + margin - np.abs(at - length / 2)) / margin, 0.0, 1.0)


def _bounce(scene: Scene, times: Floats, height: int, short: int) -> Floats:
    period = BOUNCE[scene.speed]
    part = (times / period + 0.5) % 1.0
    floor = height - _REACH[scene.shape] * RADIUS * short
    leap = LEAP * (height - 2 * RADIUS * short)
    return floor - leap * 4 * part * (1 - part)


def contacts(scene: Scene, num_frames: int) -> Floats:
    """Seconds at which the thing touches the floor, in a clip of `num_frames`: it is let go at its highest."""
    if scene.motion is not Motion.BOUNCE:
        return np.zeros(0)
    period = BOUNCE[scene.speed]
    return np.arange(period / 2, num_frames / FPS - 1e-9, period)


def coverage(shape: Shape, x: Any, y: Any, radius: Any, height: int, width: int, xp: Any) -> Any:
    """How much of every pixel the thing covers, 0 to 1 with soft edges: `(frames, height, width)`.

    `x`, `y` and `radius` are arrays `(frames,)` of the library `xp`.
    """
    rows = xp.arange(height, **_like(x, xp)) + 0.5
    columns = xp.arange(width, **_like(x, xp)) + 0.5
    dx = columns[None, None, :] - x[:, None, None]
    dy = rows[None, :, None] - y[:, None, None]
    r = radius[:, None, None]
    match shape:
        case Shape.DISC:
            outside = xp.sqrt(dx * dx + dy * dy) - _REACH[shape] * r
        case Shape.SQUARE:
            outside = xp.maximum(xp.abs(dx) + 0 * dy, xp.abs(dy) + 0 * dx) - _REACH[shape] * r
        case Shape.TRIANGLE:
            slopes = xp.abs(dx) * (3**0.5 / 2) - dy / 2
            outside = xp.maximum(slopes, dy + 0 * dx) - _APEX / 2 * r
    return xp.clip(0.5 - outside, 0.0, 1.0)


def _like(array: Any, xp: Any) -> dict[str, Any]:
    return {"dtype": array.dtype} if xp is np else {"dtype": array.dtype, "device": array.device}


def paint(covered: Any, colour: Any, background: Any) -> Any:
    """Levels 0 to 255 `(frames, height, width, 3)`, not rounded, from a coverage and two colours `(3,)`."""
    return background + covered[..., None] * (colour - background)


def frames(scene: Scene, num_frames: int, height: int, width: int, first: int = 0) -> NDArray[np.uint8]:
    """The pictures: `(num_frames, height, width, 3)` RGB, from the `first` one on."""
    seen = track(scene, np.arange(first, first + num_frames) / FPS, height, width)
    x, y, radius = (each.astype(np.float32) for each in (seen.x, seen.y, seen.radius))
    covered = coverage(scene.shape, x, y, radius, height, width, np)
    colour, background = (np.array(each, np.float32) for each in palette(scene))
    levels: NDArray[np.uint8] = np.rint(paint(covered, colour, background)).astype(np.uint8)
    return levels


def palette(scene: Scene) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """RGB of the thing and of what is behind it."""
    return COLOURS[scene.colour], BACKGROUNDS[scene.background]


def sound(scene: Scene, num_frames: int, height: int, width: int) -> NDArray[np.float32]:
    """What is heard: `(2, samples)`, as long as the frames to the nearest sample, full scale 1.0."""
    times = np.arange(round(num_frames * SAMPLE_RATE / FPS)) / SAMPLE_RATE
    seen = track(scene, times, height, width)
    mono = seen.shown * tone(scene, times) + clicks(contacts(scene, num_frames), times)
    angle = (np.clip(2 * seen.x / width - 1, -1, 1) + 1) * _QUARTER
    return np.stack([np.cos(angle) * mono, np.sin(angle) * mono]).astype(np.float32)


def tone(scene: Scene, times: Floats) -> Floats:
    """The scene's pitch, as loud as it is where the thing is seen."""
    angle = 2 * np.pi * HERTZ[scene.pitch] * times
    wave: Floats = TONE * (np.sin(angle) + OVERTONE * np.sin(3 * angle))
    return wave


def clicks(at: Floats, times: Floats) -> Floats:
    """A short burst at each of the seconds `at`; `times` are those of evenly spaced samples from 0."""
    wave = np.zeros_like(times)
    for second in at:
        first = round(second * SAMPLE_RATE)
        after = np.arange(min(round(8 * CLICK_DECAY * SAMPLE_RATE), len(times) - first)) / SAMPLE_RATE
        burst = CLICK * np.exp(-after / CLICK_DECAY) * np.sin(2 * np.pi * CLICK_HERTZ * after)
        wave[first : first + len(after)] += burst
    return wave
