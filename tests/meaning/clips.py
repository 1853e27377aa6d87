"""Clips of the little world as files, through the muxer that the diffusion service writes with."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diffusion_service.mux import ClipWriter
from shared_runtime.demo.scene import Scene
from shared_runtime.demo.world import frames, sound


def write_clip(path: Path, pictures: NDArray[np.uint8], waveform: NDArray[np.float32]) -> Path:
    """An MP4 of frames `(n, height, width, 3)` and sound `(2, samples)`."""
    num_frames, height, width, _ = pictures.shape
    with ClipWriter(path, height, width, num_frames) as writer:
        writer.write_sound(waveform)
        writer.write_frames(pictures)
        writer.finish()
    return path


def write_scene(path: Path, scene: Scene, num_frames: int = 107, height: int = 64, width: int = 96) -> Path:
    """An MP4 of a scene as it should be."""
    return write_clip(path, frames(scene, num_frames, height, width), sound(scene, num_frames, height, width))


def spoiled(pictures: NDArray[np.uint8], random: np.random.Generator, decibel: float) -> NDArray[np.uint8]:
    """Blurred over 3 x 3 pixels, and with noise until it differs from `pictures` by that PSNR."""
    sharp = pictures.astype(np.float64)
    padded = np.pad(sharp, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    height, width = pictures.shape[1:3]
    blurred = sum(padded[:, y : y + height, x : x + width] for y in range(3) for x in range(3)) / 9
    allowed = 255**2 / 10 ** (decibel / 10)
    left = allowed - np.square(blurred - sharp).mean()
    if left <= 0:
        raise ValueError(f"the blur alone is below {decibel:g} dB")
    noisy = blurred + random.normal(0, np.sqrt(left), sharp.shape)
    clipped: NDArray[np.uint8] = np.rint(noisy.clip(0, 255)).astype(np.uint8)
    return clipped
