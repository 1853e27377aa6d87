"""The ways to save memory that `benchmarks.memory` and `benchmarks.room` compare, each in a process of its own."""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import provenance, write_json
from benchmarks.released import checkpoint
from diffusion_service.commands import DiffusionRankSettings
from shared_runtime.ranks.worker import Beater
from shared_schema.deploy.load import load_deployment
from shared_schema.tasks import Task

FP8: dict[str, Any] = {"diffusion_quantization_config": {"transformer": {"method": "fp8"}}}
MODES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": FP8,
    "bf16, layerwise": {"enable_layerwise_offload": True},
    "fp8, layerwise": {**FP8, "enable_layerwise_offload": True},
    "bf16, module": {"enable_cpu_offload": True},
    "fp8, module": {**FP8, "enable_cpu_offload": True},
}
"""Keys of stage 1."""
COMBINED = "bf16, combined"
"""Both transformers on the GPU: another amount of memory than `bf16`, and the same time."""


class Silent(Beater):
    """Nobody waits for a beat."""

    def __init__(self) -> None:
        pass

    def beat(self) -> None:
        """Not told."""


def rank_settings(arguments: argparse.Namespace, mode: str, folder: Path, slab: Path) -> DiffusionRankSettings:
    """Of the one rank that runs a mode over made-up weights."""
    stage = {"load_format": "dummy", "enforce_eager": arguments.eager, **MODES.get(mode, {})}
    if arguments.device == "cuda":
        stage["devices"] = "0"
    deployment = load_deployment("tiny", json.dumps({"1": stage}))
    tasks = frozenset(Task) if mode == COMBINED else frozenset({Task.T2VA})
    return DiffusionRankSettings(folder, deployment.diffusion, tasks, slab.parent, slab, "info", "text")


def parser_of(description: str, also: Sequence[str] = ()) -> argparse.ArgumentParser:
    """What every benchmark of modes may be asked; `also` are ways to compare with that are not this project's."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", default="768x1344", help="height x width")
    parser.add_argument("--frames", type=int, default=124)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--mode", action="append", choices=[*also, *MODES], help="some of the modes")
    parser.add_argument("--eager", action="store_true", help="without a compiler")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="the tiny model: only to see that all of this runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    return parser


def run(
    parser: argparse.ArgumentParser,
    one: Callable[[argparse.Namespace, str, Path, Path], None],
    table: Callable[[dict[str, Any]], str],
    *,
    before: Sequence[str] = (),
    finish: Callable[[str, Path, dict[str, Any]], None] = lambda *_: None,
) -> None:
    """Have `one` measure every mode, those of `before` first, in a child each; print, and keep what was measured.

    `one(arguments, mode, checkpoint, out)` writes `figures.json` into the folder `out`; `finish(mode, out, modes)` may
    add to them what comes from comparing. What a mode ends with is kept before the next one begins.
    """
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    if arguments.one is not None:
        mode, folder, out = arguments.one
        one(arguments, mode, Path(folder), Path(out))
        return
    figures: dict[str, Any] = {**provenance(sys.argv), "torch": torch.__version__, "modes": {}}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = checkpoint(scratch / "released", arguments.layers, tiny=arguments.tiny)
        for mode in [*before, *(arguments.mode or MODES)]:
            out = scratch / mode.replace(", ", "_")
            out.mkdir()
            program = [sys.executable, "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
            done = subprocess.run([*program, "--one", mode, str(model), str(out)], check=False)
            found = out / "figures.json"
            figures["modes"][mode] = json.loads(found.read_text()) if found.exists() else {"failed": done.returncode}
            if found.exists():
                finish(mode, out, figures["modes"])
            print(f"{mode}: {json.dumps(figures['modes'][mode])}", flush=True)
            if arguments.json is not None:
                write_json(arguments.json, figures)
    print(table(figures["modes"]))
