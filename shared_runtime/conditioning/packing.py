"""Conditions as rows and back: what the encoder's leader packs, and what the diffusion ranks unpack. Torch."""

from dataclasses import dataclass

import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

from shared_runtime.device_memory import PageLocker, flat_bytes, from_bytes
from shared_schema.encoder_output import (
    AUDIO,
    ROLES,
    SLOT_DTYPES,
    TEXT,
    VISUAL,
    VISUAL_WIDTH,
    Dtype,
    EncoderOutput,
    Manifest,
    SlotName,
)
from shared_schema.errors import BadRoles, NotFinite
from shared_schema.layout import LAYOUT, Block, Layout
from shared_schema.tasks import AUDIO_CHANNELS, PATCH

_PATCH_SIZE = (1, PATCH, PATCH)
_LATENT_CHANNELS = VISUAL_WIDTH // PATCH**2
CPU = torch.device("cpu")
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


@dataclass(frozen=True)
class Packed:
    """A payload whose bytes are still where they were made."""

    manifest: Manifest
    raw: torch.Tensor
    """`(nbytes,)` uint8, on the encoder's device."""

    def on_host(self) -> EncoderOutput:
        """The payload in host memory; no copy where it is there already."""
        return EncoderOutput(manifest=self.manifest, data=self.raw.cpu().numpy().data)

    def check_values(self) -> None:
        """What `codec.check_values` proves, on the device.

        Raises:
            BadRoles: a token role is neither 0 nor 1.
            NotFinite: a NaN or an infinity; the slot is named.
        """
        roles = self._tensor(ROLES)
        if bool(((roles != 0) & (roles != 1)).any()):
            raise BadRoles("a token role is not 0 or 1", slot=ROLES)
        for spec in self.manifest.slots:
            values = self._tensor(spec.name)  # type: ignore[arg-type]
            if values.is_floating_point() and not bool(values.isfinite().all()):
                raise NotFinite(f"an element of slot {spec.name} is not finite", slot=spec.name)

    def _tensor(self, name: SlotName) -> torch.Tensor:
        spec = self.manifest.slot(name)
        return self.raw[spec.offset : spec.offset + spec.nbytes].view(_TORCH_DTYPES[SLOT_DTYPES[name]])


def pack(conditions: Conditions, layout: Layout | None) -> Packed:
    """One contiguous payload on the device of the text states; without a layout the text slots alone.

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
    payload = torch.zeros(manifest.nbytes, dtype=torch.uint8, device=tensors[TEXT].device)
    for spec in manifest.slots:
        payload[spec.offset : spec.offset + spec.nbytes] = flat_bytes(tensors[spec.name])  # type: ignore[index]
    return Packed(manifest, payload)


def _rows(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts).to(torch.float32) if parts else torch.empty(0, dtype=torch.float32)


def unpack(payload: EncoderOutput, device: torch.device = CPU, locker: PageLocker | None = None) -> Conditions:
    """The conditions of a payload, copied straight off it onto a device: its landing can be given back at once.

    Roles stay on the host: diffusers' layout steps read them there. `locker` is what page-locked the payload's memory.
    """
    layout = payload.layout
    blocks = layout.blocks if layout is not None else ()

    def tensor(name: SlotName, on: torch.device = device) -> torch.Tensor:
        spec = payload.manifest.slot(name)
        return from_bytes(payload.view(name), _TORCH_DTYPES[SLOT_DTYPES[name]], spec.shape, on, locker)

    return Conditions(
        prompt_embeds=tensor(TEXT)[None],
        roles=tensor(ROLES, CPU).reshape(-1),
        visual=_visual(tensor(VISUAL), blocks) if blocks else (),
        audio=_audio(tensor(AUDIO), blocks) if blocks else (),
    )


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
