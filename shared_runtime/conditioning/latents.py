"""The media of a request as latents: both VAEs' encoder halves over the ranks of a group. Torch.

Encoder ranks encode them; in the text-only split diffusion ranks do.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from diffusers.modular_pipelines import ModularPipelineBlocks, PipelineState
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3KeyframeVaeEncoderStep,
    MiniMaxH3Ref2VAReferenceEncoderStep,
)

from shared_runtime.compiling import compile_now
from shared_runtime.conditioning.audio_vae import LeaderAudioVae
from shared_runtime.conditioning.blocks import Pipeline, run_block
from shared_runtime.conditioning.taken import TakenPicturesBlock, sounds_of
from shared_runtime.conditioning.tile_runner import BatchedTiles
from shared_runtime.conditioning.vae_tiles import Beat, Mode, visual_encoder
from shared_runtime.ranks.comm import RankComm
from shared_runtime.weights import load_audio_vae, load_video_vae, weight_bytes
from shared_schema.deploy.model import Stage
from shared_schema.encode import EncodeRequest
from shared_schema.layout import Block, BlockKind, Layout
from shared_schema.tasks import AUDIO_CHANNELS, Task

logger = logging.getLogger(__name__)

_PICTURES: dict[Task, type[ModularPipelineBlocks]] = {
    Task.FL2VA: MiniMaxH3KeyframeVaeEncoderStep,
    Task.REF2VA: TakenPicturesBlock,
}
_SOUNDS = "encode_sounds"


@dataclass(frozen=True)
class Latents:
    """The latents of a request's media, and what they are of."""

    visual: tuple[torch.Tensor, ...]
    """Each `(1, 24, T, H, W)` float32, normalised."""
    audio: tuple[torch.Tensor, ...]
    """Each `(2 * latents, 32)` float32, channel-major."""
    layout: Layout


class MediaEncoder:
    """Both VAEs' encoder halves on one rank of a group; `None` where another rank has them."""

    def __init__(
        self,
        video_vae: Any | None,
        audio_vae: Any | None,
        comm: RankComm,
        mode: Mode,
        batched: BatchedTiles | None = None,
    ) -> None:
        """`batched` encodes tiles in the place of `video_vae`'s own modules."""
        self._visual = visual_encoder(video_vae, comm, mode, batched)
        held = [weight_bytes(vae) for vae in (video_vae, audio_vae) if vae is not None]
        self.weight_bytes = sum(held)
        """Of what this rank itself holds."""
        self._sounds = LeaderAudioVae(audio_vae, comm)
        self.components = {"vae": self._visual.vae, "audio_vae": self._sounds}
        """For the pipeline that runs `blocks`."""
        self.blocks = {f"encode_{task.value}": block() for task, block in _PICTURES.items()}
        self.blocks[_SOUNDS] = MiniMaxH3Ref2VAReferenceEncoderStep()

    @classmethod
    def load(cls, checkpoint: Path, comm: RankComm, mode: Mode, beat: Beat, stage: Stage) -> Self:
        """Load what this rank needs, or make it up: in mode `leader` followers need nothing. A collective.

        `stage` is the one that encodes media: its precision, and whether anything is compiled.

        Raises:
            DeployError: a file or tensor is missing, unexpected or mis-shaped.
        """
        dummy = stage.dummy
        video_vae = audio_vae = None
        if comm.is_leader or mode == "patch":
            video_vae = load_video_vae(checkpoint, "encoder", comm.device, dummy=dummy)
        beat()
        if comm.is_leader:
            audio_vae = load_audio_vae(checkpoint, "encoder", comm.device, dummy=dummy)
        beat()
        batched = None
        if video_vae is not None and comm.device.type == "cuda":
            batched = _batched(video_vae, stage, beat)
        return cls(video_vae, audio_vae, comm, mode, batched)

    def tiles(self, state: PipelineState) -> list[int]:
        """Frames of each tile that this rank will encode, and beat at, of what `MediaReader` put into `state`."""
        return self._visual.tiles(_visual_shapes(state))

    def encode(self, pipeline: Pipeline, request: EncodeRequest, state: PipelineState, beat: Beat) -> Latents:
        """Encode what `MediaReader` put into `state`, and forget its pixels; the same on every rank. A collective."""
        sounds = PipelineState()
        if request.task is not Task.T2VA:
            heard = sounds_of(state.get("normalized_references") or ())
            with self._sounds.begun([each.audio[:, None] for each in heard]):
                self._visual.run(self.blocks[f"encode_{request.task.value}"], pipeline, state, beat)
                if heard:
                    sounds.set("normalized_references", heard)
                    run_block(self.blocks[_SOUNDS], pipeline, sounds)
        visual = tuple(state.get("condition_latents") or ())
        audio = tuple(sounds.get("audio_condition_latents") or ())
        return Latents(visual, audio, _layout(request, state, visual, audio))


def _batched(video_vae: Any, stage: Stage, beat: Beat) -> BatchedTiles:
    compiler = None if stage.enforce_eager else "inductor"
    made = BatchedTiles(video_vae, stage.encode_precision, compiler=compiler)
    logger.info("video encoder: at most %s tiles of clips and %s of pictures in a batch", *made.most.values())
    if compiler is not None:
        compile_now("the video encoder", lambda: made.warm_up(beat), stage, beat)
    return made


def _visual_shapes(state: PipelineState) -> list[tuple[int, int, int]]:
    """Frames, height and width of every picture and clip that the video VAE encodes."""
    pictures = [(1, each.height, each.width) for each in state.get("keyframes") or ()]
    references = state.get("normalized_references") or ()
    return pictures + [tuple(each.pixels.shape[2:]) for each in references if each.pixels is not None]


def _layout(
    request: EncodeRequest,
    state: PipelineState,
    visual: tuple[torch.Tensor, ...],
    audio: tuple[torch.Tensor, ...],
) -> Layout:
    shapes, lengths = iter(visual), iter(audio)
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
