"""Rows of `benchmarks.encode` about the video VAE: clips and pictures, ours beside stock diffusers on the same weights.

Errors are those of the sampled latents before the recipe rounds them to float16, against stock's FP32; `other_half` is
the share of them that round to another float16 value. `fp32_other_order` is FP32 in another order of sums: what no
choice of precision can be nearer than.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import nn

from benchmarks.device import Device, relative_error, series
from benchmarks.kernels import kernel_times
from shared_runtime.conditioning.tile_runner import BatchedTiles
from shared_runtime.conditioning.vae_tiles import TileShare
from shared_runtime.conditioning.ways import KindWays, Layout, Ways
from shared_runtime.tensor_float import tensor_float
from shared_runtime.weights import load_video_vae
from shared_schema.deploy.model import EncodePrecision

SEED = 42
"""The recipe's, of the posterior's sample."""
PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Budget:
    """How often something is measured: at most `repeats` times, and not again after `seconds`."""

    repeats: int
    seconds: float

    def measure(self, device: Device, work: Callable[[], object]) -> dict[str, Any]:
        """The first run apart, in which kernels are compiled or chosen."""
        (first,) = device.seconds(work, 1, warm_ups=0)
        taken: list[float] = []
        while len(taken) < self.repeats and first + sum(taken) < self.seconds:
            taken += device.seconds(work, 1, warm_ups=0)
        return {**series(taken or [first]), "first_s": round(first, 3), "first_counts": not taken}


@dataclass(frozen=True)
class Scene:
    """What is encoded: pictures `(1, 3, 1, height, width)`, or clips of more frames; the same for everybody."""

    height: int
    width: int
    frames: int = 1
    count: int = 1

    def pixels(self, device: torch.device) -> list[torch.Tensor]:
        """Smooth shapes with a little noise, normalised: noise alone would be unlike any picture."""
        random = torch.Generator().manual_seed(self.height + self.frames)
        made = []
        for _ in range(self.count):
            coarse = torch.rand(1, 3, self.frames, self.height // 32, self.width // 32, generator=random)
            smooth = nn.functional.interpolate(coarse, size=(self.frames, self.height, self.width), mode="trilinear")
            noisy = smooth + 0.02 * torch.randn(smooth.shape, generator=random)
            levels = (noisy.clamp(0, 1) * 255).to(torch.uint8).to(device)
            mean, std = (torch.tensor(each, device=device).view(1, -1, 1, 1, 1) for each in (PIXEL_MEAN, PIXEL_STD))
            made.append((levels.float().div(255.0) - mean) / std)
        return made


class VisualBench:
    """All of this over one VAE; every `VisualRow` begins with the modules as they were loaded."""

    def __init__(
        self, device: Device, folder: Path, table: Path, *, compiler: str | None, tile: int | None = None
    ) -> None:
        """`tile`: pixels of a side, where that is not the released 256."""
        self.device = device
        self.table = table
        self.compiler = compiler
        self.vae = load_video_vae(folder, "encoder", device.torch_device, dummy=True)
        if tile is not None:
            self.vae.enable_tiling(tile, tile, tile // 4, tile // 4)
        self._stock = self.vae.encoder, self.vae.quant_conv

    def stock(self) -> None:
        """Put diffusers' own modules back."""
        # Every row compiles models anew; what is left of the ones before counts towards the compiler's limit.
        torch._dynamo.reset()
        self.vae.encoder, self.vae.quant_conv = self._stock

    def ours(self, precision: EncodePrecision) -> TileShare:
        """Put batches of tiles in their place."""
        self.stock()
        runner = BatchedTiles(self.vae, precision, Ways.read(self.table), compiler=self.compiler)
        return TileShare.instead(self.vae, runner)


@torch.no_grad()
def latents_of(vae: Any, pixels: torch.Tensor, share: TileShare | None) -> torch.Tensor:
    """As the recipe samples them, on the host and not rounded; tiles one by one without a `share`."""
    if share is not None:
        with share.dealing(lambda: None):
            vae.encode(pixels, return_dict=False)
        moments = [share.encoded[number] for number in range(len(share.dealt))]
    with nullcontext() if share is None else share.replaying(moments):
        posterior: DiagonalGaussianDistribution = vae.encode(pixels, return_dict=False)[0]
    return posterior.sample(generator=torch.Generator().manual_seed(SEED)).float().cpu()


