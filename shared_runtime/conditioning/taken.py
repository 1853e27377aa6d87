"""References whose frames have left the host: on the device for the VAE, and what Qwen3-VL reads of them. Torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers.modular_pipelines import PipelineState
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3AudioReference
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3Ref2VAReferenceEncoderStep, encode_vae_condition

from shared_runtime.conditioning.blocks import Pipeline
from shared_runtime.conditioning.references import Reference
from shared_schema.encode import ReferenceKind


@dataclass(frozen=True)
class Vision:
    """What the text encoder reads of one picture or video, on its device; of a sound there is nothing."""

    inputs: dict[str, torch.Tensor]
    """By the names that Qwen3-VL's model has for them."""
    picture_tokens: list[int]
    block_tokens: list[int]
    timestamps: list[list[float]]
    """Seconds of each block of a video's frames."""


Look = Callable[[Pipeline, Reference], Vision]


@dataclass
class TakenReference:
    """A sized reference without its file's frames, in the words that diffusers' blocks ask for."""

    kind: ReferenceKind
    audio: torch.Tensor | None
    """`(2, samples)` at 32 kHz, on the host."""
    vision: Vision | None
    pixels: torch.Tensor | None
    """`(1, 3, frames, height, width)` uint8 on the device; None for sound, or where no VAE is to read them."""

    @property
    def has_audio(self) -> bool:
        """Whether there is sound for the audio VAE."""
        return self.audio is not None

    def seen(self) -> Vision:
        """What the text encoder reads, for the last time."""
        vision, self.vision = self.vision, None
        assert vision is not None
        return vision

    def let_go(self) -> None:
        """Forget the pixels but for their shape."""
        assert self.pixels is not None
        self.pixels = self.pixels.new_zeros(()).expand(self.pixels.shape)


def pixels_of(reference: Reference, pipeline: Pipeline, device: torch.device) -> torch.Tensor | None:
    """What the video VAE is to encode of a sized reference. On a CPU it is the host's own memory, not a copy."""
    match reference.kind:
        case "image":
            return torch.from_numpy(np.array(reference.image)).to(device).permute(2, 0, 1)[None, :, None]
        case "video":
            frames = reference.frames[: _whole_chunks(len(reference.frames), pipeline)]
            return torch.from_numpy(frames).to(device).permute(3, 0, 1, 2)[None]
        case _:
            return None


def _whole_chunks(frames: int, pipeline: Pipeline) -> int:
    """As many of the frames as the VAE's chunks take without padding."""
    chunk, rest = pipeline.vae_frames_per_chunk, pipeline.vae_latents_per_chunk
    return int(max(1, (frames - rest) // chunk) * chunk + rest)


class TakenPicturesBlock(MiniMaxH3Ref2VAReferenceEncoderStep):  # type: ignore[misc]
    """Diffusers' block for pictures and clips that are on the device already; sound is left to diffusers' own.

    It lets go of each once it is encoded. Run again, it asks the VAE for the same shapes: see `TileEncoder`.
    """

    @torch.no_grad()
    def __call__(self, components: Pipeline, state: PipelineState) -> tuple[Pipeline, PipelineState]:
        """Leaves `condition_latents` in `state`."""
        latents = []
        for each in state.get("normalized_references"):
            if each.pixels is not None:
                mean, std, seed = components.pixel_mean, components.pixel_std, components.keyframe_encode_seed
                latents.append(encode_vae_condition(components.vae, each.pixels, mean, std, seed))
                each.let_go()
        state.set("condition_latents", latents)
        return components, state


def sounds_of(taken: Sequence[TakenReference]) -> list[MiniMaxH3AudioReference]:
    """The sounds of references in their order, for diffusers' own block."""
    return [MiniMaxH3AudioReference(audio=each.audio) for each in taken if each.has_audio]
