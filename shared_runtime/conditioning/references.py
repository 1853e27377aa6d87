"""The files of a request as diffusers' blocks want them: pictures, 24 fps frames, 32 kHz waveforms. Torch."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

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
from shared_schema.tasks import FPS, SAMPLE_RATE, CanvasLimits, canvas_for_ratio

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
    """Decode the files of a request, each to what its clip can use of it; `beat` is called at every video frame.

    Raises:
        InvalidRequest: a file that passed the probe cannot be decoded after all; `param` names its index.
    """
    decoded = [
        _decode(index, reference, path, request.num_frames, _Fit(limits, beat))
        for index, (reference, path) in enumerate(zip(request.references, files, strict=True))
    ]
    return DecodedMedia(tuple(each for each, _ in decoded), tuple(used for _, used in decoded))


class _Fit:
    """Puts each frame on the canvas of its own ratio, as diffusers would, before the next one is decoded.

    So memory is the canvas' and not the file's: 15 s of 4K would be 9 GB. A canvas that the ratio rule would not keep
    as it is stays diffusers' to make, for it would be resized twice.
    """

    def __init__(self, limits: CanvasLimits, beat: Callable[[], None]) -> None:
        self._limits = limits
        self._beat = beat
        self.source: tuple[int, int] | None = None
        """(width, height) of the file's frames."""

    def __call__(self, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        self._beat()
        height, width, _ = frame.shape
        self.source = self.source or (width, height)
        canvas = canvas_for_ratio(width, height, self._limits)
        kept = canvas_for_ratio(canvas.width, canvas.height, self._limits) == canvas
        if not kept or (canvas.height, canvas.width) == (height, width):
            return frame
        return np.asarray(Image.fromarray(frame).resize((canvas.width, canvas.height), Image.Resampling.LANCZOS))


def _decode(
    index: int, reference: ReferenceInput, path: Path, num_frames: int, fit: _Fit
) -> tuple[Reference, UsedReference]:
    param = f"input_references[{index}]"
    used = UsedReference(index=index, kind=reference.kind, sha256=_sha256(path))
    start = reference.start_seconds
    match reference.kind:
        case "image":
            picture = Image.fromarray(decode_image(path, param=param))
            used = used.model_copy(update={"width": picture.width, "height": picture.height})
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
