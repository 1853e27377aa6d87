"""The video VAE's decode as this project makes it, beside stock diffusers on the same weights in the same process.

    python -m benchmarks.decode --size 768x1344 --frames 124 --stock-clips 1 --json benchmarks/results/decode.json

Stock decodes the first `--stock-clips` temporal clips in FP32 and in TF32, tile by tile; all clips cost the same, and
its time for all of them is scaled from those. Ours decodes all of them until every frame is on the host as uint8. Both
are medians of `--repeats` runs after one that does not count.
Errors are those of the decoded values against stock's FP32. `--tiny` proves on a CPU that the benchmark runs.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import Device, relative_error, series
from benchmarks.figures import provenance, write_json
from benchmarks.kernels import kernel_times
from benchmarks.released import checkpoint
from diffusion_service.model.compile import compile_blocks
from diffusion_service.model.precision import computing
from diffusion_service.sampling.decode import Chunks, SingleDecoder
from shared_runtime.weights import load_video_vae
from shared_schema.deploy.model import Precision

PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STOCK: tuple[Precision, ...] = ("fp32", "tf32")


class Bench:
    """One clip, decoded again and again."""

    def __init__(self, device: Device, folder: Path, arguments: argparse.Namespace) -> None:
        self._device = device
        self._vae = load_video_vae(folder, "decoder", device.torch_device, dummy=True)
        self._repeats: int = arguments.repeats
        self._frames: int = arguments.frames
        self._precisions: list[Precision] = [*arguments.also, "fp16"]
        self._stock_clips: int = arguments.stock_clips
        height, width = map(int, arguments.size.split("x"))
        latent_frames = (self._frames - 5) // 17 * 5 + 2
        random = torch.Generator(device.torch_device).manual_seed(0)
        shape = (1, 24, latent_frames, height // 16, width // 16)
        self._latents = torch.randn(shape, generator=random, device=device.torch_device)
        self._stock_parts: list[torch.Tensor] = []
        self.figures: dict[str, Any] = {"size": arguments.size, "frames": self._frames}

    def run(self) -> None:
        """Stock, then ours eager, then compiled."""
        chunks = self._chunks("fp32")
        clips = chunks.split(self._latents)
        self.figures |= {"clips": len(clips), "stock_clips": self._stock_clips}
        for precision in STOCK:
            self._stock(precision, clips)
        for precision in self._precisions:
            self._ours(precision, self._chunks(precision), clips)
        compile_blocks(self._vae.decoder.transformer_blocks)
        compiled = self._chunks("fp16")
        self._ours("fp16_compiled", compiled, clips)
        self.figures["kernels"] = kernel_times(lambda: compiled.decode_clip(clips[0], _nothing))
        for precision in STOCK:
            stock = self.figures[f"stock_{precision}"]["all_clips_s"]
            self.figures[f"of_stock_{precision}"] = round(self.figures["fp16_compiled"]["s"] / stock, 4)

    def _chunks(self, precision: Precision) -> Chunks:
        return Chunks(self._vae, PIXEL_MEAN, PIXEL_STD, precision)

    @torch.no_grad()
    def _stock(self, precision: Precision, clips: list[torch.Tensor]) -> None:
        made: list[torch.Tensor] = []

        def decode() -> None:
            with computing(precision, self._device.torch_device):
                made[:] = [self._vae._decode_clip(clip) for clip in clips[: self._stock_clips]]

        self._device.reset_peak()
        first, later = self._device.first_and_then(decode, self._repeats)
        figures = {**series(later), "first_s": round(first, 2)}
        figures |= {"all_clips_s": round(figures["s"] * len(clips) / self._stock_clips, 3), **self._device.memory()}
        if precision == "fp32":
            self._stock_parts = made[:]
        else:
            figures["error_to_fp32"] = self._error(made)
        self._keep(f"stock_{precision}", figures)

    @torch.no_grad()
    def _ours(self, name: str, chunks: Chunks, clips: list[torch.Tensor]) -> None:
        decoder = SingleDecoder(chunks)

        def decode() -> None:
            for _ in decoder.decode(self._latents, self._frames, _nothing):
                pass

        self._device.reset_peak()
        first, later = self._device.first_and_then(decode, self._repeats)
        made = [chunks.decode_clip(clip, _nothing) for clip in clips[: self._stock_clips]]
        error = self._error(made)
        self._keep(name, {**series(later), "first_s": round(first, 2), "error_to_fp32": error, **self._device.memory()})

    def _error(self, made: list[torch.Tensor]) -> float:
        return max(relative_error(one, other) for one, other in zip(made, self._stock_parts, strict=True))

    def _keep(self, name: str, figures: dict[str, Any]) -> None:
        self.figures[name] = figures
        print(f"{name}: {figures}", flush=True)


def _nothing() -> None:
    pass


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description="The video VAE's decode, ours beside stock diffusers.")
    parser.add_argument("--size", default="768x1344")
    parser.add_argument("--frames", type=int, default=124)
    parser.add_argument("--stock-clips", type=int, default=1)
    parser.add_argument("--also", action="append", default=[], choices=STOCK, help="ours in this precision too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="the tiny model: only to see that all of this runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = Device.best()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(device, checkpoint(Path(scratch), tiny=arguments.tiny), arguments)
    bench.run()
    figures = {**provenance(sys.argv), **device.facts(), **bench.figures}
    print(json.dumps(figures, indent=1))
    if arguments.json is not None:
        write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
