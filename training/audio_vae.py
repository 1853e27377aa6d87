"""Stage `audio_vae`: sound to latents and back, on sounds of the world that are made once.

python -m training.audio_vae --out DIR --minutes 3
"""

import os
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from shared_runtime.demo.world import clicks
from shared_schema.tasks import AUDIO_LATENTS_PER_SECOND, SAMPLE_RATE
from training import geometry
from training.course import Course, Losses, options_of, parser
from training.drawing import scenes, sounds
from training.folder import begun, write_component, write_frame
from training.latents import SMALL, disturbed

LENGTHS = (32, 32, 64, 178)
"""Latents of a training piece, in turn: the encoder attends to all that was before, up to a whole clip of 178."""
BATCH, RATE = 64, 1e-3
"""Pieces of 32 latents at once, and fewer longer ones."""
POOL = 1024
SCALES = (256, 1024, 2048)
"""Windows of the spectra that are compared, beside the waves themselves."""
STRUCK = 0.3
"""Latents that a click is added to."""
SHARP = 0.95
"""Of the sample before, what is taken away where clicks are compared: a tone hardly stays, a click whole."""


class Lesson:
    """One step: cut pieces, encode, decode, compare."""

    def __init__(self, vae: Any, pool: torch.Tensor, seed: int, batch: int) -> None:
        self._vae, self._pool, self._batch, self._seed = vae, pool, batch, seed

    def __call__(self, step: int) -> Losses:
        """Losses of batch number `step`: waves, their clicks, spectra, and how large latents are."""
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        latents, hop = LENGTHS[step % len(LENGTHS)], SAMPLE_RATE // AUDIO_LATENTS_PER_SECOND
        pieces, length = max(self._batch * LENGTHS[0] // latents, 1), latents * hop
        count, sides, samples = self._pool.shape
        picks = torch.randint(count * sides, (pieces,), generator=random)
        # Whole latents: served sound begins at one, and so do the world's clicks.
        starts = hop * torch.randint((samples - length) // hop + 1, (pieces,), generator=random)
        flat = self._pool.view(count * sides, samples)
        waves = torch.stack([flat[pick, start : start + length] for pick, start in zip(picks, starts, strict=True)])
        waves = struck(waves.float(), random)[:, None]
        posterior = self._vae.encode(waves, return_dict=False)[0]
        decoded = self._vae.decode(disturbed(posterior.mean, random), return_dict=False)[0].float()
        wave, spectrum = F.l1_loss(decoded, waves), _spectra(decoded[:, 0], waves[:, 0])
        # Squares: of rare things their middle value is nothing, their mean is not.
        click = F.mse_loss(_sharpened(decoded), _sharpened(waves))
        size = posterior.mean.square().mean()
        total = wave + 30 * click + 0.1 * spectrum + SMALL * size
        return {"total": total, "wave": wave, "click": click, "spectrum": spectrum, "size": size}


def struck(waves: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """`(pieces, samples)` with more clicks, of any loudness: the world's own are too rare to be learned.

    They are at latents' beginnings, as all of the world's are.
    """
    hop = SAMPLE_RATE // AUDIO_LATENTS_PER_SECOND
    click = torch.from_numpy(clicks(np.zeros(1), np.arange(hop) / SAMPLE_RATE)).to(waves)
    pieces = waves.view(len(waves), -1, hop)
    loud = torch.rand(pieces.shape[:2], generator=random).sqrt()
    chosen = torch.rand(pieces.shape[:2], generator=random) < STRUCK
    added = (loud * chosen).to(waves.device)[..., None] * click
    return waves + added.flatten(1)


def _sharpened(waves: torch.Tensor) -> torch.Tensor:
    return waves[..., 1:] - SHARP * waves[..., :-1]


def _spectra(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How much the spectra of `(batch, samples)` differ, as the logarithm tells it, over some windows."""
    total = torch.zeros((), device=one.device)
    for size in SCALES:
        window = torch.hann_window(size, device=one.device)
        logs = [
            torch.log(torch.stft(each, size, size // 4, window=window, return_complex=True).abs() + 0.02)
            for each in (one, other)
        ]
        total = total + F.l1_loss(logs[0], logs[1])
    return total / len(SCALES)


def main() -> None:
    """Train it, and write it into the checkpoint's folder."""
    given = parser("audio_vae", begins=True)
    given.add_argument("--pool", type=int, default=POOL, help="sounds to learn from")
    arguments = given.parse_args()
    options = options_of(arguments)
    size = (geometry.HEIGHT, geometry.WIDTH)
    made = sounds(scenes(arguments.pool, options.seed), geometry.FRAMES, size, os.cpu_count() or 1)
    vae = begun("audio_vae", options.start_from).to(options.device)
    course = Course("audio_vae", options, vae, RATE, list(vae.parameters()), half=False)
    write_frame(options.checkpoint, options.seed)
    lesson = Lesson(vae, torch.from_numpy(made).to(options.device), options.seed, options.batch or BATCH)
    course.run(lesson, lambda: write_component(options.checkpoint, "audio_vae", vae))


if __name__ == "__main__":
    main()
