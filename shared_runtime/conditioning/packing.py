"""Conditions as rows and back: what the encoder's leader packs, and what the diffusion ranks unpack. Torch."""

from dataclasses import dataclass

import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

from shared_schema.encoder_output import (
    AUDIO,
    ROLES,
    TEXT,
    VISUAL,
    VISUAL_WIDTH,
    Dtype,
    EncoderOutput,
    Manifest,
    SlotName,
)
from shared_schema.layout import LAYOUT, Block, Layout
from shared_schema.tasks import AUDIO_CHANNELS, PATCH

_PATCH_SIZE = (1, PATCH, PATCH)
_LATENT_CHANNELS = VISUAL_WIDTH // PATCH**2
_TORCH_DTYPES: dict[Dtype, torch.dtype] = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


@dataclass(frozen=True)
class Conditions:
    """What conditions a clip, as diffusers' blocks exchange it."""

    prompt_embeds: torch.Tensor
    """`(1, tokens, text_dim)` BF16."""
    roles: torch.Tensor
    """`(tokens,)` int64: 1 text, 0 vision."""
    visual: tuple[torch.Tensor, ...] = ()
    """Each `(1, 24, T, H, W)` float32, normalised, in the order of the rows."""
    audio: tuple[torch.Tensor, ...] = ()
    """Each `(2 * latents, 32)` float32, channel-major."""


def pack(conditions: Conditions, layout: Layout | None) -> EncoderOutput:
    """One contiguous payload on the host; without a layout the text slots alone.

    Raises:
        PayloadError: the conditions do not fit the layout; the subclass says how.
    """
    tensors: dict[SlotName, torch.Tensor] = {
        TEXT: conditions.prompt_embeds[0].to(torch.bfloat16),
        ROLES: conditions.roles.to(torch.int64),
        VISUAL: _rows([patchify_video_latents(each, _PATCH_SIZE) for each in conditions.visual]),
        AUDIO: _rows(list(conditions.audio)),
    }
    manifest = Manifest.plan({name: tuple(tensor.shape) for name, tensor in tensors.items()}, layout)
    if layout is not None:
        tensors[LAYOUT] = torch.tensor(manifest.layout, dtype=torch.int64)
    payload = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    for spec in manifest.slots:
        raw = tensors[spec.name].to("cpu").contiguous().view(torch.uint8)  # type: ignore[index]
        payload[spec.offset : spec.offset + spec.nbytes] = raw.reshape(-1)
    return EncoderOutput(manifest=manifest, data=payload.numpy().data)


def _rows(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts).to(torch.float32) if parts else torch.empty(0, dtype=torch.float32)


def unpack(payload: EncoderOutput) -> Conditions:
    """The conditions of a payload, copied off it so that its landing can be given back at once."""
    layout = payload.layout
    blocks = layout.blocks if layout is not None else ()
    return Conditions(
        prompt_embeds=_tensor(payload, TEXT)[None],
        roles=_tensor(payload, ROLES).reshape(-1),
        visual=_visual(_tensor(payload, VISUAL), blocks) if blocks else (),
        audio=_audio(_tensor(payload, AUDIO), blocks) if blocks else (),
    )


def _tensor(payload: EncoderOutput, name: SlotName) -> torch.Tensor:
    spec = payload.manifest.slot(name)
    raw = torch.frombuffer(bytearray(payload.view(name)), dtype=torch.uint8) if spec.nbytes else torch.empty(0)
    return raw.view(_TORCH_DTYPES[spec.dtype]).reshape(spec.shape)  # type: ignore[index]


def _visual(rows: torch.Tensor, blocks: tuple[Block, ...]) -> tuple[torch.Tensor, ...]:
    shown = [block for block in blocks if block.visual_shape is not None]
    parts = torch.split(rows, [block.visual_rows for block in shown]) if shown else ()
    return tuple(unpatchify(part, block) for part, block in zip(parts, shown, strict=True))


def unpatchify(rows: torch.Tensor, block: Block) -> torch.Tensor:
    """`(1, 24, T, H, W)` from rows of 96 (channel, patch row, patch column): the inverse of diffusers' packing."""
    frames, height, width = block.visual_shape or (0, 0, 0)
    grid = rows.reshape(frames, height // PATCH, width // PATCH, _LATENT_CHANNELS, PATCH, PATCH)
    return grid.permute(3, 0, 1, 4, 2, 5).reshape(1, _LATENT_CHANNELS, frames, height, width).contiguous()


def _audio(rows: torch.Tensor, blocks: tuple[Block, ...]) -> tuple[torch.Tensor, ...]:
    lengths = [AUDIO_CHANNELS * block.audio_t for block in blocks if block.has_sound]
    return tuple(torch.split(rows, lengths)) if lengths else ()
