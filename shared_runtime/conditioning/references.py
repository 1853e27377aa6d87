"""The files of a request as diffusers' blocks want them: pictures, 24 fps frames, 32 kHz waveforms. Torch.

References (ref2va) leave as diffusers' `MiniMaxH3Ref2VASetupStep` would leave them, keyframes as the file has them.
"""

import hashlib
from dataclasses import dataclass
from math import ceil, prod
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

from shared_runtime.conditioning.decode_ahead import DecodeAhead, Part, Progress
from shared_runtime.media import decode_audio, decode_image, decode_video, read_header
from shared_schema.encode import EncodeRequest, ReferenceInput, UsedReference
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import (
    FPS,
    MAX_ASPECT,
    SAMPLE_RATE,
    CanvasLimits,
    ReferenceLimits,
    Task,
    canvas_for_ratio,
    reference_size,
)

SHORTEST_VIDEO = round(ReferenceLimits.min_seconds * FPS) - 1
"""Frames. The probe adds up what packets announce, what they show is known here; one less, as clocks are rounded."""

Reference: TypeAlias = MiniMaxH3ImageReference | MiniMaxH3VideoReference | MiniMaxH3AudioReference


@dataclass(frozen=True)
class Decoded:
    """One file, decoded, and what was used of it."""

    reference: Reference
    used: UsedReference


def decode_ahead(request: EncodeRequest, files: tuple[Path, ...], limits: CanvasLimits) -> DecodeAhead[Decoded]:
    """The files of a request in its order, each decoded to what its clip can use of it.

    Taking one raises InvalidRequest if it passed the probe and cannot be decoded after all; `param` names its index.
    """
    parts = []
    for index, (reference, path) in enumerate(zip(request.references, files, strict=True)):

        def decode(progress: Progress, index: int = index, path: Path = path) -> Decoded:
            return _decode(index, path, request, _Fit(limits, progress))

        parts.append(Part(_held_bytes(reference, path, request, limits), decode))
    return DecodeAhead(parts)


def _held_bytes(reference: ReferenceInput, path: Path, request: EncodeRequest, limits: CanvasLimits) -> int:
    """Of RGB pixels, as the file's header has it: a picture before and after it is sized, a video's frames after."""
    header = None if reference.kind == "audio" else read_header(path, reference.kind)
    if header is None or not 1 / MAX_ASPECT <= header.width / header.height <= MAX_ASPECT:
        return 0
    if reference.kind == "image":
        return 3 * (header.width * header.height + prod(reference_size(header.width, header.height, limits)))
    canvas = canvas_for_ratio(header.width, header.height, limits)
    frames = request.num_frames
    if header.seconds is not None:
        frames = min(frames, ceil((header.seconds - reference.start_seconds) * FPS) + 1)
    return 3 * max(frames, 0) * canvas.width * canvas.height


class _Fit:
    """Puts each frame on the canvas of its own ratio before the next one is decoded, as diffusers does with them all.

    So memory is the canvas' and not the file's: 15 s of 4K would be 9 GB. Nothing is resized again: the rule would
    give another canvas for that of one ratio in nine, 21:9 among them.
    """

    def __init__(self, limits: CanvasLimits, progress: Progress) -> None:
        self._limits = limits
        self._progress = progress
        self.source: tuple[int, int] | None = None
        """(width, height) of the file's frames."""

    def __call__(self, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        self._progress.one()
        height, width, _ = frame.shape
        self.source = self.source or (width, height)
        canvas = canvas_for_ratio(width, height, self._limits)
        if (canvas.height, canvas.width) == (height, width):
            return frame
        return np.asarray(Image.fromarray(frame).resize((canvas.width, canvas.height), Image.Resampling.LANCZOS))

    def picture(self, picture: Image.Image) -> Image.Image:
        """A reference picture at the size that diffusers gives it."""
        self._progress.one()
        size = reference_size(*picture.size, self._limits)
        return picture if size == picture.size else picture.resize(size, Image.Resampling.LANCZOS)


def _decode(index: int, path: Path, request: EncodeRequest, fit: _Fit) -> Decoded:
    reference, num_frames = request.references[index], request.num_frames
    param = f"input_references[{index}]"
    used = UsedReference(index=index, kind=reference.kind, sha256=_sha256(path))
    start = reference.start_seconds
    match reference.kind:
        case "image":
            picture = Image.fromarray(decode_image(path, param=param))
            used = used.model_copy(update={"width": picture.width, "height": picture.height})
            if request.task is Task.REF2VA:
                picture = fit.picture(picture)
                used = used.encoded_at(*picture.size)
            return Decoded(MiniMaxH3ImageReference(image=picture), used)
        case "video":
            video = decode_video(
                path, max_frames=num_frames, use_audio=reference.use_audio, start_seconds=start, fit=fit, param=param
            )
            count, width, height = len(video.frames), *(fit.source or (0, 0))
            if count < min(num_frames, SHORTEST_VIDEO):
                lengths = f"at least {ReferenceLimits.min_seconds:g} seconds, this one {count / FPS:.3f}"
                raise InvalidRequest(f"a reference video lasts {lengths}", param=param)
            sound = None if video.waveform is None else torch.from_numpy(video.waveform)
            facts = {"width": width, "height": height, "frames": count, "seconds": count / FPS}
            if sound is not None:
                facts["audio_seconds"] = sound.shape[1] / SAMPLE_RATE
            made = MiniMaxH3VideoReference(frames=video.frames, fps=float(FPS), audio=sound, sample_rate=SAMPLE_RATE)
            high, wide = video.frames.shape[1:3]
            return Decoded(made, used.model_copy(update=facts).encoded_at(wide, high))
        case "audio":
            seconds = num_frames / FPS
            waveform = torch.from_numpy(decode_audio(path, max_seconds=seconds, start_seconds=start, param=param))
            heard = waveform.shape[1] / SAMPLE_RATE
            made_sound = MiniMaxH3AudioReference(audio=waveform, sample_rate=SAMPLE_RATE)
            return Decoded(made_sound, used.model_copy(update={"audio_seconds": heard, "seconds": heard}))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