def apart(made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> dict[str, float]:
    """Relative error, the largest one in standard deviations, and the share that another float16 value is."""
    one, other = (torch.cat([each.flatten() for each in latents]) for latents in (made, wanted))
    return {
        "error": relative_error(one, other),
        "largest": float((one - other).abs().max() / other.std()),
        "other_half": float((one.half() != other.half()).double().mean()),
    }


@dataclass(frozen=True)
class VisualRow:
    """One row: stock encodes the first `stock_frames` of a clip, for all clips of 17 frames cost the same."""

    name: str
    scene: Scene
    ours: tuple[EncodePrecision, ...]
    stock_frames: int

    def run(self, bench: VisualBench, budget: Budget, *, profiled: bool) -> dict[str, Any]:
        """Stock in FP32 and TF32, then ours in every precision."""
        device, vae = bench.device, bench.vae
        pixels = self.scene.pixels(device.torch_device)
        part = [each[:, :, : self.stock_frames] for each in pixels]
        scale = _clips(vae, self.scene.frames) / _clips(vae, self.stock_frames)
        figures: dict[str, Any] = {"pixels": str(self.scene), "stock_frames": self.stock_frames}
        latents: dict[str, list[torch.Tensor]] = {}

        def measured(name: str, given: list[torch.Tensor], share: TileShare | None, in_tf32: bool) -> dict[str, Any]:
            device.reset_peak()

            def work() -> None:
                latents[name] = [latents_of(vae, each, share) for each in given]

            with tensor_float(in_tf32):
                found = {**budget.measure(device, work), **device.memory()}
                if len(given) and given[0].shape != part[0].shape:
                    latents[name] = [latents_of(vae, each, share) for each in part]
            return found

        bench.stock()
        for name, in_tf32 in (("stock_fp32", False), ("stock_tf32", True)):
            figures[name] = measured(name, part, None, in_tf32)
            figures[name]["all_clips_s"] = round(figures[name]["s"] * scale, 4)
        for precision in self.ours:
            share = bench.ours(precision)
            figures[precision] = measured(precision, pixels, share, False)
            figures[precision]["of_stock"] = round(figures[precision]["s"] / figures["stock_fp32"]["all_clips_s"], 4)
            if profiled:
                figures[precision]["kernels"] = kernel_times(lambda share=share: latents_of(vae, part[0], share))
        figures["fp32_other_order"] = self._other_order(bench, part, latents)
        for name in ("stock_tf32", *self.ours, "fp32_other_order"):
            figures[name] |= apart(latents[name], latents["stock_fp32"])
        return figures

    @staticmethod
    def _other_order(
        bench: VisualBench, part: list[torch.Tensor], latents: dict[str, list[torch.Tensor]]
    ) -> dict[str, Any]:
        """Our FP32 in the other layout, without a compiler."""
        known = Ways.read(bench.table)
        ways = Ways(_turned(known.clip), _turned(known.picture), known.measured)
        bench.stock()
        share = TileShare.instead(bench.vae, BatchedTiles(bench.vae, "fp32", ways, compiler=None))
        latents["fp32_other_order"] = [latents_of(bench.vae, each, share) for each in part]
        return {"layout": ways.clip.layout if part[0].shape[2] > 1 else ways.picture.layout}


def _turned(known: KindWays) -> KindWays:
    """The same in the other layout."""
    other: Layout = "channels_last" if known.layout == "contiguous" else "contiguous"
    return replace(known, layout=other)


def _clips(vae: Any, frames: int) -> int:
    return 1 if frames == 1 else -(-frames // int(vae.config.clip_length))


def visual_rows(*, tiny: bool) -> list[VisualRow]:
    """The issue's rows, or small ones that only prove that all of this runs."""
    if tiny:
        return [
            VisualRow("video", Scene(64, 112, 22), ("split",), 17),
            VisualRow("image", Scene(128, 128), ("split", "fp32"), 1),
            VisualRow("keyframes", Scene(64, 112, count=2), ("split", "fp32"), 1),
        ]
    return [
        VisualRow("video", Scene(768, 1344, 124), ("split",), 17),
        VisualRow("image", Scene(2048, 2048), ("split", "fp32"), 1),
        VisualRow("keyframes", Scene(768, 1344, count=2), ("split", "fp32"), 1),
    ]
