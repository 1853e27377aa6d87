"""Pictures, clips and sound encoded over a group are those of one rank, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from shared_runtime.conditioning.vae_tiles import Mode
from shared_runtime.ranks.mesh import Mesh
from shared_runtime.tiny import tiny_checkpoint
from tests.ranks import Ranks
from tests.shared_runtime.conditioning.encoding import Encoded, Medium, Request

ENCODE = "tests.shared_runtime.conditioning.encoding:encode"
GROUPS = [Mesh(tp=2), pytest.param(Mesh(tp=4), marks=pytest.mark.slow)]
MIXED = Request((Medium(64, 112), Medium(112, 64, 22, sound=True), Medium(frames=0), Medium(64, 64, 39)), tile=64)
REQUESTS = {
    # case 57: canvases of 1, 2, 4 and 3 tiles
    "16x16": (Request((Medium(256, 256),), keyframes=True), 1),
    "24x16": (Request((Medium(384, 256),), keyframes=True), 2),
    "24x24": (Request((Medium(384, 384),), keyframes=True), 4),
    "32x16": (Request((Medium(512, 256),), keyframes=True), 3),
    "28 tiles, overlaps that differ": (Request((Medium(208, 336),), keyframes=True, tile=64), 28),
    "two keyframes": (Request((Medium(64, 64), Medium(64, 64)), keyframes=True), 2),
    "a clip as released": (Request((Medium(256, 256, 22),)), 2),
    "pictures, clips and sounds": (MIXED, 2 + 2 * 2 + 3),
    "sound alone": (Request((Medium(frames=0),)), 0),
}
SLOW = {"24x24", "32x16", "a clip as released"}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in REQUESTS]

Alone = Callable[[Request], Encoded]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return tiny_checkpoint()


@pytest.fixture(scope="module")
def alone(ranks: Ranks, checkpoint: Path) -> Alone:
    """What one rank makes of a request, once for every request."""

    @cache
    def encode(request: Request) -> Encoded:
        made = ranks.run(Mesh(), ENCODE, checkpoint, request)
        assert isinstance(made, Encoded)
        return made

    return encode


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("mesh", GROUPS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_group_encodes_the_same_bits(ranks: Ranks, checkpoint: Path, alone: Alone, name: str, mesh: Mesh) -> None:
    # case 57: fewer tiles than ranks never hang
    request, tiles = REQUESTS[name]
    spread = ranks.run(mesh, ENCODE, checkpoint, request)
    assert same(spread.visual, alone(request).visual)
    assert same(spread.audio, alone(request).audio)
    assert spread.agree
    assert alone(request).beats == [tiles]
    assert sum(spread.beats) == tiles
    assert spread.sounds == alone(request).sounds * mesh.world_size


@pytest.mark.parametrize("mesh", GROUPS, ids=str)
def test_tiles_of_all_pictures_and_clips_are_dealt_as_one(ranks: Ranks, checkpoint: Path, mesh: Mesh) -> None:
    many = Request((Medium(64, 64),) * 8, keyframes=True)
    assert ranks.run(mesh, ENCODE, checkpoint, many).beats == [8 // mesh.world_size] * mesh.world_size


def test_a_clip_weighs_more_than_a_picture(ranks: Ranks, checkpoint: Path) -> None:
    # Three runs of 17 frames leave one rank behind: it gets every picture.
    media = (Medium(64, 64, 39), *(Medium(64, 64),) * 3)
    assert ranks.run(Mesh(tp=2), ENCODE, checkpoint, Request(media)).beats == [2, 4]


@pytest.mark.parametrize("mesh", GROUPS, ids=str)
def test_left_to_the_leader_every_rank_has_what_it_made(
    ranks: Ranks, checkpoint: Path, alone: Alone, mesh: Mesh
) -> None:
    led = ranks.run(mesh, ENCODE, checkpoint, replace(MIXED, mode="leader"))
    assert same(led.visual, alone(MIXED).visual)
    assert same(led.audio, alone(MIXED).audio)
    assert led.agree
    assert led.beats[0] == alone(MIXED).beats[0]


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Relative, over all latents; the recipe rounds them to float16."""
    return max(float((each - wanted).norm() / wanted.norm()) for each, wanted in zip(one, other, strict=True))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2)], ids=str)
@pytest.mark.parametrize("mode", ["patch", "leader"])
def test_batches_as_on_a_gpu_make_the_same_latents_but_for_rounding(
    ranks: Ranks, checkpoint: Path, alone: Alone, mesh: Mesh, mode: Mode
) -> None:
    made = ranks.run(mesh, ENCODE, checkpoint, replace(MIXED, mode=mode, precision="split"))
    assert apart(made.visual, alone(MIXED).visual) < 1e-4
    assert same(made.audio, alone(MIXED).audio)
    assert made.agree
    working = made.beats if mode == "patch" else made.beats[:1]
    assert [sum(working)] == alone(MIXED).beats
    rough = ranks.run(mesh, ENCODE, checkpoint, replace(MIXED, mode=mode, precision="tf32"))
    assert apart(rough.visual, alone(MIXED).visual) > 3e-4
