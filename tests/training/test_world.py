import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from shared_runtime.demo.scene import Motion
from shared_runtime.demo.world import frames
from shared_schema.tasks import audio_latents, video_latents
from tests.training.test_course import options
from training import geometry
from training.drawing import clips, scenes
from training.world import World, encode, encode_sounds, make_certain, read_world, rows, spread, write_world


def test_a_sound_has_the_latents_that_a_reference_has_and_is_repeated_exactly() -> None:
    torch.manual_seed(0)
    vae, many = geometry.audio_vae().eval(), scenes(2, 1)
    latents = encode_sounds(vae, many, torch.device("cpu"), workers=1)
    # One more than is made: 107 frames last 142,667 samples, and the last 267 begin another latent.
    assert latents.shape == (2, 2, 32, audio_latents(geometry.FRAMES) + 1)
    assert torch.equal(latents, encode_sounds(vae, many, torch.device("cpu"), workers=1))


def test_many_scenes_are_drawn_at_once_as_each_is_drawn_by_itself() -> None:
    many, firsts, size = scenes(9, 3), [0, 17, 34] * 3, (geometry.HEIGHT, geometry.WIDTH)
    assert len({each.shape for each in many}) == 3
    drawn = clips(many, firsts, 5, size, torch.device("cpu"))
    alone = [frames(scene, 5, *size, first=first) for scene, first in zip(many, firsts, strict=True)]
    assert np.array_equal(drawn.numpy(), np.stack(alone))


def test_every_second_scene_shows_what_is_wanted_often() -> None:
    many = scenes(12, 3, Motion.BOUNCE)
    assert all(scene.motion is Motion.BOUNCE for scene in many[1::2])
    assert len({scene.motion for scene in many[::2]}) > 2


@pytest.mark.parametrize("known", [True, False])
def test_what_partitions_learned_with_stays_where_it_is_known(tmp_path: Path, untrained: Path, known: bool) -> None:
    shutil.copytree(untrained, tmp_path / "checkpoint")
    config = tmp_path / "checkpoint" / "vae" / "config.json"
    before = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**before, "latents_mean": [3.0] * 24, "latents_std": [2.0] * 24}), encoding="utf-8")
    world = encode(options(tmp_path), scenes(1, 0), known=known)
    after = json.loads(config.read_text(encoding="utf-8"))
    assert (after["latents_mean"] == [3.0] * 24) is known
    # Untrained latents are nearly nothing, so what is taken from them is all that is seen.
    assert (abs(float(world.video.float().mean()) + 1.5) < 0.1) is known


@torch.no_grad()
def test_what_services_draw_is_what_was_learned() -> None:
    vae = geometry.video_vae().eval()
    torch.nn.init.normal_(vae.quant_conv.weight)
    pixels = torch.randn(1, 3, 1, geometry.HEIGHT, geometry.WIDTH)
    mean = vae.encode(pixels, return_dict=False)[0].mode()
    make_certain(vae)
    posterior = vae.encode(pixels, return_dict=False)[0]
    assert torch.equal(posterior.mode(), mean)
    assert torch.allclose(posterior.sample(torch.Generator().manual_seed(42)), mean, atol=1e-5)


def test_a_world_is_read_as_it_was_written(tmp_path: Path) -> None:
    many = scenes(3, 0)
    made = [torch.randn(3, size, width).half() for size, width in ((192, 96), (356, 32), (358, 32), (6, 96), (6, 96))]
    write_world(tmp_path, World(many, *made))
    again = read_world(tmp_path)
    assert again.scenes == many
    assert torch.equal(again.played, made[2])
    assert (again.target.frames, again.target.sound) == (video_latents(107), audio_latents(107))


def test_spreads_make_every_channel_one_that_says_something() -> None:
    sizes = torch.arange(6.0, 30.0)
    sizes[3] = 0.3
    latents = torch.randn(5, 24, 7, 4, 6) * sizes.view(-1, 1, 1, 1) + 3
    mean, std = spread(latents, 1)
    scaled = (latents - torch.tensor(mean).view(-1, 1, 1, 1)) / torch.tensor(std).view(-1, 1, 1, 1)
    assert scaled.mean((0, 2, 3, 4)).abs().max() < 1e-4
    made = scaled.std((0, 2, 3, 4))
    assert made[3] < 0.1
    assert (torch.cat([made[:3], made[4:]]) - 1).abs().max() < 0.01
    assert rows(scaled).shape == (5, 7 * 2 * 3, 96)
