"""One request through the three encoders, in the words of diffusers' own blocks. Runs in an encoder rank; torch."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines import PipelineState
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep, MiniMaxH3ResizeStep
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3FL2VATextEncoderStep,
    MiniMaxH3KeyframeVaeEncoderStep,
    MiniMaxH3Ref2VAReferenceEncoderStep,
    MiniMaxH3Ref2VATextEncoderStep,
    MiniMaxH3TextEncoderStep,
)

from shared_runtime.conditioning.blocks import Pipeline, assemble, run_block
from shared_runtime.conditioning.packing import Conditions, pack
from shared_runtime.conditioning.references import DecodedMedia, decode_media, with_used_sizes
from shared_runtime.conditioning.vae_tiles import VisualEncoder
from shared_runtime.ranks.comm import RankComm
from shared_schema.encode import EncodeRequest, UsedReference
from shared_schema.encoder_output import EncoderOutput
from shared_schema.layout import Block, BlockKind, Layout
from shared_schema.tasks import AUDIO_CHANNELS, CanvasLimits, Task

_BLOCKS = {
    "resize": MiniMaxH3ResizeStep,
    "setup": MiniMaxH3Ref2VASetupStep,
    "text_t2va": MiniMaxH3TextEncoderStep,
    "text_fl2va": MiniMaxH3FL2VATextEncoderStep,
    "text_ref2va": MiniMaxH3Ref2VATextEncoderStep,
    "vae_fl2va": MiniMaxH3KeyframeVaeEncoderStep,
    "vae_ref2va": MiniMaxH3Ref2VAReferenceEncoderStep,
}
_PREPARE = {Task.FL2VA: "resize", Task.REF2VA: "setup"}
_PREPARED = {
    Task.FL2VA: ("keyframes", "keyframe_anchors"),
    Task.REF2VA: ("normalized_references",),
}
"""What the blocks after the first one read of it."""


@dataclass(frozen=True)
class EncodedRequest:
    """A finished payload, what was used of each reference, and seconds by stage."""

    payload: EncoderOutput
    references: tuple[UsedReference, ...]
    timings: dict[str, float]


@dataclass(frozen=True)
class _Prepared:
    """A request's values for the encode blocks, and what was used of each reference."""

    values: dict[str, Any]
    used: tuple[UsedReference, ...]


class EncoderPipeline:
    """The encode steps of all three tasks over one set of components."""

    def __init__(self, checkpoint: Path, components: dict[str, Any], visual: VisualEncoder, comm: RankComm) -> None:
        self._comm = comm
        self._visual = visual
        self._blocks = {name: block() for name, block in _BLOCKS.items()}
        self._pipeline: Pipeline = assemble(checkpoint, self._blocks, components)
        config = self._pipeline.config
        self._limits = CanvasLimits(
            config.canvas_short_edge, config.canvas_max_pixels, config.reference_image_short_edge
        )

    def encode(
        self, request: EncodeRequest, files: tuple[Path, ...], step: Callable[[], None], beat: Callable[[], None]
    ) -> EncodedRequest | None:
        """Media, words and pictures to one payload, on the leader. A collective.

        `step` is called between the stages, `beat` within them.

        Raises:
            InvalidRequest: a file cannot be decoded after all; on every rank.
            PayloadError: what came out does not fit its own layout.
        """
        timings: dict[str, float] = {}
        with _timed(timings, "media"):
            prepared = self._comm.from_busy_leader(lambda pulse: self._prepare(request, files, pulse), beat)
        step()
        state, task = _state(prepared.values), request.task
        with _timed(timings, "text"):
            self._run(f"text_{task.value}", state)
        step()
        if task is not Task.T2VA:
            with _timed(timings, "vae"):
                self._visual.run(self._blocks[f"vae_{task.value}"], self._pipeline, state, beat)
        step()
        if not self._comm.is_leader:
            return None
        with _timed(timings, "pack"):
            conditions = _conditions(state)
            payload = pack(conditions, _layout(request, state, conditions))
        return EncodedRequest(payload, prepared.used, timings)

    def _prepare(self, request: EncodeRequest, files: tuple[Path, ...], beat: Callable[[], None]) -> _Prepared:
        """Decode the media and put it on the model's own rates and sizes: only the leader has the files."""
        media = decode_media(request, files, self._limits, beat)
        values = _inputs(request, media)
        if request.task is Task.T2VA:
            return _Prepared(values, ())
        state = _state(values)
        self._run(_PREPARE[request.task], state)
        kept = {name: state.get(name) for name in _PREPARED[request.task]}
        return _Prepared({**values, **kept, "references": None}, with_used_sizes(media.used, _used_sizes(state)))

    def _run(self, name: str, state: PipelineState) -> None:
        run_block(self._blocks[name], self._pipeline, state)


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


@contextmanager
def _timed(timings: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timings[name] = time.perf_counter() - start


def _conditions(state: PipelineState) -> Conditions:
    return Conditions(
        prompt_embeds=state.get("prompt_embeds"),
        roles=state.get("text_token_tags"),
        visual=tuple(state.get("condition_latents") or ()),
        audio=tuple(state.get("audio_condition_latents") or ()),
    )


def _layout(request: EncodeRequest, state: PipelineState, conditions: Conditions) -> Layout:
    shapes = iter(conditions.visual)
    lengths = iter(conditions.audio)
    if request.task is Task.REF2VA:
        blocks = tuple(_block(each, shapes, lengths) for each in state.get("normalized_references"))
    else:
        blocks = tuple(_picture(latents) for latents in shapes)
    return Layout(request.task, request.height, request.width, request.num_frames, blocks, request.keyframes)


def _block(reference: Any, shapes: Iterator[torch.Tensor], lengths: Iterator[torch.Tensor]) -> Block:
    sound = next(lengths).shape[0] // AUDIO_CHANNELS if reference.has_audio else 0
    match reference.kind:
        case "audio":
            return Block(BlockKind.AUDIO, audio_t=sound)
        case "video":
            _, _, frames, height, width = next(shapes).shape
            return Block(BlockKind.VIDEO if sound else BlockKind.SILENT_VIDEO, sound, frames, height, width)
        case _:
            return _picture(next(shapes))


def _picture(latents: torch.Tensor) -> Block:
    height, width = latents.shape[-2:]
    return Block(BlockKind.IMAGE, latent_h=height, latent_w=width)


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
