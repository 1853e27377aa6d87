"""The files of a request as diffusers' blocks want them: pictures, 24 fps frames, 32 kHz waveforms. Torch."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from numpy.typing import NDArray
from PIL import Image

from shared_runtime.media import decode_audio, decode_image, decode_video
from shared_schema.encode import EncodeRequest, ReferenceInput, UsedReference
from shared_schema.tasks import FPS, SAMPLE_RATE, CanvasLimits, Task, canvas_for_ratio, reference_size

AT_ONCE = 4
"""Files that are decoded at a time: FFmpeg has threads of its own, and a picture takes memory before it is sized."""
_LOOK_S = 0.02
Reference: TypeAlias = MiniMaxH3ImageReference | MiniMaxH3VideoReference | MiniMaxH3AudioReference


@dataclass(frozen=True)
class DecodedMedia:
    """The media of one request in request order, and what was used of each."""

    references: tuple[Reference, ...]
    used: tuple[UsedReference, ...]

    @property
    def pictures(self) -> tuple[Image.Image, ...]:
        """The images, for keyframes."""
        return tuple(each.image for each in self.references if isinstance(each, MiniMaxH3ImageReference))


def decode_media(
    request: EncodeRequest, files: tuple[Path, ...], limits: CanvasLimits, beat: Callable[[], None]
) -> DecodedMedia:
    """Decode the files of a request, each to what its clip can use of it, several at a time, every file once.

    `beat` is called on the calling thread as often as a video frame or a file was finished: it tells that work goes on.

    Raises:
        InvalidRequest: a file that passed the probe cannot be decoded after all; `param` names its index, of several
            such files that of the first.
    """
    progress = _Progress()
    numbered = enumerate(zip(request.references, files, strict=True))
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="media") as pool:
        tasks = [
            pool.submit(_decode, index, reference, path, request, _Fit(limits, progress))
            for index, (reference, path) in numbered
        ]
        try:
            progress.follow(tasks, beat)
            decoded = [task.result() for task in tasks]
        finally:
            progress.stop()
            pool.shutdown(wait=True, cancel_futures=True)
    return DecodedMedia(tuple(each for each, _ in decoded), tuple(used for _, used in decoded))


class _Stopped(Exception):
    """Nobody waits for this file any more."""


class _Progress:
    """What threads do, told by the one that waits for them: beats belong to it alone."""

    def __init__(self) -> None:
        self._moved = threading.Event()
        self._stopped = threading.Event()

    def one(self) -> None:
        """A frame was decoded, or a whole file."""
        if self._stopped.is_set():
            raise _Stopped
        self._moved.set()

    def stop(self) -> None:
        """Have every thread end at its next frame."""
        self._stopped.set()

    def follow(self, tasks: Sequence[Future[Any]], beat: Callable[[], None]) -> None:
        """Beat while something gets done, until all tasks are, or the first one in order that fails."""
        for task in tasks:
            while not wait((task,), _LOOK_S).done:
                if self._moved.is_set():
                    self._moved.clear()
                    beat()
            if task.exception() is not None:
                return


class _Fit:
    """Puts each frame on the canvas of its own ratio, as diffusers would, before the next one is decoded.

    So memory is the canvas' and not the file's: 15 s of 4K would be 9 GB. A canvas that the ratio rule would not keep
    as it is stays diffusers' to make, for it would be resized twice.
    """

    def __init__(self, limits: CanvasLimits, progress: _Progress) -> None:
        self._limits = limits
        self._progress = progress
        self.source: tuple[int, int] | None = None
        """(width, height) of the file's frames."""

    def __call__(self, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        self._progress.one()
        height, width, _ = frame.shape
        self.source = self.source or (width, height)
        canvas = canvas_for_ratio(width, height, self._limits)
        kept = canvas_for_ratio(canvas.width, canvas.height, self._limits) == canvas
        if not kept or (canvas.height, canvas.width) == (height, width):
            return frame
        return np.asarray(Image.fromarray(frame).resize((canvas.width, canvas.height), Image.Resampling.LANCZOS))

    def picture(self, picture: Image.Image) -> Image.Image:
        """A reference picture at the size that diffusers would give it, if it would then leave it as it is."""
        self._progress.one()
        size = reference_size(*picture.size, self._limits)
        if size == picture.size or reference_size(*size, self._limits) != size:
            return picture
        return picture.resize(size, Image.Resampling.LANCZOS)


def _decode(
    index: int, reference: ReferenceInput, path: Path, request: EncodeRequest, fit: _Fit
) -> tuple[Reference, UsedReference]:
    num_frames = request.num_frames
    param = f"input_references[{index}]"
    used = UsedReference(index=index, kind=reference.kind, sha256=_sha256(path))
    start = reference.start_seconds
    match reference.kind:
        case "image":
            picture = Image.fromarray(decode_image(path, param=param))
            used = used.model_copy(update={"width": picture.width, "height": picture.height})
            if request.task is Task.REF2VA:
                picture = fit.picture(picture)
            return MiniMaxH3ImageReference(image=picture), used
        case "video":
            video = decode_video(
                path, max_frames=num_frames, use_audio=reference.use_audio, start_seconds=start, fit=fit, param=param
            )
            count, width, height = len(video.frames), *(fit.source or (0, 0))
            sound = None if video.waveform is None else torch.from_numpy(video.waveform)
            facts = {"width": width, "height": height, "frames": count, "seconds": count / FPS}
            if sound is not None:
                facts["audio_seconds"] = sound.shape[1] / SAMPLE_RATE
            made = MiniMaxH3VideoReference(frames=video.frames, fps=float(FPS), audio=sound, sample_rate=SAMPLE_RATE)
            return made, used.model_copy(update=facts)
        case "audio":
            seconds = num_frames / FPS
            waveform = torch.from_numpy(decode_audio(path, max_seconds=seconds, start_seconds=start, param=param))
            heard = waveform.shape[1] / SAMPLE_RATE
            made_sound = MiniMaxH3AudioReference(audio=waveform, sample_rate=SAMPLE_RATE)
            return made_sound, used.model_copy(update={"audio_seconds": heard, "seconds": heard})


def with_used_sizes(used: tuple[UsedReference, ...], sizes: list[tuple[int, int] | None]) -> tuple[UsedReference, ...]:
    """Add the (width, height) at which each reference was encoded; None for sound."""
    return tuple(
        each if size is None else each.model_copy(update={"used_width": size[0], "used_height": size[1]})
        for each, size in zip(used, sizes, strict=True)
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
