"""One step of every stage: a finite loss, and something to learn for every weight that makes it."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shared_runtime.demo.world import sound
from tests.training.test_course import options
from training import audio_vae, geometry, video_decoder, video_vae
from training.dit import Lesson, examples
from training.drawing import scenes
from training.folder import read_component
from training.packing import Packed
from training.turbo import Distilling, adapt
from training.world import World, write_world

pytestmark = pytest.mark.slow


def untaught(model: nn.Module) -> set[str]:
    """Weights that the step left without a direction."""
    return {
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and (weight.grad is None or not weight.grad.isfinite().all())
    }


def test_a_step_of_the_video_vae() -> None:
    torch.manual_seed(0)
    vae = geometry.video_vae()
    losses = video_vae.Lesson(vae, seed=0, batch=1, device=torch.device("cpu"))(2)
    losses["total"].backward()
    assert losses["total"].isfinite()
    assert not untaught(vae)


def test_a_step_of_the_video_decoder_leaves_the_encoder_as_it_is() -> None:
    torch.manual_seed(0)
    vae = geometry.video_vae()
    lesson = video_decoder.Lesson(vae, seed=0, pool=4, batch=2, device=torch.device("cpu"))
    losses = lesson(0)
    losses["total"].backward()
    assert losses["total"].isfinite()
    assert not untaught(vae.decoder)
    assert all(weight.grad is None for weight in vae.encoder.parameters())
    # Another canvas, of which there is one piece only.
    assert lesson(1)["total"] != losses["total"]


def test_a_step_of_the_audio_vae_on_pieces_of_every_length() -> None:
    torch.manual_seed(0)
    vae = geometry.audio_vae()
    waves = [sound(scene, geometry.FRAMES, geometry.HEIGHT, geometry.WIDTH) for scene in scenes(2, 0)]
    lesson = audio_vae.Lesson(vae, torch.stack([torch.from_numpy(wave).half() for wave in waves]), seed=0, batch=2)
    for step in range(len(audio_vae.LENGTHS)):
        losses = lesson(step)
        losses["total"].backward()
        assert losses["total"].isfinite()
    # Sounds are never drawn from a posterior: its spread is nobody's.
    assert untaught(vae) == {"logs_proj.weight", "logs_proj.bias"}


def test_what_latents_say_comes_through_the_untrained_audio_decoder() -> None:
    torch.manual_seed(0)
    vae = geometry.audio_vae()
    kept: dict[str, float] = {}

    def watch(name: str, activation: nn.Module) -> None:
        activation.register_forward_hook(
            lambda _module, given, made: kept.__setitem__(name, float(made.std() / given[0].std()))
        )

    for name, module in vae.decoder.named_modules():
        if name.endswith(".act"):
            watch(name, module)
    with torch.no_grad():
        vae.decode(torch.randn(2, 32, 16))
    # Where one is flat, gradients end: the decoder then learned to be silent, whatever it was told.
    assert min(kept.values()) > 0.5


def test_a_step_of_a_partition_and_of_its_adapter(tmp_path: Path, untrained: Path) -> None:
    (tmp_path / "checkpoint").symlink_to(untrained)
    given = options(tmp_path, batch=2)
    sizes = ((192, 96), (356, 32), (358, 32), (6, 96), (6, 96))
    write_world(tmp_path / "world", World(scenes(6, 0), *(torch.randn(6, *size).half() for size in sizes)))
    world, groups = examples(given, "transformer_ref", 7)
    model = read_component(untrained, "transformer_ref")
    lesson = Lesson(Packed(model), world, groups, given)
    losses = lesson(0)
    losses["total"].backward()
    # Of noise and data of spread one, a velocity has two.
    assert 1 < float(losses["video"].detach()) < 8
    assert not untaught(model)
    teacher, pupil = (read_component(untrained, "transformer_ref").requires_grad_(False) for _ in range(2))
    adapters = adapt(pupil)
    packed = Packed(teacher)
    distilling = Distilling(packed, Packed(pupil), Lesson(packed, world, groups, given), seed=0, batch=2)
    losses = distilling(0)
    losses["total"].backward()
    assert losses["total"].isfinite()
    assert all(each.up.grad is not None and each.up.grad.any() for each in adapters.values())
