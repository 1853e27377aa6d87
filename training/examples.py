"""What each partition learns from: the world's clips with prompts, keyframes and references of every kind. Torch."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from shared_runtime.demo import prompts
from shared_runtime.demo.scene import Motion, Scene
from shared_runtime.demo.world import RADIUS, frames, track
from training import geometry
from training.flow import Clips
from training.packing import Layout, reference_layout, text_layout
from training.speaking import Presentation, Reference, Speaker
from training.world import LAST, REFERENCE_CLIPS, SIZE, World

SOUND_LATENTS = 100
"""Of an audio that is a reference: 2.5 s."""
TEXT_KINDS = ("none", "none", "first", "last", "both")
"""Keyframes of an example; without any twice as often as with each kind."""
REFERENCE_KINDS = (
    ("image",),
    ("image", "image"),
    ("video",),
    ("image", "video"),
    ("video", "image"),
    ("image", "audio"),
    ("audio", "image"),
)
"""References of an example, in the order of the request."""


@dataclass
class Group:
    """Examples of one form: one layout, and rows that lie on top of each other."""

    layout: Layout
    text: torch.Tensor
    targets: torch.Tensor
    """Numbers of the world's clips."""
    shown: torch.Tensor
    heard: torch.Tensor

    def pick(self, world: World, random: torch.Generator, count: int) -> Clips:
        """So many examples at random."""
        chosen = torch.randint(len(self.targets), (count,), generator=random).to(self.targets.device)
        clips = self.targets[chosen]
        return Clips(
            self.layout,
            self.text[chosen],
            world.video[clips],
            world.sound[clips],
            self.shown[chosen],
            self.heard[chosen],
        )


@dataclass
class Draft:
    """An example before its text is embedded."""

    target: int
    presentation: Presentation
    anchors: tuple[str, ...]
    shown: list[torch.Tensor] = field(default_factory=list)
    """Rows of pictures and clips, in order."""
    heard: list[torch.Tensor] = field(default_factory=list)
    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    """Latent sizes of what is shown."""

    def form(self) -> Hashable:
        """What examples of one layout have in common."""
        kinds = tuple((each.kind, each.has_audio) for each in self.presentation.references)
        return self.anchors, kinds, len(self.presentation.tokens)


