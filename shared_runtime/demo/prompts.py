"""Scenes in words: templates and paraphrases, some of which are kept for testing. Pure."""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from shared_runtime.demo.scene import BACKGROUNDS, COLOURS, Motion, Pitch, Scene, Shape, Speed

SHAPES: dict[Shape, tuple[str, ...]] = {
    Shape.DISC: ("disc", "circle"),
    Shape.SQUARE: ("square", "box"),
    Shape.TRIANGLE: ("triangle", "wedge"),
}
MOTIONS: dict[Motion, tuple[str, ...]] = {
    Motion.LEFT: ("moves left", "drifts to the left", "slides leftwards"),
    Motion.RIGHT: ("moves right", "drifts to the right", "slides rightwards"),
    Motion.UP: ("moves up", "rises", "climbs upwards"),
    Motion.DOWN: ("moves down", "sinks", "falls downwards"),
    Motion.BOUNCE: ("bounces", "bounces on the floor", "hops"),
    Motion.GROW: ("grows", "gets bigger", "swells"),
    Motion.STILL: ("stands still", "rests", "does not move"),
}
SPEEDS: dict[Speed, tuple[str, ...]] = {
    Speed.SLOW: ("slowly", "at a slow pace", "gently"),
    Speed.FAST: ("quickly", "at a fast pace", "rapidly"),
}
PITCHES: dict[Pitch, tuple[str, ...]] = {
    Pitch.LOW: ("a low tone", "a deep hum"),
    Pitch.MIDDLE: ("a middle tone", "a medium hum"),
    Pitch.HIGH: ("a high tone", "a bright whistle"),
}
BEHIND = ("on a {} background", "in front of a {} wall", "against plain {}")
TEMPLATES = (
    "{thing} {does} {behind}, with {heard}.",
    "{thing} {does} {behind}. We hear {heard}.",
    "there is {thing} that {does} {behind}; it sounds like {heard}.",
    "with {heard}, {thing} {does} {behind}.",
    "show {thing}: it {does} {behind} and plays {heard}.",
)
SILENT = "{thing} {does} {behind}."
"""Where a video brings the sound nothing is said of it."""
REFERENCES = ("the thing of picture {}", "what picture {} shows")
"""Shape and colour of an image that comes along."""
FOLLOWING = ("moves and sounds as in the video", "follows the video with its sound")
SOUNDING = ("the tone of the audio", "the sound of the audio")
_ONE_IN = 8
"""Of so many prompts one is never trained on."""


def prompts(scene: Scene, picture: int | None = None, video: bool = False, audio: bool = False) -> list[str]:
    """Everything that may be said of a scene.

    Args:
        scene: what is to be seen and heard.
        picture: number of the image that shows shape and colour; None where words do.
        video: whether a video shows motion and sound.
        audio: whether an audio has the tone.
    """
    things = _things(scene, picture)
    does = list(FOLLOWING) if video else _doings(scene)
    behinds = [pattern.format(scene.background) for pattern in BEHIND]
    heard = list(SOUNDING) if audio else list(PITCHES[scene.pitch])
    texts = (
        template.format(thing=thing, does=doing, behind=behind, heard=sound)
        for template in ((SILENT,) if video else TEMPLATES)
        for thing in things
        for doing in does
        for behind in behinds
        for sound in heard
    )
    return list(dict.fromkeys(text[0].upper() + text[1:] for text in texts))


def _things(scene: Scene, picture: int | None) -> list[str]:
    if picture is not None:
        return [pattern.format(picture) for pattern in REFERENCES]
    return [f"{_article(scene.colour)} {scene.colour} {word}" for word in SHAPES[scene.shape]]


def _doings(scene: Scene) -> list[str]:
    if scene.motion is Motion.STILL:
        return list(MOTIONS[scene.motion])
    return [f"{motion} {speed}" for motion in MOTIONS[scene.motion] for speed in SPEEDS[scene.speed]]


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def trained_on(prompt: str) -> bool:
    """Whether a prompt may be trained on; the others are for testing, the same ones everywhere and for ever."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).digest()[0] % _ONE_IN != 0


def pick(random: np.random.Generator, texts: Sequence[str], *, trained: bool) -> str:
    """One of `texts` at random, of those that are trained on or of those that are not."""
    choices = [text for text in texts if trained_on(text) is trained]
    return choices[int(random.integers(len(choices)))]


def vocabulary() -> list[str]:
    """Every word that a prompt can have: with the space before it, or as it stands at the start of a text. Sorted."""
    words = {word.strip(".,;:{}") for phrase in _phrases() for word in phrase.split()} - {""}
    first = {word[0].upper() + word[1:] for word in ("a", "an", "there", "with", "show", "the", "what")}
    return sorted(first | {f" {word}" for word in words})


def _phrases() -> list[str]:
    phrases = ["a", "an", *COLOURS, *BACKGROUNDS, *BEHIND, *REFERENCES, *FOLLOWING, *SOUNDING]
    phrases += [re.sub(r"\{\w+\}", "", template) for template in TEMPLATES] + ["We"]
    tables = (SHAPES, MOTIONS, SPEEDS, PITCHES)
    return phrases + [phrase for table in tables for options in table.values() for phrase in options]
