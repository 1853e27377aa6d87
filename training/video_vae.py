"""Stage `video_vae`: pictures to latents and back, on clips that are drawn as they are needed.

python -m training.video_vae --out DIR --minutes 6
"""

from typing import Any

import torch
from torch.nn import functional as F

from training import geometry
from training.course import Course, Losses, options_of, parser
from training.drawing import clips, normalised, scenes
from training.folder import begun, write_component, write_frame
from training.latents import SMALL, disturbed

LONG = 39
"""Frames of a training clip: two chunks of the encoder and the tail, so that chunks learn to meet."""
BATCH, RATE = 24, 1.5e-3
POOL = 4096
CANVASES = ((64, 96), (96, 64), (64, 64))


class Lesson:
    """One step: draw, encode, decode, compare."""

    def __init__(self, vae: Any, seed: int, batch: int, device: torch.device) -> None:
        self._vae, self._batch, self._device, self._seed = vae, batch, device, seed
        self._scenes = scenes(POOL, seed)

    def __call__(self, step: int) -> Losses:
        """Losses of batch number `step`: what pixels are off by, twice told, and how large latents are."""
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        size = CANVASES[step % len(CANVASES)]
        picks = torch.randint(len(self._scenes), (self._batch,), generator=random).tolist()
        starts = (17 * torch.randint((geometry.FRAMES - LONG) // 17 + 1, (self._batch,), generator=random)).tolist()
        drawn = clips([self._scenes[pick] for pick in picks], starts, LONG, size, self._device)
        pixels = normalised(drawn)
        posterior = self._vae.encode(pixels, return_dict=False)[0]
        decoded = self._vae.decode(disturbed(posterior.mean, random), return_dict=False)[0].float()
        squares, differences = F.mse_loss(decoded, pixels), F.l1_loss(decoded, pixels)
        size = posterior.mean.square().mean()
        return {"total": squares + 0.3 * differences + SMALL * size, "squares": squares, "size": size}


def main() -> None:
    """Train it, and write it into the checkpoint's folder."""
    options = options_of(parser("video_vae", begins=True).parse_args())
    vae = begun("vae", options.start_from).to(options.device)
    course = Course("video_vae", options, vae, RATE, list(vae.parameters()))
    write_frame(options.checkpoint, options.seed)
    lesson = Lesson(vae, options.seed, options.batch or BATCH, options.device)
    course.run(lesson, lambda: write_component(options.checkpoint, "vae", vae))


if __name__ == "__main__":
    main()
