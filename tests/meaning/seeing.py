"""What a clip shows: background, colour, shape, and how the thing moves. From the decoded frames alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared_runtime.demo.scene import BACKGROUNDS, COLOURS, RGB, Motion, Shape, Speed
from shared_runtime.demo.world import BOUNCE, GROWTH, PACE, coverage
from shared_schema.tasks import FPS

Floats = NDArray[np.floating[Any]]

FAR = 60.0
"""Distance in RGB from which a pixel is no background, and a measured colour is none of the palette's."""
LEAST = 6.0
"""Pixels that a thing covers at least, for a frame to show it."""
LAG = 3
"""Frames over which a motion is measured."""
STANDING = 0.1
"""Short edges a second below which a thing stands still; the slowest one moves at 0.25."""
AREAS = {Shape.DISC: np.pi * 0.88**2, Shape.SQUARE: 4.0, Shape.TRIANGLE: 3 * 3**0.5 / 4 * 1.45**2}
"""In squared radii."""


@dataclass(frozen=True)
class Seen:
    """The pictures of a clip. What cannot be told is None."""

    background: str | None
    colour: str | None
    shape: Shape | None
    motion: Motion | None
    speed: Speed | None
    contacts: Floats
    """Seconds at which a bouncing thing turned at its lowest."""
    sides: Floats
    """Where the thing's middle is, by frame, from 0 (left) to 1 (right); NaN where it is not wholly to be seen."""
    places: Floats
    """`(frames, 3)`: its middle, across and down, and its radius, in short edges; NaN as `sides`."""


@dataclass(frozen=True)
class Thing:
    """What stands out from the background, frame by frame; each `(frames,)`."""

    x: Floats
    y: Floats
    area: Floats
    whole: NDArray[np.bool_]
    """Whether it is there and touches no edge."""


def see(frames: NDArray[np.uint8]) -> Seen:
    """Look at `(n, height, width, 3)` RGB."""
    pixels = frames.astype(np.float32)
    _, height, width, _ = pixels.shape
    behind = np.median(pixels[::4].reshape(-1, 3), axis=0)
    colour, covered = _matte(pixels, behind)
    nothing = np.full((len(frames), 3), np.nan)
    if colour is None:
        return Seen(_nearest(behind, BACKGROUNDS), None, None, None, None, np.zeros(0), nothing[:, 0], nothing)
    thing = _follow(covered)
    motion, speed = _motion(thing, min(height, width))
    contacts = _contacts(thing, height) if motion is Motion.BOUNCE else np.zeros(0)
    if motion is Motion.BOUNCE:
        speed = _rhythm(contacts)
    return Seen(
        background=_nearest(behind, BACKGROUNDS),
        colour=_nearest(colour, COLOURS),
        shape=_shape(covered, thing),
        motion=motion,
        speed=speed,
        contacts=contacts,
        sides=np.where(thing.whole, thing.x / width, np.nan),
        places=np.where(thing.whole[:, None], _places(thing) / min(height, width), np.nan),
    )


def _places(thing: Thing) -> Floats:
    """`(frames, 3)` in pixels: the middle, across and down, and the radius of a disc as large."""
    return np.stack([thing.x, thing.y, np.sqrt(thing.area / np.pi)], axis=1)


def _nearest(colour: Floats, palette: dict[str, RGB]) -> str | None:
    distances = {name: float(np.linalg.norm(colour - np.array(rgb))) for name, rgb in palette.items()}
    name = min(distances, key=lambda each: distances[each])
    return name if distances[name] < FAR else None


def _matte(pixels: Floats, behind: Floats) -> tuple[Floats | None, Floats]:
    """The colour of what is not background, and how much of it every pixel has."""
    smooth = _smooth(pixels) - behind
    differing = np.sqrt(np.square(smooth).sum(-1))
    inside = differing > FAR
    if inside.sum() < LEAST * 3:
        return None, np.zeros_like(differing)
    core = differing > 0.8 * np.percentile(differing[inside], 75)
    colour: Floats = np.median(pixels[core], axis=0)
    way = colour - behind
    covered = np.clip(smooth @ way / (way @ way), 0.0, 1.0)
    return colour, np.where(_smooth(covered[..., None])[..., 0] > 0.25, covered, 0.0)


