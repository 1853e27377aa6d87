"""Many clips as one packed sequence, so that the very forward that serves them learns from them at once. Torch.

The transformer takes one clip's sequence, one set of timesteps with it. Here the sequences of a batch stand one after
another in a single one, each with timesteps of its own, and attention keeps to each clip: `Documents`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor, _apply_rotary_emb
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
)
from torch.nn import functional as F

from shared_schema.tasks import AUDIO_CHANNELS

PATCH = (1, 2, 2)
VIDEO_TAG, AUDIO_TAG = 0, 2
ANCHORED = 0.999
"""Time of keyframes and of visual references: hardly noised, as the released model holds them."""
CLEAN = 1.0
"""Time of the sound of references."""
TIMES = 4
"""Timesteps of a clip: its video's, its sound's, its pictures' and its reference sounds'."""


@dataclass(frozen=True)
class Layout:
    """Where everything lies in one clip's sequence, as diffusers lays it out."""

    position_ids: torch.Tensor
    tags: torch.Tensor
    video: torch.Tensor
    sound: torch.Tensor
    text: torch.Tensor
    shown: int
    """Rows of pictures that condition, the first ones of `video`."""
    heard: int
    """Rows of sounds that condition, the first ones of `sound`."""

    @property
    def length(self) -> int:
        """Rows in all."""
        return len(self.tags)

    def times(self) -> torch.Tensor:
        """Which of the `TIMES` every row has; text has the video's."""
        which = torch.zeros(self.length, dtype=torch.long)
        which[self.sound[self.heard :]] = 1
        which[self.video[: self.shown]] = 2
        which[self.sound[: self.heard]] = 3
        return which


@dataclass(frozen=True)
class Target:
    """Latent sizes of the clip that is made."""

    frames: int
    height: int
    width: int
    sound: int


def text_layout(tags: torch.Tensor, target: Target, anchors: tuple[str, ...]) -> Layout:
    """Of t2va, and of fl2va with `first` and `last` as `anchors`."""
    sizes = (target.frames, target.height, target.width, target.sound, PATCH, AUDIO_CHANNELS, AUDIO_TAG, VIDEO_TAG)
    return Layout(*MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, *sizes, anchors))


def reference_layout(
    tags: torch.Tensor, target: Target, references: list[Any], visual: list[torch.Tensor], audio: list[torch.Tensor]
) -> Layout:
    """Of ref2va; `visual` and `audio` are latents and rows of the references in order, for their sizes."""
    sizes = (target.frames, target.height, target.width, target.sound, PATCH, AUDIO_CHANNELS, AUDIO_TAG, VIDEO_TAG)
    built = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(tags, references, visual, audio, *sizes)
    return Layout(*built)


class Documents(MiniMaxH3AttnProcessor):  # type: ignore[misc]
    """Attention within each of `count` equally long parts of the sequence."""

    def __init__(self) -> None:
        self.count = 1

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any = None, attention_mask: Any = None
    ) -> torch.Tensor:
        """See `MiniMaxH3AttnProcessor`; the batch is 1."""
        del attention_mask
        query, key, value = (
            project(hidden_states).unflatten(-1, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        if rotary_emb is not None:
            query, key = _apply_rotary_emb(query, *rotary_emb), _apply_rotary_emb(key, *rotary_emb)
        parts = [
            each.to(value.dtype).view(self.count, -1, *each.shape[2:]).transpose(1, 2) for each in (query, key, value)
        ]
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(*hidden_states.shape[:2], -1)
        out: torch.Tensor = attn.to_out[0](mixed)
        return out


@dataclass(frozen=True)
class Batch:
    """Clips of one layout. Rows are patches of latents, as the transformer reads them."""

    layout: Layout
    text: torch.Tensor
    """`(clips, tokens, text_dim)`."""
    video: torch.Tensor
    """`(clips, rows, 96)`: what conditions, then noised."""
    sound: torch.Tensor
    """`(clips, rows, 32)`, likewise."""
    times: torch.Tensor
    """`(clips, 4)`."""


class Packed:
    """The transformer as it learns: a batch of clips to their velocities."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer
        self._documents = Documents()
        transformer.set_attn_processor(self._documents)

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocities of the rows that are made: `(clips, rows, 96)` and `(clips, rows, 32)`."""
        layout, clips = batch.layout, len(batch.text)
        device = batch.text.device
        self._documents.count = clips
        starts = torch.arange(clips, device=device)[:, None]

        def everywhere(indices: torch.Tensor, step: int) -> torch.Tensor:
            return (indices.to(device)[None] + starts * step).flatten()

        video, sound = self.transformer(
            hidden_states=batch.video.flatten(0, 1)[None],
            audio_hidden_states=batch.sound.flatten(0, 1)[None],
            encoder_hidden_states=batch.text.flatten(0, 1)[None],
            timestep=batch.times.flatten(),
            timestep_indices=everywhere(layout.times(), TIMES),
            token_tags=layout.tags.to(device).repeat(clips),
            position_ids=layout.position_ids.to(device, torch.float32).repeat(clips, 1),
            video_indices=everywhere(layout.video, layout.length),
            audio_indices=everywhere(layout.sound, layout.length),
            text_indices=everywhere(layout.text, layout.length),
            return_dict=False,
        )
        return (
            video[0].unflatten(0, (clips, -1))[:, layout.shown :],
            sound[0].unflatten(0, (clips, -1))[:, layout.heard :],
        )
