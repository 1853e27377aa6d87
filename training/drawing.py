"""Scenes as tensors, many at a time: frames drawn on the device, sound in processes of its own. Torch."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch
from numpy.typing import NDArray

from shared_runtime.demo.scene import Scene, draw
from shared_runtime.demo.world import coverage, paint, palette, sound, track
from shared_schema.tasks import FPS

PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""The released VAE's pixel convention."""


def scenes(count: int, seed: int) -> list[Scene]:
    """So many scenes of the combinations that are trained on."""
    random = np.random.default_rng(seed)
    return [draw(random, unseen=False) for _ in range(count)]


def frames(scene: Scene, first: int, count: int, size: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Frames `(count, height, width, 3)` float32, rounded levels 0 to 255, from the `first` one on."""
    seen = track(scene, np.arange(first, first + count) / FPS, *size)
    x, y, radius = (
        torch.from_numpy(each.astype(np.float32)).to(device, non_blocking=True)
        for each in (seen.x, seen.y, seen.radius)
    )
    covered = coverage(scene.shape, x, y, radius, *size, torch)
    colour, background = (torch.tensor(each, dtype=torch.float32, device=device) for each in palette(scene))
    levels: torch.Tensor = paint(covered, colour, background)
    return levels.round()


def normalised(levels: torch.Tensor) -> torch.Tensor:
    """`(batch, 3, frames, height, width)` as the VAE reads it, from levels `(batch, frames, height, width, 3)`."""
    mean, std = (torch.tensor(each, device=levels.device) for each in (PIXEL_MEAN, PIXEL_STD))
    return ((levels / 255 - mean) / std).permute(0, 4, 1, 2, 3)


def sounds(many: Sequence[Scene], num_frames: int, size: tuple[int, int], workers: int) -> NDArray[np.float16]:
    """`(scenes, 2, samples)`, each as long as `num_frames`."""
    one = partial(_sound, num_frames=num_frames, size=size)
    if workers < 2:
        return np.stack([one(scene) for scene in many])
    # Spawned: the parent may have a GPU open.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return np.stack(list(pool.map(one, many, chunksize=32)))


def _sound(scene: Scene, num_frames: int, size: tuple[int, int]) -> NDArray[np.float16]:
    return sound(scene, num_frames, *size).astype(np.float16)
