"""What `quality: high` does to a clip beside the lossless one: seconds, skipped forwards, and how far it is off.

    python -m benchmarks.quality --size 768x1344 --frames 124 --json benchmarks/results/quality.json
    python -m benchmarks.quality --tiny --device cpu --size 64x64 --frames 107 --points 50 --points 121

One rank denoises the same noise under both, loaded and fitted as a diffusion rank does it, and decodes both clips.
Made-up weights say how long it takes and not how it looks: how many forwards are skipped, and how far the clips are
apart, is what those weights make of it. `--threshold 1` skips whatever the profile's other two rules allow, which is
the most that it can save. Peak signal-to-noise ratios are of uint8 frames, and of waveforms over their largest value.
"""

import argparse
import json
import logging
import math
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from benchmarks.device import Device, relative_error
from benchmarks.figures import provenance, write_json
from benchmarks.modes import Silent
from benchmarks.released import write_released
from benchmarks.room import text_job
from diffusion_service.commands import DiffusionRankSettings, Generate
from diffusion_service.fitting import Fitter, load
from diffusion_service.model.attention import choose
from diffusion_service.model.turns import Turns
from diffusion_service.sampling.decode import Chunks, SingleDecoder, decode_sound
from diffusion_service.sampling.denoise import Denoised, Denoiser
from diffusion_service.sampling.prepare import blocks_of, prepare
from shared_runtime.conditioning.blocks import assemble
from shared_runtime.conditioning.packing import Conditions, unpack
from shared_runtime.device_memory import locker_for
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.transport.shm import SlabReader
from shared_runtime.transport.slab import Slab
from shared_schema.deploy.load import load_deployment
from shared_schema.encoder_output import EncoderOutput
from shared_schema.layout import Layout
from shared_schema.quality import PROFILES, StepCache
from shared_schema.tasks import Task

HIGH = PROFILES["high"]
DEFAULT_POINTS = 50
WARM_POINTS = 3


@dataclass(frozen=True)
class Clip:
    """What one way to denoise made."""

    seconds: float
    """Of all forwards."""
    memory: dict[str, float]
    latents: Denoised
    frames: torch.Tensor
    """`(frames, height, width, 3)` uint8, on the host."""
    sound: torch.Tensor
    """`(2, samples)` float32."""


