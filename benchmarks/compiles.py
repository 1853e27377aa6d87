"""How often the DiT's blocks are compiled: at a start, and then for requests of twelve sizes and three lengths.

    python -m benchmarks.compiles --json benchmarks/results/compiles.json

Made-up weights at the released width, few layers: all blocks share one graph. `--tiny` proves on a CPU, where nothing
is compiled, that the benchmark runs.
"""

import argparse
import json
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.denoise import Case
from benchmarks.device import Device
from benchmarks.figures import provenance, write_json
from benchmarks.modes import Silent
from benchmarks.released import CANVAS, checkpoint
from diffusion_service.fitting import Fitter
from diffusion_service.model.attention import choose
from diffusion_service.model.dit import Dit, Moment, Rows
from diffusion_service.model.turns import Turns
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.weights import load_transformer
from shared_schema.deploy.load import load_deployment
from shared_schema.tasks import CanvasLimits, canvas_for_ratio

RATIOS = ((16, 9), (9, 16), (1, 1), (4, 3), (3, 4), (21, 9), (9, 21), (3, 2), (2, 3), (4, 1), (1, 4), (5, 4))
FRAMES = (107, 124, 362)


def cases(layers: int) -> list[Case]:
    """Every size in every length."""
    limits = CanvasLimits(CANVAS["canvas_short_edge"], CANVAS["canvas_max_pixels"])
    canvases = [canvas_for_ratio(*ratio, limits) for ratio in RATIOS]
    return [Case(each.height, each.width, frames, layers) for each, frames in product(canvases, FRAMES)]


def graphs() -> int:
    """Compiled in this process so far."""
    return int(counters["stats"]["unique_graphs"])


def served_dit(folder: Path, device: Device) -> Dit:
    """The transformer as a rank that is alone has it, compiled as it is before a service is ready."""
    stage = load_deployment("tiny", json.dumps({"1": {"load_format": "dummy"}})).diffusion
    comm = RankComm(RankSpec("compiles", 0, Mesh(), "0" if device.is_gpu else "cpu"), device.torch_device)
    transformer = load_transformer(folder, "transformer", device.torch_device, dummy=True)
    attention = choose(None, device.torch_device, torch.bfloat16)
    fitter = Fitter(stage, attention, comm, None, Turns())
    dit = fitter.fit("transformer", transformer)
    fitter.compile("transformer", dit, Silent())
    return dit


@torch.no_grad()
def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Graphs and seconds of the start, and of every request after it that compiled something."""
    device = Device.best()
    begun = time.perf_counter()
    dit = served_dit(checkpoint(folder / "model", options.layers, tiny=options.tiny), device)
    found: dict[str, Any] = {"start": {"graphs": graphs(), "s": round(time.perf_counter() - begun, 1)}}
    asked = [Case(64, 64, 107, 2)] if options.tiny else cases(options.layers)
    compiled = {}
    for case in asked:
        before = graphs()
        given = case.inputs(dit.transformer.config, device.torch_device)
        schedule = [Moment(given["timestep"], given["timestep_indices"])]
        denoising = dit.begin(given["encoder_hidden_states"], Rows.from_layout(given), schedule)
        denoising.step(0, given["hidden_states"], given["audio_hidden_states"])
        device.wait()
        if graphs() > before:
            compiled[case.name] = graphs() - before
    return {**provenance(sys.argv), **device.facts(), **found, "requests": len(asked), "compiled_later": compiled}


def main() -> None:
    """Count, print, and keep what was counted."""
    parser = argparse.ArgumentParser(description="Compilations of the DiT's blocks over many sizes.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="the tiny model: only to see that all of this runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(options, Path(scratch))
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
