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
from shared_runtime.conditioning.decode_ahead import DecodeAhead
from shared_runtime.conditioning.references import Decoded, decode_ahead
from shared_runtime.conditioning.taken import Look, TakenReference, pixels_of
from shared_runtime.ranks.comm import RankComm
from shared_schema.encode import EncodeRequest, UsedReference
from shared_schema.tasks import CanvasLimits, Task

Beat = Callable[[], None]
Ahead = DecodeAhead[Decoded]

_SIZE = "size_keyframes"
"""The block that puts them on the canvas. That of references is never run: they come sized."""


@dataclass(frozen=True)
class PreparedMedia:
    """A request's values for the blocks after the sizing, and what was used of each reference."""

    values: dict[str, Any]
    used: tuple[UsedReference, ...]

    def state(self) -> PipelineState:
        """A new state that begins with the values."""
        return _state(self.values)


class MediaReader:
    """From files to pictures, frames and waveforms that every rank has.

    A reference leaves the host before much of the next one is there: its frames go to the device as they are, and
    what Qwen3-VL reads of them, two a second, is taken at once, as its one pass needs that of all references.
    """

    def __init__(self, comm: RankComm, look: Look | None = None, *, for_vae: bool = True) -> None:
        """`look` takes what the text encoder reads of a reference; `for_vae`: whether the video VAE reads them."""
        self._comm = comm
        self._look = look
        self._for_vae = for_vae
        self.blocks: dict[str, ModularPipelineBlocks] = {
            _SIZE: MiniMaxH3ResizeStep(),
            "size_references": MiniMaxH3Ref2VASetupStep(),
        }
        """Diffusers' blocks, for the pipeline that holds their components and the limits that they declare."""

    def read(self, pipeline: Pipeline, request: EncodeRequest, files: tuple[Path, ...], beat: Beat) -> PreparedMedia:
        """Decode the media and put it on the model's own rates and sizes. A collective: only the leader has the files.

        Raises:
            InvalidRequest: a file cannot be decoded after all; on every rank.
        """
        values = {name: getattr(request, name) for name in ("prompt", "height", "width", "num_frames")}
        if request.task is Task.T2VA:
            return PreparedMedia(values, ())
        with self._decoding(pipeline, request, files) as ahead:
            if request.task is Task.FL2VA:
                return self._comm.from_busy_leader(
                    lambda pulse: self._keyframes(pipeline, request, values, ahead, pulse), beat
                )
            both = [self._next(pipeline, ahead, beat) for _ in request.references]
        return PreparedMedia(
            {**values, "normalized_references": [taken for taken, _ in both]}, tuple(used for _, used in both)
        )

    def _decoding(self, pipeline: Pipeline, request: EncodeRequest, files: tuple[Path, ...]) -> Ahead:
        if not self._comm.is_leader:
            return DecodeAhead([])
        config = pipeline.config
        limits = CanvasLimits(config.canvas_short_edge, config.canvas_max_pixels, config.reference_image_short_edge)
        return decode_ahead(request, files, limits)

    def _keyframes(
        self, pipeline: Pipeline, request: EncodeRequest, values: dict[str, Any], ahead: Ahead, beat: Beat
    ) -> PreparedMedia:
        pictures: dict[str, Any] = {}
        used = [self._put(pipeline, values, pictures, place, ahead.take(beat)) for place in request.keyframes]
        return PreparedMedia({**values, "keyframes": list(pictures.values())}, tuple(used))

    def _put(
        self, pipeline: Pipeline, values: dict[str, Any], pictures: dict[str, Any], place: int, decoded: Decoded
    ) -> UsedReference:
        """One more picture on the canvas, where those before it stay as they are."""
        name = "image" if place == 0 else "last_image"
        pictures[name] = decoded.reference.image
        state = _state({**values, **pictures})
        run_block(self.blocks[_SIZE], pipeline, state)
        pictures.update(zip(pictures, state.get("keyframes"), strict=True))
        return decoded.used.encoded_at(*pictures[name].size)

    def _next(self, pipeline: Pipeline, ahead: Ahead, beat: Beat) -> tuple[TakenReference, UsedReference]:
        """The next reference, taken: nothing of its file stays on the host, unless that is the device."""
        decoded = self._comm.from_busy_leader(ahead.take, beat)
        reference = decoded.reference
        vision = None if self._look is None or reference.kind == "audio" else self._look(pipeline, reference)
        pixels = pixels_of(reference, pipeline, self._comm.device) if self._for_vae else None
        return TakenReference(
            reference.kind, reference.audio if reference.has_audio else None, vision, pixels
        ), decoded.used


def _state(values: dict[str, Any]) -> PipelineState:
    state = PipelineState()
    for name, value in values.items():
        state.set(name, value)
    return state
