"""One DiT forward as this project makes it, beside stock diffusers on the same weights in the same process.

    python -m benchmarks.denoise --case 768x1344x124:50 --case 768x1344x362:10 --json benchmarks/results/denoise.json

A case is height x width x frames : layers. Weights are made up at the released sizes. `--tiny` proves on a CPU that
the benchmark runs. Errors: ours against stock's BF16, and both against FP32 on the same inputs, where `--exact` names
a case small enough for FP32.
"""

import argparse
import copy
import gc
import json
import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import Device, relative_error, series
from benchmarks.figures import provenance, write_json
from benchmarks.kernels import kernel_times
from benchmarks.released import checkpoint
from diffusion_service.model.adaln import Modulation
from diffusion_service.model.attention import (
    attend_with,
    choose,
    join_qkv,
    norm_and_rotate,
    norm_and_rotate_in_one_pass,
    use_attention,
)
from diffusion_service.model.compile import compile_blocks
from diffusion_service.model.dit import Denoising, Dit, Moment, Rows
from shared_runtime.weights import load_transformer
from shared_schema.tasks import FPS

TEXT_ROWS = 300
MATMUL_LIMIT = 775e12
"""FLOP/s of a BF16 product at the DiT's shape, measured on an H200."""
Outputs = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A size of clip, and how many of the DiT's layers make it."""

    height: int
    width: int
    frames: int
    layers: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """`768x1344x124:50`."""
        size, _, layers = text.partition(":")
        height, width, frames = map(int, size.split("x"))
        return cls(height, width, frames, int(layers))

    @property
    def name(self) -> str:
        """As it is written."""
        return f"{self.height}x{self.width}x{self.frames}:{self.layers}"

    @property
    def video_rows(self) -> int:
        """Patches of 32 x 32 pixels."""
        return ((self.frames - 5) // 17 * 5 + 2) * (self.height // 32) * (self.width // 32)

    @property
    def audio_rows(self) -> int:
        """Latents of both channels."""
        return 2 * round(self.frames / FPS * 40)

    @property
    def rows(self) -> int:
        """Of the packed sequence."""
        return TEXT_ROWS + self.video_rows + self.audio_rows

    def flop(self, config: Any) -> float:
        """Of the blocks of one forward."""
        inner = config.num_attention_heads * config.attention_head_dim
        linear = 4 * config.hidden_size * inner + 3 * config.hidden_size * config.ffn_dim
        return float(self.layers * (2 * self.rows * linear + 4 * self.rows**2 * inner))

    def inputs(self, config: Any, device: torch.device) -> dict[str, torch.Tensor]:
        """Arguments of diffusers' forward for a t2va step in the middle of a schedule."""
        random = torch.Generator(device).manual_seed(self.rows)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random, device=device)

        text, audio = TEXT_ROWS, self.audio_rows
        index = torch.arange(self.rows, device=device)
        is_audio = (index >= text) & (index < text + audio)
        place = torch.stack([index // 1008, index // 42 % 24, index % 42], dim=-1).double()
        return {
            "hidden_states": noise(1, self.video_rows, 4 * config.in_channels),
            "audio_hidden_states": noise(1, audio, config.audio_in_channels),
            "encoder_hidden_states": noise(1, text, config.text_dim).bfloat16(),
            "timestep": torch.tensor([0.6, 0.8], device=device),
            "timestep_indices": is_audio.long(),
            "token_tags": torch.where(index < text, 1, torch.where(is_audio, 2, 0)),
            "position_ids": place,
            "video_indices": index[text + audio :],
            "audio_indices": index[text : text + audio],
            "text_indices": index[:text],
        }


class Bench:
    """All cases of one number of layers, over one set of weights: stock first, then ours in its place."""

    def __init__(self, device: Device, folder: Path, cases: list[Case], repeats: int) -> None:
        self._device = device
        self._cases = cases
        self._repeats = repeats
        self._model: Any = load_transformer(folder, "transformer", device.torch_device, dummy=True)
        self.figures: dict[str, dict[str, Any]] = {case.name: {"rows": case.rows} for case in cases}
        self._outputs: dict[str, dict[str, Outputs]] = {case.name: {} for case in cases}

    def run(self, exact: frozenset[str], profiled: frozenset[str], *, eager: bool) -> None:
        """Stock, FP32 where it is asked for, ours `eager` too, ours compiled, its kernels where they are asked for."""
        config = self._model.config
        inputs = {case.name: case.inputs(config, self._device.torch_device) for case in self._cases}
        for name, given in inputs.items():
            self._measure(name, "stock", lambda given=given: self._stock(self._model, given))
            if name in exact:
                self._outputs[name]["fp32"] = self._fp32(given)
        dit = self._ours()
        for name, given in inputs.items() if eager else ():
            self._measure(name, "eager", self._step(dit, given))
        compile_blocks(dit.transformer.transformer_blocks)
        for name, given in inputs.items():
            step = self._step(dit, given)
            self._measure(name, "compiled", step)
            if name in profiled:
                self.figures[name]["kernels"] = kernel_times(step)
        for case in self._cases:
            self._conclude(case, config)

    @torch.no_grad()
    def _stock(self, model: Any, given: dict[str, torch.Tensor]) -> Outputs:
        made: Outputs = model(**given, return_dict=False)
        return made

    def _fp32(self, given: dict[str, torch.Tensor]) -> Outputs:
        model = copy.deepcopy(self._model).float()
        video, audio = self._stock(model, given)
        return video.cpu(), audio.cpu()

    def _ours(self) -> Dit:
        first = next(self._model.transformer_blocks.parameters())
        backend = choose(None, first.device, first.dtype)
        before = self._device.memory()
        attend = attend_with(backend)
        use_attention(self._model, attend)
        seconds = self._device.seconds(self._take_modulation, 1, warm_ups=0)
        join_qkv(self._model, attend, norm_and_rotate_in_one_pass() if self._device.is_gpu else norm_and_rotate)
        for figures in self.figures.values():
            figures |= {"attention": backend, "memory_before": before, "adaln_to_host_s": round(seconds[0], 2)}
        return Dit(self._model, self._modulation)

    def _take_modulation(self) -> None:
        self._modulation = Modulation(self._model, on_host=self._device.is_gpu)

    def _step(self, dit: Dit, given: dict[str, torch.Tensor]) -> Any:
        rows = Rows.from_layout(given)
        schedule = [Moment(given["timestep"], given["timestep_indices"])] * 4
        prepared: list[Denoising] = []

        def begin() -> None:
            prepared[:] = [dit.begin(given["encoder_hidden_states"], rows, schedule)]

        first, later = self._device.first_and_then(begin, 1)
        print(f"begin: {first:.4f} s, with the same schedule {later[0]:.4f} s", flush=True)
        return lambda: prepared[0].step(0, given["hidden_states"], given["audio_hidden_states"])

    def _measure(self, name: str, how: str, work: Any) -> None:
        made: list[Outputs] = []
        self._device.reset_peak()
        first, later = self._device.first_and_then(lambda: made.__setitem__(slice(None), [work()]), self._repeats)
        self.figures[name][how] = {**series(later), "first_s": round(first, 2), **self._device.memory()}
        ((video, audio),) = made
        self._outputs[name][how] = video.cpu(), audio.cpu()
        print(f"{name} {how}: {self.figures[name][how]}", flush=True)

    def _conclude(self, case: Case, config: Any) -> None:
        figures, outputs = self.figures[case.name], self._outputs[case.name]
        measured = [how for how in ("stock", "eager", "compiled") if how in figures]
        for how in measured[1:]:
            figures[f"{how}_of_stock"] = round(figures[how]["s"] / figures["stock"]["s"], 4)
        for how in measured:
            figures[how]["of_limit"] = round(case.flop(config) / MATMUL_LIMIT / figures[how]["s"], 4)
            for other in ("stock", "fp32"):
                if other in outputs and other != how:
                    figures[how][f"error_to_{other}"] = [
                        relative_error(made, wanted) for made, wanted in zip(outputs[how], outputs[other], strict=True)
                    ]


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases, fewest layers first."""
    device = Device.best()
    cases = [Case.parse(text) for text in [*arguments.case, *arguments.exact]]
    figures: dict[str, Any] = {}
    for layers in sorted({case.layers for case in cases}):
        with tempfile.TemporaryDirectory() as scratch:
            folder = checkpoint(Path(scratch), layers, tiny=arguments.tiny)
            ours = [case for case in dict.fromkeys(cases) if case.layers == layers]
            run = Bench(device, folder, ours, arguments.repeats)
            run.run(frozenset(arguments.exact), frozenset(arguments.profile), eager=arguments.eager)
        figures |= run.figures
        del run
        gc.collect()
    return {**provenance(sys.argv), **device.facts(), "cases": figures}


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description="A DiT forward, ours beside stock diffusers.")
    parser.add_argument("--case", action="append", default=[], metavar="HxWxF:L")
    parser.add_argument("--exact", action="append", default=[], metavar="HxWxF:L", help="also compared with FP32")
    parser.add_argument("--profile", action="append", default=[], metavar="HxWxF:L", help="time of every kernel")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="ours without a compiler too")
    parser.add_argument("--tiny", action="store_true", help="the tiny model: only to see that all of this runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    figures = bench(arguments)
    for name, case in figures["cases"].items():
        print(f"{name}: compiled / stock {case['compiled_of_stock']}, of the limit {case['compiled']['of_limit']}")
    print(json.dumps(figures, indent=1))
    if arguments.json is not None:
        write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
