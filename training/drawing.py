"""Scenes as tensors, many at a time: frames drawn on the device, sound in processes of its own. Torch."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch
from numpy.typing import NDArray

from shared_runtime.demo.scene import Motion, Scene, draw
from shared_runtime.demo.world import coverage, paint, palette, sound, track
from shared_schema.tasks import FPS

PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""The released VAE's pixel convention."""


def scenes(count: int, seed: int, often: Motion | None = None) -> list[Scene]:
    """So many scenes of the combinations that are trained on; every second one moves as is shown `often`."""
    random = np.random.default_rng(seed)
    found: list[Scene] = []
    while len(found) < count:
        scene = draw(random, unseen=False)
        if often is None or len(found) % 2 == 0 or scene.motion is often:
            found.append(scene)
    return found


def clips(
    many: Sequence[Scene], firsts: Sequence[int], count: int, size: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """`(scenes, count, height, width, 3)` float32, rounded levels 0 to 255, of every scene from its first frame on."""
    seen = [track(each, np.arange(first, first + count) / FPS, *size) for each, first in zip(many, firsts, strict=True)]
    x, y, radius = (
        torch.from_numpy(np.stack([getattr(each, name) for each in seen]).astype(np.float32)).to(device)
        for name in ("x", "y", "radius")
    )
    covered = x.new_empty(*x.shape, *size)
    for shape in {each.shape for each in many}:
        those = [place for place, each in enumerate(many) if each.shape == shape]
        drawn = coverage(shape, x[those].flatten(), y[those].flatten(), radius[those].flatten(), *size, torch)
        covered[those] = drawn.unflatten(0, (len(those), count))
    palettes = torch.tensor([palette(each) for each in many], dtype=torch.float32, device=device)
    colour, background = palettes[:, :, None, None, None].unbind(1)
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
