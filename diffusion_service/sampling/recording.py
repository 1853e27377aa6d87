"""The file of one clip, and what its contents are known by. Diffusion ranks; torch.

The leader writes it. Every method is a collective, so that what goes wrong with the file is raised on all ranks; but
once the last frame is taken the file is finished in a thread of the leader, beside the next clip or the next job.
"""

import contextvars
import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from diffusion_service.mux import ClipWriter
from shared_runtime.ranks.comm import RankComm
from shared_runtime.tracing import span


@dataclass(frozen=True)
class Recorded:
    """A finished file."""

    size: int
    """Bytes."""
    frames_sha256: str
    audio_sha256: str
    warnings: tuple[str, ...]


class Finisher:
    """The leader's thread that makes files whole, one at a time: a file is not begun before the last one is whole."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finish")
        self._last: Future[Recorded] | None = None

    def begin(self, finish: Callable[[], Recorded]) -> Future[Recorded]:
        """Do it beside what the caller does next; its spans are the caller's."""
        self._last = self._thread.submit(contextvars.copy_context().run, finish)
        return self._last

    def settle(self) -> None:
        """Wait until nothing is being finished, whatever became of it."""
        last, self._last = self._last, None
        if last is not None and not last.done():
            with span("wait for the last file"):
                wait([last])


class Recording:
    """An MP4 in the making; leaving the context without `finish` removes it.

    Methods raise what `ClipWriter`'s do.
    """

    def __init__(self, comm: RankComm, finisher: Finisher, open_file: Callable[[], ClipWriter]) -> None:
        self._comm = comm
        self._finisher = finisher
        self._open = open_file
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

    def finish(self, timed: AbstractContextManager[None]) -> Future[Recorded] | None:
        """Nothing more comes: on the leader, the file once it is whole; `timed` is entered meanwhile. No collective."""
        if self._writer is None:
            return None
        writer, self._writer = self._writer, None
        digests = self._frames.hexdigest(), self._sound.hexdigest()
        return self._finisher.begin(lambda: _finish(writer, digests, timed))

    def _begin(self) -> None:
        self._finisher.settle()
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


def _finish(writer: ClipWriter, digests: tuple[str, str], timed: AbstractContextManager[None]) -> Recorded:
    with timed, writer:
        return Recorded(writer.finish(), *digests, writer.warnings())