class Bench:
    """One rank in this process."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, scratch: Path) -> None:
        self._device = Device(torch.device(arguments.device))
        device = self._device.torch_device
        comm = RankComm(RankSpec("quality", 0, Mesh(), "0" if self._device.is_gpu else "cpu"), device)
        weights = "safetensors" if arguments.tiny else "dummy"
        stage = {"load_format": weights, "enforce_eager": arguments.eager, "devices": comm.spec.device}
        settings = DiffusionRankSettings(
            folder,
            load_deployment("tiny", json.dumps({"1": stage})).diffusion,
            frozenset({Task.T2VA}),
            scratch,
            scratch,
            "info",
            "text",
        )
        components = load(settings, comm, Silent())
        transformer = components["transformer"]
        dtype = next(transformer.transformer_blocks.parameters()).dtype
        fitter = Fitter(settings.stage, choose(None, device, dtype), comm, locker_for(device), Turns())
        dit = fitter.fit("transformer", transformer)
        fitter.compile("transformer", dit, Silent())
        self._denoiser, self._steps = Denoiser(Task.T2VA, dit), blocks_of(Task.T2VA)
        blocks = {f"{number}": step for number, step in enumerate((*self._steps, *self._denoiser.blocks))}
        parts = {name: components[name] for name in ("transformer", "scheduler", "audio_scheduler")}
        self._pipeline = assemble(folder, blocks, parts, device)
        self._audio_vae = components["audio_vae"]
        pixels = self._pipeline.pixel_mean, self._pipeline.pixel_std
        self._video = SingleDecoder(Chunks(components["vae"], *pixels, settings.stage.decode_precision))

    def make(self, command: Generate, conditions: Conditions, profile: StepCache | None) -> Clip:
        """The clip of a command; a short run first, so that nothing is measured that only a first run does."""
        short = replace(command, num_inference_steps=min(WARM_POINTS, command.num_inference_steps))
        for each in (short, command):
            state = prepare(self._pipeline, self._steps, each, command.outputs[0].seed, conditions, (), ())
            self._device.reset_peak()
            self._device.wait()
            begun = time.perf_counter()
            made = self._denoiser.run(self._pipeline, state, lambda _done, _of, _skipped: None, profile)
            self._device.wait()
            seconds, memory = time.perf_counter() - begun, self._device.memory()
        pieces = self._video.decode(made.video, command.num_frames, lambda: None)
        frames = torch.cat([piece.cpu() for piece in pieces if piece is not None])
        return Clip(seconds, memory, made, frames, decode_sound(self._audio_vae, made.audio).cpu())


def compared(lossless: Clip, high: Clip, forwards: int) -> dict[str, Any]:
    """The two side by side."""
    off: dict[str, Any] = {}
    for name in ("video", "audio"):
        made, wanted = (getattr(each.latents, name).double().flatten() for each in (high, lossless))
        off[f"{name}_latents_cosine"] = float(cosine_similarity(made, wanted, dim=0))
        off[f"{name}_latents_error"] = relative_error(made, wanted)
    loudest = float(lossless.sound.abs().max())
    return {
        "forwards": forwards,
        "skipped_forwards": high.latents.skipped,
        "lossless": {"denoise_s": round(lossless.seconds, 4), **lossless.memory},
        "high": {"denoise_s": round(high.seconds, 4), **high.memory},
        "high_of_lossless": round(high.seconds / lossless.seconds, 4),
        **off,
        "frames_psnr_db": _psnr(high.frames, lossless.frames, 255.0),
        "sound_psnr_db": _psnr(high.sound, lossless.sound, loudest),
    }


def _psnr(made: torch.Tensor, wanted: torch.Tensor, peak: float) -> float | None:
    """None where nothing differs."""
    square = float((made.double() - wanted.double()).square().mean())
    return None if square == 0 else round(10 * math.log10(peak**2 / square), 2)


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every number of sigma points, under both."""
    assert HIGH is not None
    threshold = HIGH.threshold if arguments.threshold is None else arguments.threshold
    profile = HIGH.model_copy(update={"threshold": threshold})
    figures: dict[str, Any] = {**provenance(sys.argv), "profile": profile.model_dump(), "points": {}}
    height, width = map(int, arguments.size.split("x"))
    layout = Layout(Task.T2VA, height, width, arguments.frames)
    with tempfile.TemporaryDirectory() as name:
        scratch, folder = Path(name), tiny_checkpoint() if arguments.tiny else Path(name) / "released"
        if not arguments.tiny:
            write_released(folder, arguments.layers)
        slab = Slab.create(scratch, 64 * 2**20, "quality")
        run = Bench(arguments, folder, scratch)
        figures |= run._device.facts()
        for points in arguments.points or [DEFAULT_POINTS]:
            command = text_job(layout, folder, scratch, slab, points)
            payload = EncoderOutput(manifest=command.manifest, data=SlabReader(scratch).view(command.landing))
            conditions = unpack(payload, run._device.torch_device, None)
            lossless, high = (run.make(command, conditions, each) for each in (None, profile))
            figures["points"][str(points)] = compared(lossless, high, points - 1)
            print(f"{points} points: {json.dumps(figures['points'][str(points)])}", flush=True)
            slab.release(command.landing)
            if arguments.json is not None:
                write_json(arguments.json, figures)
        slab.close()
    return figures


def table(points: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [
        "| Forwards | skipped | lossless s | high s | high / lossless | cosine of latents | PSNR dB, frames / sound |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for found in points.values():
        cells = [
            found["forwards"],
            found["skipped_forwards"],
            found["lossless"]["denoise_s"],
            found["high"]["denoise_s"],
            found["high_of_lossless"],
            f"{found['video_latents_cosine']:.6f} / {found['audio_latents_cosine']:.6f}",
            f"{found['frames_psnr_db'] or 'equal'} / {found['sound_psnr_db'] or 'equal'}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description="quality: high beside lossless.")
    parser.add_argument("--size", default="768x1344", help="height x width")
    parser.add_argument("--frames", type=int, default=124)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--points", type=int, action="append", help=f"sigma points ({DEFAULT_POINTS}); repeat")
    parser.add_argument("--threshold", type=float, help="another than the profile's")
    parser.add_argument("--eager", action="store_true", help="without a compiler")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="the tiny model and its weights")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    figures = bench(arguments)
    print(table(figures["points"]))
    if arguments.json is not None:
        write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
