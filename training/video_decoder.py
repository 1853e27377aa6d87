"""Stage `video_decoder`: the video VAE's decoder goes on by itself, from latents that are made once.

    python -m training.video_decoder --out DIR --minutes 30 --start-from shared_runtime/demo/checkpoint/vae

The encoder's convolutions are most of what a step of `training.video_vae` costs, nine tenths of it on a CPU. It stays
as it is here, and so does everything that was learned from its latents.
"""

from typing import Any

import torch
from torch.nn import functional as F

from training import geometry
from training.course import Course, Losses, options_of, parser
from training.drawing import clips, normalised, scenes
from training.folder import begun, write_component, write_frame
from training.latents import disturbed
from training.video_vae import CANVASES, LONG

POOL = 4096
BATCH, RATE = 16, 2e-3
ENCODED = 16
"""Clips at once."""
ENDS = 0.2
"""Weight of a piece's first and last frame by themselves: keyframes are compared with those of a clip."""


class Lesson:
    """One step: draw, decode, compare."""

    def __init__(self, vae: Any, seed: int, pool: int, batch: int, device: torch.device) -> None:
        """Encode `pool` pieces of clips, as many of each canvas."""
        self._vae, self._batch, self._device, self._seed = vae, batch, device, seed
        self._scenes = scenes(pool, seed)
        random = torch.Generator().manual_seed(seed)
        self._starts = (17 * torch.randint((geometry.FRAMES - LONG) // 17 + 1, (pool,), generator=random)).tolist()
        self._latents = [self._encoded(canvas) for canvas in range(len(CANVASES))]

    def _of(self, canvas: int) -> range:
        """The pieces that are of this canvas."""
        return range(canvas, len(self._scenes), len(CANVASES))

    def _drawn(self, picks: list[int], canvas: int) -> torch.Tensor:
        many, starts = [self._scenes[pick] for pick in picks], [self._starts[pick] for pick in picks]
        return normalised(clips(many, starts, LONG, CANVASES[canvas], self._device))

    @torch.no_grad()
    def _encoded(self, canvas: int) -> torch.Tensor:
        every = list(self._of(canvas))
        parts = [every[start : start + ENCODED] for start in range(0, len(every), ENCODED)]
        with torch.autocast(self._device.type, torch.bfloat16):
            means = [self._vae.encode(self._drawn(part, canvas), return_dict=False)[0].mean.float() for part in parts]
        return torch.cat(means)

    def __call__(self, step: int) -> Losses:
        """Losses of batch number `step`: what pixels are off by, twice told."""
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        canvas = step % len(CANVASES)
        every = self._of(canvas)
        places = torch.randint(len(every), (self._batch,), generator=random)
        latents = disturbed(self._latents[canvas][places.to(self._device)], random)
        pixels = self._drawn([every[place] for place in places.tolist()], canvas)
        decoded = self._vae.decode(latents, return_dict=False)[0].float()
        squares, differences = F.mse_loss(decoded, pixels), F.l1_loss(decoded, pixels)
        ends = F.mse_loss(decoded[:, :, [0, -1]], pixels[:, :, [0, -1]])
        return {"total": squares + 0.3 * differences + ENDS * ends, "squares": squares, "ends": ends}


def main() -> None:
    """Train it, and write the VAE into the checkpoint's folder."""
    given = parser("video_decoder", begins=True)
    given.add_argument("--pool", type=int, default=POOL, help="pieces of clips to learn from")
    arguments = given.parse_args()
    options = options_of(arguments)
    vae = begun("vae", options.start_from).to(options.device)
    learned = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    hidden = [weight for weight in vae.decoder.transformer_blocks.parameters() if weight.ndim == 2]
    course = Course("video_decoder", options, vae, RATE, learned, hidden=hidden)
    write_frame(options.checkpoint, options.seed)
    lesson = Lesson(vae, options.seed, arguments.pool, options.batch or BATCH, options.device)
    course.run(lesson, lambda: write_component(options.checkpoint, "vae", vae))


if __name__ == "__main__":
    main()
