"""Blending tiles makes no seam of its own: weights are one everywhere, as in diffusers' stitching."""

from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion_service.parallel.tile_plan import Tile
from diffusion_service.parallel.vae_tiles import blend, tiles_of
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_video_vae

CANVASES = [(768, 1344), (1344, 768), (896, 1216), (480, 800), (256, 256)]
"""Height and width; 480 has pixels under three tiles."""


@pytest.fixture(scope="module")
def vae() -> Any:
    return load_video_vae(Path(tiny_checkpoint()), "decoder", "cpu")


def compose(vae: Any, laid: tuple[Tile, ...], raw: list[torch.Tensor], height: int, width: int) -> torch.Tensor:
    canvas = torch.full((height, width), torch.nan)
    for tile in laid:
        above = None if tile.above is None else raw[tile.above][-tile.y.before :]
        left = None if tile.left is None else raw[tile.left][:, -tile.x.before :]
        canvas[tile.y.owned, tile.x.owned] = blend(vae, tile, raw[tile.index], above, left)
    return canvas


def constant(laid: tuple[Tile, ...], value: float) -> list[torch.Tensor]:
    return [torch.full((tile.y.length, tile.x.length), value) for tile in laid]


@pytest.mark.parametrize(("height", "width"), CANVASES)
def test_tiles_of_one_make_a_canvas_of_exactly_one(vae: Any, height: int, width: int) -> None:
    # case 58
    laid = tiles_of(vae, height, width)
    assert torch.equal(compose(vae, laid, constant(laid, 1.0), height, width), torch.ones(height, width))


@pytest.mark.parametrize(("height", "width"), CANVASES)
def test_the_weights_of_all_tiles_sum_to_one_everywhere(vae: Any, height: int, width: int) -> None:
    # case 58
    laid = tiles_of(vae, height, width)
    total = torch.zeros(height, width)
    for lit in laid:
        raw = constant(laid, 0.0)
        raw[lit.index] += 1.0
        weights = compose(vae, laid, raw, height, width)
        assert weights.min() >= 0
        assert weights.max() > 0.99
        total += weights
    torch.testing.assert_close(total, torch.ones(height, width), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), CANVASES)
def test_it_is_the_stitching_of_diffusers_bit_for_bit(vae: Any, height: int, width: int) -> None:
    laid = tiles_of(vae, height, width)
    random = torch.Generator().manual_seed(1)
    raw = [torch.rand(tile.y.length, tile.x.length, generator=random) for tile in laid]
    columns = sum(tile.above is None for tile in laid)
    rows = [raw[start : start + columns] for start in range(0, len(raw), columns)]
    overlaps = [tile.y.after for tile in laid[::columns]][:-1], [tile.x.after for tile in laid[:columns]][:-1]
    assert torch.equal(compose(vae, laid, raw, height, width), vae._stitch_tiles(rows, *overlaps))


def test_the_released_canvas_has_28_tiles(vae: Any) -> None:
    assert len(tiles_of(vae, 768, 1344)) == 28
