"""Examples are what a request of that kind becomes in the services: text embeddings, layouts, rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines import PipelineState
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3FL2VATextEncoderStep,
    MiniMaxH3Ref2VATextEncoderStep,
    MiniMaxH3TextEncoderStep,
)
from PIL import Image

from shared_runtime.conditioning.blocks import assemble, run_block
from shared_runtime.demo.scene import COLOURS
from shared_runtime.demo.world import frames
from shared_runtime.weights import load_processor, load_text_encoder, load_tokenizer
from training.drawing import scenes
from training.examples import REFERENCE_KINDS, SOUND_LATENTS, Teacher, group
from training.speaking import Presentation, Reference, Speaker
from training.world import SIZE, World

CLIPS = 40


@pytest.fixture(scope="module")
def world() -> World:
    """Clips that are told apart by their latents: each has its own number everywhere."""
    numbers = torch.arange(CLIPS).half()[:, None, None]
    rows = {"video": (192, 96), "sound": (356, 32), "played": (358, 32), "first": (6, 96), "last": (6, 96)}
    return World(scenes(CLIPS, 1), **{name: numbers.expand(-1, *size) for name, size in rows.items()})


@pytest.fixture(scope="module")
def speaker(untrained: Path) -> Speaker:
    return Speaker(untrained, torch.device("cpu"))


class Served:
    """The text steps of the encoder service."""

    def __init__(self, folder: Path) -> None:
        self._steps = {"t": MiniMaxH3TextEncoderStep(), "f": MiniMaxH3FL2VATextEncoderStep()}
        self._steps["r"] = MiniMaxH3Ref2VATextEncoderStep()
        parts = {
            "text_encoder": load_text_encoder(folder, "cpu"),
            "tokenizer": load_tokenizer(folder),
            "processor": load_processor(folder),
        }
        self._pipeline = assemble(folder, dict(self._steps), parts, torch.device("cpu"))

    def __call__(self, step: str, **values: Any) -> tuple[torch.Tensor, list[int]]:
        state = PipelineState()
        for name, value in values.items():
            state.set(name, value)
        run_block(self._steps[step], self._pipeline, state)
        return state.get("prompt_embeds")[0], state.get("text_token_tags").tolist()


class Media:
    """A reference as diffusers' own step is given it."""

    def __init__(self, kind: str, has_audio: bool, pixels: Any) -> None:
        self.kind, self.has_audio = kind, has_audio
        self.image = Image.fromarray(pixels) if kind == "image" else None
        self.frames = pixels


def same(many: list[Presentation], speaker: Speaker, served: list[tuple[torch.Tensor, list[int]]]) -> None:
    embedded = speaker.embed(many)
    for index, (states, tags) in enumerate(served):
        assert many[index].tags == tags
        torch.testing.assert_close(embedded[index].float(), states.float(), atol=0.03, rtol=0.03)


def test_prompts_and_pictures_are_embedded_as_the_encoder_service_does(untrained: Path, speaker: Speaker) -> None:
    served, drawn = Served(untrained), [frames(scene, 107, *SIZE) for scene in scenes(2, 5)]
    prompts = ["A red disc moves left slowly on a black background, with a low tone."] * 2
    prompts[1] = prompts[1].replace("red", "blue")
    same([speaker.present(text, []) for text in prompts], speaker, [served("t", prompt=text) for text in prompts])
    pictures = [[speaker.picture(clip[0]), speaker.picture(clip[-1])] for clip in drawn]
    same(
        [speaker.present(prompts[0], each) for each in pictures],
        speaker,
        [served("f", prompt=prompts[0], keyframes=[Image.fromarray(clip[i]) for i in (0, -1)]) for clip in drawn],
    )
    mixed = [
        [speaker.clip(107, clip.__getitem__, True), speaker.picture(clip[0]), Reference("audio", True)]
        for clip in drawn
    ]
    references = [
        [Media("video", True, clip), Media("image", False, clip[0]), Media("audio", True, None)] for clip in drawn
    ]
    same(
        [speaker.present(prompts[1], each) for each in mixed],
        speaker,
        [served("r", prompt=prompts[1], normalized_references=each) for each in references],
    )


def test_keyframes_are_the_clips_own(world: World, speaker: Speaker) -> None:
    drafts = Teacher(world, speaker, 0).text_drafts(20)
    assert [draft.anchors for draft in drafts[:5]] == [(), (), ("first",), ("last",), ("first", "last")]
    for draft in drafts:
        assert all((rows == draft.target).all() for rows in draft.shown)
        assert len(draft.presentation.references) == len(draft.shown) == len(draft.anchors)
    groups = group(drafts, world, speaker, torch.device("cpu"))
    assert sum(len(each.targets) for each in groups) == 20
    for each in groups:
        assert each.layout.shown == each.shown.shape[1]
        clips = each.pick(world, torch.Generator().manual_seed(0), 3)
        assert clips.video.shape[1:] == (192, 96)
        assert each.layout.length == clips.text.shape[1] + each.layout.shown + 192 + 356


def test_references_show_what_the_prompt_does_not_say(world: World, speaker: Speaker) -> None:
    teacher = Teacher(world, speaker, 0)
    drafts = teacher.reference_drafts(21)
    assert {tuple(ref.kind for ref in draft.presentation.references) for draft in drafts} == set(REFERENCE_KINDS)
    for draft in drafts:
        kinds = [ref.kind for ref in draft.presentation.references]
        target, seen = world.scenes[draft.target], iter(draft.shown)
        heard = iter(draft.heard)
        likes = []
        for kind in kinds:
            if kind == "audio":
                rows = next(heard)
                assert len(rows) == 2 * SOUND_LATENTS
                assert world.scenes[int(rows[0, 0])].pitch == target.pitch
                continue
            shown = world.scenes[int(next(seen)[0, 0])]
            if kind == "image":
                likes.append((shown.shape, shown.colour) == (target.shape, target.colour))
            else:
                assert (shown.motion, shown.speed, shown.pitch) == (target.motion, target.speed, target.pitch)
                assert int(next(heard)[0, 0]) == world.scenes.index(shown)
        assert not likes or any(likes)
        text = speaker._tokenizer.decode(draft.presentation.tokens)
        assert ("picture" in text) == ("image" in kinds)
        if "image" in kinds:
            assert not [colour for colour in COLOURS if f" {colour} " in text]
    assert group(drafts, world, speaker, torch.device("cpu"))


def test_the_same_seed_puts_the_same_examples_together(world: World, speaker: Speaker) -> None:
    one, again = (Teacher(world, speaker, 7).reference_drafts(15) for _ in range(2))
    assert [draft.presentation.tokens for draft in one] == [draft.presentation.tokens for draft in again]
    assert np.all([a.target == b.target for a, b in zip(one, again, strict=True)])