def _smooth(pixels: Floats) -> Floats:
    """Each pixel averaged with its neighbours, the direct ones weighing half."""
    padded = np.pad(pixels, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    rows = (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4
    smooth: Floats = (rows[:, :, :-2] + 2 * rows[:, :, 1:-1] + rows[:, :, 2:]) / 4
    return smooth


def _follow(covered: Floats) -> Thing:
    _, height, width = covered.shape
    area = covered.sum((1, 2))
    least = np.maximum(area, 1e-9)
    x = (covered * (np.arange(width) + 0.5)).sum((1, 2)) / least
    y = (covered * (np.arange(height)[:, None] + 0.5)).sum((1, 2)) / least
    lines = (covered[:, 0], covered[:, -1], covered[:, :, 0], covered[:, :, -1])
    touching = np.stack([(line > 0.5).sum(1) > 1 for line in lines]).any(0)
    return Thing(x, y, area, (area > LEAST) & ~touching)


def _shape(covered: Floats, thing: Thing) -> Shape | None:
    """Whose outline, drawn where the thing is, differs least from what is there."""
    best = np.flatnonzero(thing.whole)
    if not len(best):
        return None
    best = best[np.argsort(-thing.area[best])[:12]]
    misfit = {}
    for shape in Shape:
        radius = np.sqrt(thing.area[best] / AREAS[shape])
        drawn = coverage(shape, thing.x[best], thing.y[best], radius, *covered.shape[1:], np)
        misfit[shape] = float(np.abs(_smooth(drawn[..., None])[..., 0] - covered[best]).sum())
    return min(misfit, key=lambda each: misfit[each])


def _pairs(thing: Thing, values: Floats) -> Floats:
    """How much `values` change in `LAG` frames, where the thing is whole at both ends and all between."""
    spans = np.lib.stride_tricks.sliding_window_view(thing.whole, LAG + 1).all(1)
    changes: Floats = (values[LAG:] - values[:-LAG])[spans]
    return changes


def _motion(thing: Thing, short: int) -> tuple[Motion | None, Speed | None]:
    """What it does and how fast; a bounce's speed is its rhythm, which is told elsewhere."""
    scale = FPS / LAG / short
    dx, dy = _pairs(thing, thing.x) * scale, _pairs(thing, thing.y) * scale
    if len(dx) < 3:
        return None, None
    radius = np.sqrt(thing.area / np.pi) / short
    begun, ended = np.median(radius[:4]), np.median(radius[-8:])
    across, along = float(np.median(dx)), float(np.median(dy))
    standing = max(abs(across), abs(along)) < STANDING
    if standing and ended > 1.35 * begun and thing.whole.mean() > 0.8:
        early = radius[: FPS + 1]
        growth = (np.median(early[-3:]) - np.median(early[:3])) * FPS / (len(early) - 3)
        return Motion.GROW, _speed(float(growth), GROWTH)
    rising, sinking = (dy < -STANDING).mean(), (dy > STANDING).mean()
    if min(rising, sinking) > 0.2:
        return Motion.BOUNCE, None
    if standing:
        return Motion.STILL, Speed.SLOW
    if abs(across) > abs(along):
        return (Motion.RIGHT if across > 0 else Motion.LEFT), _speed(abs(across), PACE)
    return (Motion.DOWN if along > 0 else Motion.UP), _speed(abs(along), PACE)


def _speed(found: float, known: dict[Speed, float]) -> Speed:
    return min(known, key=lambda each: abs(np.log(max(found, 1e-6) / known[each])))


def _contacts(thing: Thing, height: int) -> Floats:
    """When the thing turns at its lowest: where a parabola through its lowest frame and the two beside it does."""
    y = np.where(thing.area > LEAST, thing.y, -np.inf)
    turns = [
        index for index in range(len(y)) if y[index] == y[max(index - 4, 0) : index + 5].max() and y[index] > height / 2
    ]
    kept = [turn for turn, before in zip(turns, [-99, *turns], strict=False) if turn - before > 4]
    return np.array([(turn + _vertex(y[max(turn - 1, 0) : turn + 2])) / FPS for turn in kept])


def _vertex(three: Floats) -> float:
    """How far from the middle one of three a parabola through them turns; 0 at the ends of a clip."""
    if len(three) < 3 or not np.isfinite(three).all() or (curved := three[0] - 2 * three[1] + three[2]) == 0:
        return 0.0
    return float((three[0] - three[2]) / (2 * curved))


def _rhythm(contacts: Floats) -> Speed | None:
    if len(contacts) < 2:
        return None
    return _speed(float(np.median(np.diff(contacts))), BOUNCE)