class Teacher:
    """Puts examples together from an encoded world."""

    def __init__(self, world: World, speaker: Speaker, seed: int) -> None:
        self._world, self._speaker = world, speaker
        self._random = np.random.default_rng(seed)
        self._said: dict[Hashable, list[str]] = {}
        self._pictures: dict[tuple[int, int], Reference] = {}
        self._clips: dict[int, Reference] = {}

    def text_drafts(self, count: int) -> list[Draft]:
        """For the partition of t2va and fl2va."""
        return [self._text_draft(index, TEXT_KINDS[index % len(TEXT_KINDS)]) for index in range(count)]

    def reference_drafts(self, count: int) -> list[Draft]:
        """For the partition of ref2va."""
        return [self._reference_draft(REFERENCE_KINDS[index % len(REFERENCE_KINDS)]) for index in range(count)]

    def _text_draft(self, index: int, kind: str) -> Draft:
        target = index % len(self._world.scenes)
        anchors = {"none": (), "first": ("first",), "last": ("last",), "both": ("first", "last")}[kind]
        keys = [self._picture(target, 0 if anchor == "first" else LAST) for anchor in anchors]
        rows = [self._world.first[target] if anchor == "first" else self._world.last[target] for anchor in anchors]
        prompt = self._say(self._world.scenes[target])
        return Draft(target, self._speaker.present(prompt, keys), anchors, rows)

    def _reference_draft(self, kinds: tuple[str, ...]) -> Draft:
        target = self._any(range(len(self._world.scenes)))
        scene = self._world.scenes[target]
        numbers = [index + 1 for index in range(kinds.count("image"))]
        meant = int(self._random.choice(numbers)) if numbers else None
        draft = Draft(target, Presentation([], [], ()), ())
        references, seen = [], 0
        for kind in kinds:
            seen += kind == "image"
            references.append(self._add(draft, kind, target, meant=kind != "image" or seen == meant))
        prompt = self._say(scene, picture=meant, video="video" in kinds, audio="audio" in kinds)
        draft.presentation = self._speaker.present(prompt, references)
        return draft

    def _add(self, draft: Draft, kind: str, target: int, *, meant: bool) -> Reference:
        """One reference that shows what it is to show of the target, or, not `meant`, another thing.

        A small world may have no other clip like the target: then it is its own reference.
        """
        scene = self._world.scenes[target]
        world, (height, width) = self._world, (extent // 16 for extent in SIZE)
        match kind:
            case "image":
                same = self._looks[scene.shape, scene.colour] if meant else self._visible
                clip = self._any(same or [target])
                draft.shown.append(world.first[clip])
                draft.shapes.append((1, height, width))
                return self._picture(clip, 0)
            case "video":
                clip = self._any(self._moves[scene.motion, scene.speed, scene.pitch] or [target])
                draft.heard.append(world.played[clip])
                draft.shown.append(world.video[clip])
                draft.shapes.append((world.target.frames, height, width))
                return self._clip(clip)
            case _:
                clip = self._any(self._tones[scene.pitch] or [target])
                sides = world.sound[clip].view(2, -1, 32)[:, :SOUND_LATENTS]
                draft.heard.append(sides.flatten(0, 1))
                return Reference("audio", True)

    def _say(self, scene: Scene, picture: int | None = None, video: bool = False, audio: bool = False) -> str:
        words = (scene.shape, scene.colour, scene.background, scene.motion, scene.speed, scene.pitch)
        key = (words, picture, video, audio)
        if key not in self._said:
            texts = prompts.prompts(scene, picture, video, audio)
            self._said[key] = [text for text in texts if prompts.trained_on(text)] or texts
        texts = self._said[key]
        return texts[int(self._random.integers(len(texts)))]

    def _any(self, choices: Sequence[int]) -> int:
        return choices[int(self._random.integers(len(choices)))]

    def _picture(self, clip: int, frame: int) -> Reference:
        if (clip, frame) not in self._pictures:
            drawn = frames(self._world.scenes[clip], 1, *SIZE, first=frame)
            self._pictures[clip, frame] = self._speaker.picture(drawn[0])
        return self._pictures[clip, frame]

    def _clip(self, clip: int) -> Reference:
        if clip not in self._clips:
            scene = self._world.scenes[clip]
            self._clips[clip] = self._speaker.clip(
                geometry.FRAMES, lambda number: frames(scene, 1, *SIZE, first=number)[0], has_audio=True
            )
        return self._clips[clip]

    def _by(self, key: Callable[[Scene], Hashable], choices: Sequence[int]) -> dict[Any, list[int]]:
        found: dict[Any, list[int]] = defaultdict(list)
        for clip in choices:
            found[key(self._world.scenes[clip])].append(clip)
        return found

    @cached_property
    def _visible(self) -> list[int]:
        """Clips whose first frame shows the whole thing, at its usual size."""
        height, width = SIZE
        reach = RADIUS * min(SIZE) * 0.9
        found = []
        for clip, scene in enumerate(self._world.scenes):
            at = track(scene, np.zeros(1), height, width)
            inside = reach < at.x[0] < width - reach and reach < at.y[0] < height - reach
            if inside and scene.motion is not Motion.GROW:
                found.append(clip)
        return found

    @cached_property
    def _looks(self) -> dict[Any, list[int]]:
        return self._by(lambda scene: (scene.shape, scene.colour), self._visible)

    @cached_property
    def _moves(self) -> dict[Any, list[int]]:
        known = range(min(len(self._world.scenes), REFERENCE_CLIPS))
        return self._by(lambda scene: (scene.motion, scene.speed, scene.pitch), known)

    @cached_property
    def _tones(self) -> dict[Any, list[int]]:
        calm = [i for i, scene in enumerate(self._world.scenes) if scene.motion in (Motion.STILL, Motion.GROW)]
        return self._by(lambda scene: scene.pitch, calm)


def group(drafts: Sequence[Draft], world: World, speaker: Speaker, device: torch.device) -> list[Group]:
    """Drafts by their form, embedded, on the device."""
    forms: dict[Hashable, list[Draft]] = defaultdict(list)
    for draft in drafts:
        forms[draft.form()].append(draft)
    return [_group(same, world, speaker, device) for same in forms.values()]


def _group(same: list[Draft], world: World, speaker: Speaker, device: torch.device) -> Group:
    one = same[0]
    tags = torch.tensor(one.presentation.tags)
    references = list(one.presentation.references)
    if references and not one.anchors:
        shapes = [torch.empty(1, 24, *shape) for shape in one.shapes]
        layout = reference_layout(tags, world.target, references, shapes, one.heard)
    else:
        layout = text_layout(tags, world.target, one.anchors)
    empty = {"shown": torch.empty(0, 96), "heard": torch.empty(0, 32)}
    rows = {
        name: torch.stack([torch.cat([*getattr(each, name), none.half()]) for each in same]).to(device)
        for name, none in empty.items()
    }
    targets = torch.tensor([each.target for each in same], device=device)
    text = speaker.embed([each.presentation for each in same])
    return Group(layout, text, targets, rows["shown"], rows["heard"])
