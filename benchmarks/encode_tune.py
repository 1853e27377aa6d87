"""Rewrites the table of how the video encoder's layers are computed: `python -m benchmarks.encode --tune`.

Every layer is given what it meets in a real tile, and every way is timed and compared with FP64. Of the ways that are
near enough the fastest is taken; of the layouts the one whose layers together are faster; of the batches the one that
encodes a tile in the least time.

`exact_sums` is the error of the same pieces multiplied without tensor cores: what the split itself costs. What a way
is further away is the sums within tensor cores.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch

from benchmarks.device import Device, relative_error
from benchmarks.encode_visual import Scene, VisualBench
from shared_runtime.conditioning.split import SplitConvolution, convolve, pieces
from shared_runtime.conditioning.tile_model import Layer, TileModel
from shared_runtime.conditioning.tile_runner import BatchedTiles
from shared_runtime.conditioning.ways import Kind, Layout, Way, Ways

NEAR_ENOUGH = 2e-5
"""Relative error of one layer to FP64."""
CANDIDATES: tuple[Way, ...] = tuple(way for way in get_args(Way) if way != "tf32")
TILES: dict[Kind, int] = {"clip": 1, "picture": 14}
"""With which a layer is measured: what fills a GPU, for a call that is too short is all overhead."""
BATCHES: dict[Kind, tuple[int, ...]] = {"clip": (1, 2, 4, 8), "picture": (7, 14, 28, 56)}
"""Twelve clips would be more than 2^31 values in one tensor, for which kernels count otherwise."""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
REPEATS = 3


def tune(bench: VisualBench, kinds: Sequence[Kind], measured: str) -> dict[str, Any]:
    """Measure these kinds, write the table, and say what was measured."""
    ways, found = Ways.read(bench.table), {}
    for kind in kinds:
        known = ways.of(kind)
        layouts = {layout: _layers(bench, kind, layout) for layout in LAYOUTS}
        totals = {
            layout: sum(layer[layer["chosen"]]["ms"] for layer in layers.values()) for layout, layers in layouts.items()
        }
        layout = min(LAYOUTS, key=lambda each: totals[each])
        chosen: dict[str, Way] = {name: layer["chosen"] for name, layer in layouts[layout].items()}
        known = replace(known, layout=layout, layers=chosen)
        batches = _batches(bench, kind, ways.but(kind, known))
        best = min(batches, key=lambda count: batches[count])
        ways = ways.but(kind, replace(known, tiles_at_once=best))
        found[kind] = {"layouts_ms": totals, "ms_a_tile_by_batch": batches, "layers": layouts}
        print(f"{kind}: {layout}, {best} tiles at once, {totals}, {batches}", flush=True)
    replace(ways, measured=measured).write(bench.table)
    return found


def _tiles(bench: VisualBench, kind: Kind, count: int) -> list[torch.Tensor]:
    vae = bench.vae
    frames = vae.config.clip_length if kind == "clip" else 1
    scene = Scene(vae.tile_sample_min_height, vae.tile_sample_min_width, frames, count)
    return scene.pixels(bench.device.torch_device)


@torch.no_grad()
def _layers(bench: VisualBench, kind: Kind, layout: Layout) -> dict[str, dict[str, Any]]:
    """Of every layer: time and error of every way, and the one that is chosen."""
    bench.stock()
    model = TileModel(bench.vae, lambda _: "fp32", layout, flat=kind == "picture")
    found: dict[str, dict[str, Any]] = {}

    def measure(layer: Layer, pixels: torch.Tensor) -> None:
        products = layer.products
        exact = _exact(pixels, products)
        ways = {
            way: _one(bench.device, pixels, SplitConvolution(products.whole, products.stride, way, model.layout), exact)
            for way in CANDIDATES
        }
        near = [way for way in CANDIDATES if ways[way]["error"] <= NEAR_ENOUGH]
        chosen = min(near, key=lambda way: ways[way]["ms"]) if near else "fp32"
        alone = relative_error(_exact_sums(pixels, products), exact)
        found[layer.name] = {"chosen": chosen, "exact_sums": alone, **ways, "input": list(pixels.shape)}

    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        layer.products.register_forward_pre_hook(lambda _, given, layer=layer: measure(layer, given[0]))
    model(torch.cat(_tiles(bench, kind, TILES[kind] if bench.device.is_gpu else 1)))
    return found


def _one(device: Device, pixels: torch.Tensor, way: SplitConvolution, exact: torch.Tensor) -> dict[str, float]:
    # On a CPU the figures mean nothing.
    seconds = min(device.seconds(lambda: way(pixels), REPEATS if device.is_gpu else 1, warm_ups=int(device.is_gpu)))
    return {"ms": round(seconds * 1000, 3), "error": relative_error(way(pixels), exact)}


def _exact(pixels: torch.Tensor, products: SplitConvolution) -> torch.Tensor:
    made: torch.Tensor = convolve(pixels.double(), products.whole.double(), products.stride, False)
    return made


def _exact_sums(pixels: torch.Tensor, products: SplitConvolution) -> torch.Tensor:
    high, low = pieces(pixels)
    weight_high, weight_low = pieces(products.whole)
    pairs = ((low, weight_high), (high, weight_low), (high, weight_high))
    return torch.stack([convolve(one, other, products.stride, False) for one, other in pairs]).sum(0)


@torch.no_grad()
def _batches(bench: VisualBench, kind: Kind, ways: Ways) -> dict[int, float]:
    """Milliseconds a tile, by tiles at once, as far as they fit."""
    bench.stock()
    runner = BatchedTiles(bench.vae, "split", ways, compiler=bench.compiler)
    (tile,), found = _tiles(bench, kind, 1), {}
    for count in BATCHES[kind]:
        if not bench.device.is_gpu and count > 2:
            break
        bench.device.reset_peak()
        try:
            seconds = min(bench.device.seconds(lambda count=count: runner.encode([tile] * count), REPEATS))
        except torch.OutOfMemoryError:
            break
        found[count] = round(seconds / count * 1000, 3)
    if not found:
        found[1] = round(min(bench.device.seconds(lambda: runner.encode([tile]), 1)) * 1000, 3)
    return found
