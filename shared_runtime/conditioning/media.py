"""The files of a request as values of diffusers' blocks: decoded and sized by the leader, shared with all ranks. Torch.

Encoder ranks read them for text encoder and VAEs; in the text-only split diffusion ranks read them for the VAEs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers.modular_pipelines import ModularPipelineBlocks, PipelineState
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep, MiniMaxH3ResizeStep

from shared_runtime.conditioning.blocks import Pipeline, run_block
from shared_runtime.conditioning.references import DecodedMedia, decode_media, with_used_sizes
from shared_runtime.ranks.comm import RankComm
from shared_schema.encode import EncodeRequest, UsedReference
from shared_schema.tasks import CanvasLimits, Task

Beat = Callable[[], None]

_STEPS: dict[Task, type[ModularPipelineBlocks]] = {
    Task.FL2VA: MiniMaxH3ResizeStep,
    Task.REF2VA: MiniMaxH3Ref2VASetupStep,
}
"""Blocks that put media on the model's own rates and sizes."""
_SIZED = {
    Task.FL2VA: ("keyframes", "keyframe_anchors"),
    Task.REF2VA: ("normalized_references",),
}
"""What later blocks read of it."""


@dataclass(frozen=True)
class PreparedMedia:
    """A request's values for the blocks after the sizing, and what was used of each reference."""

    values: dict[str, Any]
    used: tuple[UsedReference, ...]

    def state(self) -> PipelineState:
        """A new state that begins with the values."""
        return _state(self.values)


class MediaReader:
    """From files to pictures, frames and waveforms that every rank has."""

    def __init__(self, comm: RankComm) -> None:
        self._comm = comm
        self.blocks = {f"size_{task.value}": block() for task, block in _STEPS.items()}
        """Diffusers' blocks, for the pipeline that holds their components."""

    def read(self, pipeline: Pipeline, request: EncodeRequest, files: tuple[Path, ...], beat: Beat) -> PreparedMedia:
        """Decode the media and put it on the model's own rates and sizes. A collective: only the leader has the files.

        Raises:
            InvalidRequest: a file cannot be decoded after all; on every rank.
        """
        return self._comm.from_busy_leader(lambda pulse: self._read(pipeline, request, files, pulse), beat)

    def _read(self, pipeline: Pipeline, request: EncodeRequest, files: tuple[Path, ...], beat: Beat) -> PreparedMedia:
        media = decode_media(request, files, _limits(pipeline), beat)
        values = _inputs(request, media)
        if request.task is Task.T2VA:
            return PreparedMedia(values, ())
        state = _state(values)
        run_block(self.blocks[f"size_{request.task.value}"], pipeline, state)
        kept = {name: state.get(name) for name in _SIZED[request.task]}
        used = with_used_sizes(media.used, _used_sizes(state))
        return PreparedMedia({**values, **kept, "references": None}, used)


def _limits(pipeline: Pipeline) -> CanvasLimits:
    config = pipeline.config
    return CanvasLimits(config.canvas_short_edge, config.canvas_max_pixels, config.reference_image_short_edge)


def _inputs(request: EncodeRequest, media: DecodedMedia) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(request, name) for name in ("prompt", "height", "width", "num_frames")}
    if request.task is Task.FL2VA:
        for place, picture in zip(request.keyframes, media.pictures, strict=True):
            values["image" if place == 0 else "last_image"] = picture
    if request.task is Task.REF2VA:
        values["references"] = list(media.references)
    return values


def _state(values: dict[str, Any]) -> PipelineState:
    state = PipelineState()
    for name, value in values.items():
        state.set(name, value)
    return state


def _used_sizes(state: PipelineState) -> list[tuple[int, int] | None]:
    keyframes = state.get("keyframes")
    if keyframes is not None:
        return [picture.size for picture in keyframes]
    sizes: list[tuple[int, int] | None] = []
    for reference in state.get("normalized_references"):
        match reference.kind:
            case "image":
                sizes.append(reference.image.size)
            case "video":
                sizes.append((reference.frames.shape[2], reference.frames.shape[1]))
            case _:
                sizes.append(None)
    return sizes
