"""The encoder as this project makes it, beside stock diffusers on the same weights in the same process.

    python -m benchmarks.encode --json benchmarks/results/encode.json
    python -m benchmarks.encode --rows video,keyframes --budget-s 120 --profile
    python -m benchmarks.encode --tune --rows ""    writes how each layer is computed; with rows, measures with it
    python -m benchmarks.encode --tiny              only to see that all of this runs, on a CPU

Weights are made up at the released sizes. Stock is FP32 without TensorFloat-32, tile by tile, as diffusers has it. Of
a video it encodes the first 17 frames: all clips cost the same, and its time for all of them is scaled from those.
"""

import argparse
import gc
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.device import Device
from benchmarks.encode_text import text_row
from benchmarks.encode_tune import tune
from benchmarks.encode_visual import Budget, VisualBench, visual_rows
from benchmarks.encode_whole import WholeBench
from benchmarks.figures import provenance, write_json
from benchmarks.released import write_released
from shared_runtime.conditioning.ways import TABLE, Kind, Ways
from shared_runtime.tiny import tiny_checkpoint

TINY_TILE = 64
TARGETS = {
    "video": {"split": (0.43, 0.33)},
    "image": {"split": (0.28, 0.18), "fp32": (0.45, 0.40)},
    "keyframes": {"split": (0.28, 0.18), "fp32": (0.45, 0.40)},
    "text": {"ours": (0.75, 0.65)},
    "whole": {"ours": (0.50, 0.35)},
}
"""Of stock's time: at most, and the aim."""


class Bench:
    """All rows that are asked for; what one holds on the GPU is gone before the next one begins."""

    def __init__(self, device: Device, folder: Path, scratch: Path, arguments: argparse.Namespace) -> None:
        self._device, self._folder, self._scratch = device, folder, scratch
        self._arguments = arguments
        self._budget = Budget(arguments.repeats, arguments.budget_s)
        self.figures: dict[str, Any] = {}

    def run(self) -> None:
        """In the order of the table."""
        if self._arguments.tune:
            if not self._arguments.table.exists():
                Ways.read().write(self._arguments.table)
            self._tune()
        self.figures["ways"] = Ways.read(self._arguments.table).measured
        for name in self._arguments.rows:
            torch._dynamo.reset()
            found = self._work(name)()
            for how, (most, aim) in TARGETS[name].items():
                if how in found:
                    found[how] |= {"at_most": most, "aim": aim}
            self.figures[name] = found
            print(f"{name}: {json.dumps(found, indent=1)}", flush=True)
            gc.collect()
            if self._arguments.json is not None:
                # What was measured is kept, whatever becomes of the rows after it.
                write_json(self._arguments.json, {**provenance(sys.argv), **self.figures})

    def _work(self, name: str) -> Callable[[], dict[str, Any]]:
        match name:
            case "text":
                return self._text
            case "whole":
                return self._whole
            case _:
                return lambda: self._visual(name)

    def _visual_bench(self) -> VisualBench:
        compiler = "inductor" if self._device.is_gpu and not self._arguments.eager else None
        tile = TINY_TILE if self._arguments.tiny else None
        return VisualBench(self._device, self._folder, self._arguments.table, compiler=compiler, tile=tile)

    def _tune(self) -> None:
        facts = self._device.facts()
        measured = f"{facts['device']}, torch {facts['torch']}, {provenance(sys.argv)['date']}"
        self.figures["tune"] = tune(self._visual_bench(), self._arguments.tune, measured)

    def _visual(self, name: str) -> dict[str, Any]:
        row = next(row for row in visual_rows(tiny=self._arguments.tiny) if row.name == name)
        return row.run(self._visual_bench(), self._budget, profiled=self._arguments.profile)

    def _text(self) -> dict[str, Any]:
        tokens = min(self._arguments.tokens, 256) if self._arguments.tiny else self._arguments.tokens
        return text_row(self._device, self._folder, tokens, self._budget, profiled=self._arguments.profile)

    def _whole(self) -> dict[str, Any]:
        bench = WholeBench(self._device, self._folder, self._scratch, tiny=self._arguments.tiny)
        return bench.run(self._budget)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.encode", description="The encoder, beside stock diffusers.")
    parser.add_argument(
        "--rows",
        type=_names,
        default=list(TARGETS),
        metavar="NAME,NAME",
    )
    parser.add_argument("--repeats", type=int, default=3, help="at most, after a first run that does not count")
    parser.add_argument("--budget-s", type=float, default=90.0, help="after which one figure is not measured again")
    parser.add_argument("--tokens", type=int, default=16_384)
    kinds = list(get_args(Kind))
    help_text = f"rewrite the table first, or what it says about some of {', '.join(kinds)}"
    parser.add_argument("--tune", type=_names, nargs="?", const=kinds, default=[], metavar="KIND", help=help_text)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--profile", action="store_true", help="time of every kernel")
    parser.add_argument("--eager", action="store_true", help="ours without a compiler")
    parser.add_argument("--tiny", action="store_true", help="the tiny model: only to see that all of this runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    for option, given_names, known in (("--rows", arguments.rows, list(TARGETS)), ("--tune", arguments.tune, kinds)):
        if unknown := set(given_names) - set(known):
            parser.error(f"{option}: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return arguments


def main(given: list[str] | None = None) -> None:
    """Measure, print, and keep what was measured."""
    arguments = arguments_of(given)
    logging.basicConfig(level=logging.INFO)
    device = Device.best()
    with tempfile.TemporaryDirectory(prefix="h3-encode-", dir="/dev/shm" if device.is_gpu else None) as name:
        scratch = Path(name)
        folder = tiny_checkpoint() if arguments.tiny else scratch / "model"
        if not arguments.tiny:
            write_released(folder)
        bench = Bench(device, folder, scratch, arguments)
        bench.run()
    figures = {**provenance(sys.argv), **device.facts(), **bench.figures}
    if arguments.json is not None:
        write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
