"""What a clip of the little world shows and sounds like, and which combinations are never trained on. Pure.

A scene's words say everything but where the thing is: `place` and `phase` are drawn, and a model is free in them.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import product
from typing import TypeVar

import numpy as np

RGB = tuple[int, int, int]
T = TypeVar("T")


class Shape(StrEnum):
    """What moves."""

    DISC = "disc"
    SQUARE = "square"
    TRIANGLE = "triangle"


class Motion(StrEnum):
    """What it does."""

    LEFT = "left"
    RIGHT = "right"
    UP = "up"
    DOWN = "down"
    BOUNCE = "bounce"
    GROW = "grow"
    STILL = "still"


class Speed(StrEnum):
    """How fast; a thing that stands still has none, and is SLOW for the sake of a value."""

    SLOW = "slow"
    FAST = "fast"


class Pitch(StrEnum):
    """The tone that sounds all the while."""

    LOW = "low"
    MIDDLE = "middle"
    HIGH = "high"


COLOURS: dict[str, RGB] = {
    "red": (220, 30, 30),
    "orange": (255, 140, 0),
    "yellow": (250, 225, 40),
    "green": (30, 170, 50),
    "cyan": (40, 215, 225),
    "blue": (35, 70, 225),
    "purple": (140, 40, 190),
    "pink": (255, 130, 190),
}
BACKGROUNDS: dict[str, RGB] = {
    "black": (12, 12, 12),
    "white": (243, 243, 243),
    "grey": (125, 125, 125),
    "brown": (92, 58, 34),
}
HERTZ: dict[Pitch, int] = {Pitch.LOW: 240, Pitch.MIDDLE: 480, Pitch.HIGH: 960}
"""Multiples of 40 Hz: every latent of the audio VAE (800 samples at 32 kHz) then holds whole periods."""
_ONE_IN = 8
"""Of so many combinations of shape, colour and motion one is never trained on."""


@dataclass(frozen=True)
class Scene:
    """One clip. `colour` and `background` are names in `COLOURS` and `BACKGROUNDS`."""

    shape: Shape
    colour: str
    background: str
    motion: Motion
    speed: Speed
    pitch: Pitch
    place: float
    """Across the motion, 0 to 1 of the room there is; where nothing moves sideways, from left to right."""
    phase: float
    """Along the motion, 0 to 1 of a round; where nothing moves, from top to bottom. A bounce begins at its highest."""

    @property
    def unseen(self) -> bool:
        """Whether its combination of shape, colour and motion is never trained on."""
        return (self.shape, self.colour, self.motion) in held_out()


@cache
def held_out() -> frozenset[tuple[Shape, str, Motion]]:
    """The combinations that are never trained on: the same ones everywhere and for ever."""
    return frozenset(
        (shape, colour, motion)
        for shape, colour, motion in product(Shape, COLOURS, Motion)
        if _hash(f"{shape}/{colour}/{motion}") % _ONE_IN == 0
    )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def draw(random: np.random.Generator, unseen: bool) -> Scene:
    """A scene at random, of the combinations that are trained on or of those that are not."""
    while True:
        motion = _one(random, list(Motion))
        scene = Scene(
            shape=_one(random, list(Shape)),
            colour=_one(random, list(COLOURS)),
            background=_one(random, list(BACKGROUNDS)),
            motion=motion,
            speed=Speed.SLOW if motion is Motion.STILL else _one(random, list(Speed)),
            pitch=_one(random, list(Pitch)),
            place=float(random.random()),
            phase=float(random.random()),
        )
        if scene.unseen is unseen:
            return scene


def _one(random: np.random.Generator, choices: list[T]) -> T:
    return choices[int(random.integers(len(choices)))]
