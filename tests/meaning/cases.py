"""What is asked of the demo checkpoint and what must come of it: the same list for a seed, everywhere and for ever."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from shared_runtime.demo import prompts
from shared_runtime.demo.scene import COLOURS, Motion, Scene, Shape, Speed, draw
from video_client.scenes import write_picture, write_scene, write_tone

T = TypeVar("T")
Task = Literal["t2va", "fl2va", "ref2va"]
TEXT_ASPECTS = ("colour", "shape", "background", "motion", "speed", "pitch", "clicks", "pan")


@dataclass(frozen=True)
class Medium:
    """A file that goes with a request: what it shows or plays."""

    kind: Literal["first", "last", "image", "video", "audio"]
    scene: Scene


@dataclass(frozen=True)
class Case:
    """One request, and the scene that its clip must be of in these `aspects`."""

    name: str
    group: str
    """What it counts for in the table."""
    task: Task
    prompt: str
    scene: Scene
    aspects: tuple[str, ...]
    seed: int
    media: tuple[Medium, ...] = ()

    def files(self, folder: Path) -> list[Path]:
        """Its files, written into `folder`, in the order of the request."""
        folder.mkdir(parents=True, exist_ok=True)
        return [write_medium(folder / f"{self.name}_{index}", each) for index, each in enumerate(self.media)]


def write_medium(stem: Path, medium: Medium) -> Path:
    """A PNG, an MP4 with sound or a WAV."""
    match medium.kind:
        case "video":
            return write_scene(stem.with_suffix(".mp4"), medium.scene)
        case "audio":
            return write_tone(stem.with_suffix(".wav"), medium.scene)
        case _:
            return write_picture(stem.with_suffix(".png"), medium.scene, last=medium.kind == "last")


def all_cases(clips: int, seed: int) -> list[Case]:
    """So many prompts, half of them of combinations that were never trained on, and a quarter as many of each kind of
    keyframes and references."""
    random = np.random.default_rng(seed)
    few = max(clips // 4, 1)
    found = list(_texts(random, clips))
    for keys in (("first",), ("last",), ("first", "last")):
        found += _keyframes(random, few, keys)
    for kinds in (("image",), ("video",), ("image", "video"), ("video", "image"), ("audio", "image")):
        found += _references(random, few, kinds)
    return [*found, *_swaps(random, few)]


def _texts(random: np.random.Generator, count: int) -> Iterator[Case]:
    for index in range(count):
        scene = draw(random, unseen=bool(index % 2))
        text = prompts.pick(random, prompts.prompts(scene), trained=False)
        group = "unseen combination" if scene.unseen else "unseen prompt"
        yield Case(f"text_{index:03d}", group, "t2va", text, scene, TEXT_ASPECTS, index)


def _keyframes(random: np.random.Generator, count: int, keys: tuple[str, ...]) -> Iterator[Case]:
    for index in range(count):
        scene = draw(random, unseen=False)
        text = prompts.pick(random, prompts.prompts(scene), trained=False)
        media = tuple(Medium(key, scene) for key in keys)  # type: ignore[arg-type]
        name, group = f"{'_'.join(keys)}_{index:03d}", f"{' and '.join(keys)} frame"
        yield Case(name, group, "fl2va", text, scene, (*keys, "continuous", "motion", "pitch"), index, media)


def _references(random: np.random.Generator, count: int, kinds: tuple[str, ...]) -> Iterator[Case]:
    for index in range(count):
        scene = draw(random, unseen=False)
        media = tuple(Medium(kind, _shown(random, kind, scene)) for kind in kinds)  # type: ignore[arg-type]
        aspects = tuple(each for kind in kinds for each in _aspects(kind))
        picture = 1 if "image" in kinds else None
        texts = prompts.prompts(scene, picture, "video" in kinds, "audio" in kinds)
        text = texts[int(random.integers(len(texts)))]
        name = f"{'_'.join(kinds)}_{index:03d}"
        yield Case(name, " then ".join(kinds), "ref2va", text, scene, aspects, index, media)


def _aspects(kind: str) -> tuple[str, ...]:
    return {"image": ("colour", "shape"), "video": ("motion", "speed", "pitch"), "audio": ("pitch",)}[kind]


def _shown(random: np.random.Generator, kind: str, scene: Scene) -> Scene:
    """A scene that has what such a reference is to give, and else nothing of `scene`."""
    match kind:
        case "image":
            return replace(standing(random), shape=scene.shape, colour=scene.colour)
        case "video":
            other = draw(random, unseen=False)
            return replace(other, motion=scene.motion, speed=scene.speed, pitch=scene.pitch)
        case _:
            return replace(standing(random), pitch=scene.pitch)


def standing(random: np.random.Generator) -> Scene:
    """A scene in which nothing moves."""
    return replace(draw(random, unseen=False), motion=Motion.STILL, speed=Speed.SLOW)


def _swaps(random: np.random.Generator, count: int) -> Iterator[Case]:
    """Two pictures, of which the prompt means the first; and the same request with the pictures swapped."""
    for index in range(count):
        scene, other = draw(random, unseen=False), standing(random)
        other = replace(other, shape=_another(random, list(Shape), scene.shape))
        other = replace(other, colour=_another(random, list(COLOURS), scene.colour))
        texts = prompts.prompts(scene, picture=1)
        text = texts[int(random.integers(len(texts)))]
        mine = Medium("image", _shown(random, "image", scene))
        media = (mine, Medium("image", other))
        swapped = replace(scene, shape=other.shape, colour=other.colour)
        for group, shown, order in (("two images", scene, media), ("two images, swapped", swapped, media[::-1])):
            name = f"{group.replace(', ', '_').replace(' ', '_')}_{index:03d}"
            yield Case(name, group, "ref2va", text, shown, ("colour", "shape"), index, order)


def _another(random: np.random.Generator, choices: list[T], than: T) -> T:
    left = [each for each in choices if each != than]
    return left[int(random.integers(len(left)))]
