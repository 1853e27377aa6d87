"""The decoder over a group gives the frames of one rank, bit for bit, for every number of tiles and of ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from shared_runtime.ranks.mesh import Mesh
from shared_runtime.tiny import tiny_checkpoint
from tests.diffusion_service.parallel.decoding import Clip, Decoded
from tests.ranks import Ranks

JOBS = "tests.diffusion_service.parallel.decoding"
GROUPS = [Mesh(tp=2), pytest.param(Mesh(tp=4), marks=pytest.mark.slow)]
CLIPS = {
    # case 57: canvases of 1, 2, 4 and 3 tiles
    "16x16": Clip(16, 16, 39),
    "24x16": Clip(24, 16, 39),
    "24x24": Clip(24, 24, 22),
    "32x16": Clip(32, 16, 22),
    "28 tiles, overlaps that differ": Clip(13, 21, 56, tile=64),
    "15 tiles, clips that share windows": Clip(8, 13, 73, tile=64),
    "one tile, fewer clips in the last window than ranks": Clip(4, 4, 124),
    "autocast": Clip(8, 10, 39, tile=64, precision="fp16"),
}

Alone = Callable[[Clip], Decoded]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return tiny_checkpoint()


@pytest.fixture(scope="module")
def alone(ranks: Ranks, checkpoint: Path) -> Alone:
    """The decode of one rank, made once for every clip."""

    @cache
    def decode(clip: Clip) -> Decoded:
        made = ranks.run(Mesh(), f"{JOBS}:decode", checkpoint, clip)
        assert isinstance(made, Decoded)
        return made

    return decode


@pytest.mark.parametrize("name", CLIPS)
def test_one_rank_streams_what_diffusers_decodes(ranks: Ranks, checkpoint: Path, alone: Alone, name: str) -> None:
    clip = CLIPS[name]
    reference = ranks.run(Mesh(), f"{JOBS}:decode_reference", checkpoint, clip)
    assert reference.shape == (clip.frames, clip.height * 16, clip.width * 16, 3)
    assert torch.equal(alone(clip).frames, reference)


@pytest.mark.parametrize("mesh", GROUPS, ids=str)
@pytest.mark.parametrize("name", CLIPS)
def test_a_group_decodes_the_same_bits(ranks: Ranks, checkpoint: Path, alone: Alone, name: str, mesh: Mesh) -> None:
    # case 57: fewer tiles than ranks never hang
    clip = CLIPS[name]
    spread = ranks.run(mesh, f"{JOBS}:decode", checkpoint, clip)
    assert torch.equal(spread.frames, alone(clip).frames)
    assert spread.lengths == alone(clip).lengths
    assert spread.yields == alone(clip).yields * mesh.world_size
    assert sum(spread.beats) == alone(clip).beats[0]
    assert max(spread.beats) - min(spread.beats) <= (clip.frames // 17)


@pytest.mark.parametrize("mesh", GROUPS, ids=str)
def test_left_to_the_leader_the_others_pass_every_piece_with_it(
    ranks: Ranks, checkpoint: Path, alone: Alone, mesh: Mesh
) -> None:
    clip = CLIPS["28 tiles, overlaps that differ"]
    led = ranks.run(mesh, f"{JOBS}:decode", checkpoint, replace(clip, patch=False))
    assert torch.equal(led.frames, alone(clip).frames)
    assert led.yields == alone(clip).yields * mesh.world_size
    assert led.beats[0] == alone(clip).beats[0]


@pytest.mark.parametrize("patch", [True, False])
def test_a_pixel_that_is_no_number_fails_the_job_on_every_rank(ranks: Ranks, checkpoint: Path, patch: bool) -> None:
    clip = replace(CLIPS["one tile, fewer clips in the last window than ranks"], patch=patch)
    spoiled = 3 if patch else 0
    assert ranks.run(Mesh(tp=4), f"{JOBS}:poison", checkpoint, clip, spoiled) == ["numerical_error"] * 4


def test_a_decode_given_up_half_way_leaves_the_group_fit_for_the_next(
    ranks: Ranks, checkpoint: Path, alone: Alone
) -> None:
    clip = CLIPS["15 tiles, clips that share windows"]
    assert torch.equal(ranks.run(Mesh(tp=4), f"{JOBS}:decode_again", checkpoint, clip).frames, alone(clip).frames)
