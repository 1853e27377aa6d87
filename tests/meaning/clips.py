"""Clips of the little world, spoiled."""

import numpy as np
from numpy.typing import NDArray


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
