"""What the VAEs alone do to clips: encodes and decodes unseen scenes, and judges them.

    python -m tests.meaning.fidelity build/demo-run/checkpoint --clips 40 --noise 0.1

`--noise` is added to the latents, as a part of each channel's spread: about what a sampler is off by.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared_runtime.demo.scene import Motion, Scene, draw
from shared_runtime.demo.world import frames, sound
from shared_schema.tasks import AUDIO_LATENTS_PER_SECOND, SAMPLE_RATE
from tests.meaning.judge import judge_decoded
from tests.meaning.run import psnr
from training.drawing import PIXEL_MEAN, PIXEL_STD, normalised
from training.folder import read_component
from video_client.scenes import FRAMES, HEIGHT, WIDTH


def seen_again(vae: Any, pictures: NDArray[np.uint8], noise: float) -> NDArray[np.uint8]:
    """`(n, height, width, 3)`, through the video VAE."""
    pixels = normalised(torch.from_numpy(pictures)[None].float())
    latents = _noised(vae.encode(pixels, return_dict=False)[0].mode(), noise, (0, 2, 3, 4))
    decoded = vae.decode(latents, return_dict=False)[0][0].permute(1, 2, 3, 0)
    levels = (decoded * torch.tensor(PIXEL_STD) + torch.tensor(PIXEL_MEAN)).clamp(0, 1) * 255
    again: NDArray[np.uint8] = levels.round().byte().numpy()
    return again


def heard_again(vae: Any, waves: NDArray[np.float32], noise: float) -> NDArray[np.float32]:
    """`(2, samples)`, through the audio VAE."""
    sides = torch.from_numpy(waves)[:, None].float()
    latents = _noised(vae.encode(sides, return_dict=False)[0].mode(), noise, (0, 2))
    again: NDArray[np.float32] = vae.decode(latents, return_dict=False)[0][:, 0].numpy()
    return again


def _noised(latents: torch.Tensor, noise: float, within: tuple[int, ...]) -> torch.Tensor:
    return latents + noise * latents.std(within, keepdim=True) * torch.randn_like(latents)


def judge(vae: Any, audio_vae: Any, scene: Scene, noise: float) -> tuple[list[float], dict[str, bool]]:
    """PSNR of the clip, of its first and of its last frame, and of its sound, in decibel; and what is right."""
    pictures = frames(scene, FRAMES, HEIGHT, WIDTH)
    waves = sound(scene, FRAMES, HEIGHT, WIDTH).astype(np.float32)
    hop = SAMPLE_RATE // AUDIO_LATENTS_PER_SECOND
    whole = waves.shape[1] // hop * hop
    again, heard = seen_again(vae, pictures, noise), heard_again(audio_vae, waves[:, :whole], noise)
    off = float(np.square(heard - waves[:, : heard.shape[1]]).mean())
    levels = [psnr(again, pictures), psnr(again[0], pictures[0]), psnr(again[-1], pictures[-1]), -10 * np.log10(off)]
    right = judge_decoded(again, heard).agrees(scene)
    return levels, {
        aspect: fits for aspect, fits in right.items() if aspect != "clicks" or scene.motion is Motion.BOUNCE
    }


@torch.no_grad()
def main() -> int:
    """Print what became of each, and how many are right."""
    parser = argparse.ArgumentParser(
        prog="tests.meaning.fidelity", description="Judge what the VAEs alone do to clips."
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=20)
    options = parser.parse_args()
    vae, audio_vae = (read_component(options.checkpoint, name).eval() for name in ("vae", "audio_vae"))
    random = np.random.default_rng(options.seed)
    torch.manual_seed(options.seed)
    every, right, asked = [], Counter[str](), Counter[str]()
    for index in range(options.clips):
        scene = draw(random, unseen=bool(index % 2))
        levels, fits = judge(vae, audio_vae, scene, options.noise)
        wrong = [aspect for aspect, fit in fits.items() if not fit]
        print(scene.shape, scene.motion, *(f"{level:.1f}" for level in levels), *wrong, flush=True)
        every.append(levels)
        right.update(aspect for aspect, fit in fits.items() if fit)
        asked.update(list(fits))
    for name, column in zip(("clip", "first frame", "last frame", "sound"), zip(*every, strict=True), strict=True):
        print(f"{name}: mean {np.mean(column):.1f} dB, worst {min(column):.1f}")
    print(", ".join(f"{aspect} {right[aspect]}/{count}" for aspect, count in asked.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
