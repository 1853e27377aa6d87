"""The encoder for batches of tiles makes what diffusers' own modules make, one tile at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLMiniMaxH3
from torch._dynamo.utils import counters

from shared_runtime.conditioning.tile_runner import BatchedTiles, StockTiles
from shared_runtime.conditioning.ways import KindWays, Layout, Ways
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_video_vae
from shared_schema.deploy.model import EncodePrecision

FRAME, CLIP = (1, 3, 1, 64, 80), (1, 3, 17, 64, 48)


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return tiny_checkpoint()


@pytest.fixture
def vae(checkpoint: Path) -> Any:
    return load_video_vae(checkpoint, "encoder", "cpu")


def tiles(shape: tuple[int, ...], count: int) -> list[torch.Tensor]:
    return list(torch.randn((count, *shape[1:]), generator=torch.Generator().manual_seed(5)).split(1))


def batched(vae: Any, precision: EncodePrecision, layout: Layout = "contiguous", **more: Any) -> BatchedTiles:
    known = KindWays(tiles_at_once=4, layout=layout)
    return BatchedTiles(vae, precision, Ways(known, known, "never"), **{"compiler": None, **more})


def apart(made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(made, wanted, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [FRAME, CLIP], ids=["frame", "clip"])
def test_moments_of_a_batch_are_those_of_single_tiles(vae: Any, shape: tuple[int, ...], layout: Layout) -> None:
    """Not bit for bit: sums have another order. A frame's are those of 2-D convolutions."""
    given = tiles(shape, 3)
    wanted = StockTiles(vae).encode(given)
    errors = {each: apart(batched(vae, each, layout).encode(given), wanted) for each in ("fp32", "split", "tf32")}
    assert errors["fp32"] < 3e-6
    assert errors["split"] < 2e-5
    assert errors["tf32"] > 3e-4


@torch.no_grad()
def test_of_a_single_frame_only_the_last_slice_of_a_kernel_meets_values(vae: Any) -> None:
    """What 2-D convolutions rest on: diffusers pads a clip with zeros in front, and repeats no frame."""
    given = tiles(FRAME, 1)
    before = StockTiles(vae).encode(given)[0].clone()
    moving = StockTiles(vae).encode(tiles(CLIP, 1))[0].clone()
    for module in vae.encoder.modules():
        if isinstance(module, torch.nn.Conv3d) and module.kernel_size[0] == 3:
            module.weight[:, :, :2] = 7.0
    assert torch.equal(StockTiles(vae).encode(given)[0], before)
    assert not torch.allclose(StockTiles(vae).encode(tiles(CLIP, 1))[0], moving)


@pytest.mark.slow
@torch.no_grad()
def test_one_graph_a_kind_serves_every_number_of_tiles(vae: Any) -> None:
    """Tiles of other sizes, which hardly ever come, are not compiled."""
    vae.enable_tiling(64, 48, 16, 16)
    runner = batched(vae, "split", compiler="eager")
    torch._dynamo.reset()
    counters.clear()
    runner.warm_up(lambda: None)
    for shape in ((1, 3, 17, 64, 48), (1, 3, 1, 64, 48), (1, 3, 1, 32, 48)):
        for count in (3, 1, 2):
            given = tiles(shape, count)
            assert apart(runner.encode(given), StockTiles(vae).encode(given)) < 2e-5
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_a_batch_is_what_the_table_says_or_what_fits(vae: Any) -> None:
    vae.enable_tiling(64, 48, 16, 16)
    values = 12 * vae.config.block_out_channels[0] * 64 * 48 * 4

    def most(clips: float) -> list[int]:
        runner = batched(vae, "split", room=lambda _: int(clips * 17 * values))
        return [runner.at_once(torch.zeros(1, 3, frames, 64, 48)) for frames in (17, 1)]

    assert [most(clips) for clips in (0, 0.2, 3, 100)] == [[1, 1], [1, 3], [2, 4], [4, 4]]


def test_the_table_knows_every_layer_of_the_released_model_and_no_other() -> None:
    with init_empty_weights():
        vae = AutoencoderKLMiniMaxH3()
    layers = [name for name, module in vae.encoder.named_modules() if isinstance(module, torch.nn.Conv3d)]
    ways = Ways.read()
    assert list(ways.clip.layers) == list(ways.picture.layers) == [*layers, "quant_conv"]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    ways = Ways(KindWays(3, "channels_last", {"conv_in": "fp32"}), KindWays(9), "here")
    ways.write(tmp_path / "ways.json")
    assert Ways.read(tmp_path / "ways.json") == ways
    assert ways.clip.way("conv_in") == "fp32"
    assert ways.clip.way("conv_out") == "split"
