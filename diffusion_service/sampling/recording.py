"""The file of one clip, and what its contents are known by. Diffusion ranks; torch.

The leader writes it. Every method is a collective, so that what goes wrong with the file is raised on all ranks.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from diffusion_service.mux import ClipWriter
from shared_runtime.ranks.comm import RankComm
from shared_schema.deploy.model import X264


@dataclass(frozen=True)
class Recorded:
    """A finished file."""

    size: int
    """Bytes."""
    frames_sha256: str
    audio_sha256: str
    warnings: tuple[str, ...]


class Recording:
    """An MP4 in the making; leaving the context without `finish` removes it.

    Methods raise what `ClipWriter`'s do.
    """

    def __init__(self, comm: RankComm, path: Path, size: tuple[int, int], num_frames: int, x264: X264) -> None:
        """`size` is height and width."""
        self._comm = comm
        self._open: Callable[[], ClipWriter] = lambda: ClipWriter(path, *size, num_frames, x264)
        self._writer: ClipWriter | None = None
        self._frames = hashlib.sha256()
        self._sound = hashlib.sha256()

    def __enter__(self) -> Self:
        self._comm.from_leader(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.abort()

    def write_sound(self, waveform: torch.Tensor | None) -> None:
        """All of the sound, `(2, samples)` float32; None where the leader has it."""
        self._comm.from_leader(lambda: self._take_sound(waveform))

    def write_frames(self, frames: torch.Tensor | None) -> None:
        """The next frames, `(n, height, width, 3)` uint8; None where the leader has them."""
        self._comm.from_leader(lambda: self._take_frames(frames))

    def finish(self) -> Recorded:
        """Wait until the file is whole."""
        return self._comm.from_leader(self._end)

    def _begin(self) -> None:
        self._writer = self._open()

    def _take_sound(self, waveform: torch.Tensor | None) -> None:
        assert self._writer is not None
        assert waveform is not None
        samples: NDArray[np.float32] = waveform.numpy()
        self._sound.update(samples.tobytes())
        self._writer.write_sound(samples)

    def _take_frames(self, frames: torch.Tensor | None) -> None:
        assert self._writer is not None
        assert frames is not None
        pixels = frames.numpy()
        self._frames.update(pixels.data)
        self._writer.write_frames(pixels)

    def _end(self) -> Recorded:
        assert self._writer is not None
        size = self._writer.finish()
        return Recorded(size, self._frames.hexdigest(), self._sound.hexdigest(), self._writer.warnings())
