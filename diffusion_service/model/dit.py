"""One DiT partition, driven request by request: what no step changes is computed before the first. Torch.

The modules are diffusers', called in the order of `MiniMaxH3Transformer3DModel.forward`; results are its, bit for bit.
Runs in diffusion ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.modeling_utils import get_parameter_dtype
from diffusers.models.transformers.transformer_minimax_h3 import MINIMAX_H3_MODALITY_NUM

from diffusion_service.model.adaln import Modulation, Tables


@dataclass(frozen=True)
class Rows:
    """What lies where in the packed sequence; every tensor on the rank's device."""

    position_ids: torch.Tensor
    """`(rows, 3)`: time, height, width."""
    token_tags: torch.Tensor
    """`(rows,)`: modality."""
    video_indices: torch.Tensor
    audio_indices: torch.Tensor
    text_indices: torch.Tensor

    @classmethod
    def from_layout(cls, fields: Mapping[str, torch.Tensor]) -> "Rows":
        """From the `denoiser_input_fields` of diffusers' layout step."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Moment:
    """One step of the schedule."""

    timesteps: torch.Tensor
    """The distinct timesteps of the rows, `(n,)`."""
    of_row: torch.Tensor
    """Which of them a row has, `(rows,)`."""


class Dit:
    """A transformer partition whose AdaLN projections are `modulation`."""

    def __init__(self, transformer: Any, modulation: Modulation) -> None:
        self.transformer = transformer
        self.modulation = modulation

    @torch.no_grad()
    def warm_up(self, rows: int) -> None:
        """Compile the blocks, before anybody waits for it: one block over `rows` rows serves the others too.

        With the longest sequence that there will be, because indices past 2^31 elements are another graph, which
        serves shorter sequences as well.
        """
        model = self.transformer
        weight = model.norm_out.norm.weight
        hidden, turned = len(weight), 6 * model.config.rope_freq_dim
        like = {"dtype": next(model.transformer_blocks.parameters()).dtype, "device": weight.device}
        angles = (torch.ones(rows, turned, **like), torch.zeros(rows, turned, **like))
        modalities = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        table = torch.zeros(2 * MINIMAX_H3_MODALITY_NUM, 6 * hidden, **like)
        model.transformer_blocks[0](torch.zeros(1, rows, hidden, **like), table, modalities, angles)

    @torch.no_grad()
    def begin(self, text: torch.Tensor, rows: Rows, schedule: Sequence[Moment]) -> "Denoising":
        """Everything of a request that its steps share. A collective.

        Args:
            text: `(1, tokens, text_dim)`, as the encoder made it.
            rows: the packed sequence.
            schedule: its steps, in order.
        """
        model = self.transformer
        angles = model.rope(rows.position_ids)
        text = model.token_refiner(model.context_embedder(text.to(get_parameter_dtype(model.context_embedder))))
        packed = text.new_zeros((1, len(rows.position_ids), text.shape[-1]))
        packed.index_copy_(1, rows.text_indices, text)
        float_ = get_parameter_dtype(model.time_embedder)
        embedded = [model.time_embedder(model.time_proj(moment.timesteps).to(float_)) for moment in schedule]
        return Denoising(
            model,
            rows,
            packed,
            (angles[0].to(packed.dtype), angles[1].to(packed.dtype)),
            tuple(schedule),
            embedded,
            self.modulation.tables([moment.timesteps for moment in schedule], embedded),
        )


class Denoising:
    """One request on its way through a `Dit`."""

    def __init__(
        self,
        transformer: Any,
        rows: Rows,
        packed: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        schedule: tuple[Moment, ...],
        embedded: Sequence[torch.Tensor],
        tables: Tables,
    ) -> None:
        self._transformer = transformer
        self._rows = rows
        self._packed = packed
        """The sequence `(1, rows, hidden)`: text in its place, picture and sound overwritten by every step."""
        self._angles = angles
        self._schedule = schedule
        self._embedded = embedded
        self._tables = tables
        self._modalities = [moment.of_row * MINIMAX_H3_MODALITY_NUM + rows.token_tags for moment in schedule]

    @torch.no_grad()
    def step(self, number: int, video: torch.Tensor, audio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocities of the video rows `(1, rows, 96)` and audio rows `(1, rows, 32)` at a step. A collective.

        Args:
            number: of the step, from 0.
            video: latent rows `(1, rows, 96)`, conditions first.
            audio: latent rows `(1, rows, 32)`, references first.
        """
        model, rows, packed = self._transformer, self._rows, self._packed
        for project, latents, place in (
            (model.proj_in, video, rows.video_indices),
            (model.audio_proj_in, audio, rows.audio_indices),
        ):
            packed.index_copy_(1, place, project(latents.to(get_parameter_dtype(project))).to(packed.dtype))
        hidden_states = packed
        for block, table in zip(model.transformer_blocks, self._tables[number], strict=True):
            hidden_states = block(hidden_states, table, self._modalities[number], self._angles)
        hidden_states = model.norm_out(hidden_states, self._embedded[number], self._schedule[number].of_row)
        hidden_states = hidden_states.to(get_parameter_dtype(model.proj_out))
        return (
            model.proj_out(hidden_states).index_select(1, rows.video_indices),
            model.audio_proj_out(hidden_states).index_select(1, rows.audio_indices),
        )
