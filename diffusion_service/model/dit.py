"""One DiT partition, driven request by request: what no step changes is computed before the first. Torch.

The modules are diffusers', called in the order of `MiniMaxH3Transformer3DModel.forward`; results are its, bit for bit.
Runs in diffusion ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from diffusers.models.modeling_utils import get_parameter_dtype
from diffusers.models.transformers.transformer_minimax_h3 import MINIMAX_H3_MODALITY_NUM
from torch import nn

from diffusion_service.model.adaln import Modulation, Tables
from diffusion_service.model.offload import Blocks, ResidentBlocks
from diffusion_service.model.reuse import FirstBlockCache, Reuse, Total


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
        """From the `denoiser_input_fields` of diffusers' layout block."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Moment:
    """One step of the schedule."""

    timesteps: torch.Tensor
    """The distinct timesteps of the rows, `(n,)`."""
    of_row: torch.Tensor
    """Which of them a row has, `(rows,)`."""


class Split(Protocol):
    """Which rows of the packed sequence this rank's blocks work on."""

    def begin(self, length: int) -> None:
        """From here on the sequence has `length` rows."""

    def local(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's rows of a whole sequence, which lie along `dim`."""

    def gather(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole sequence again, on every rank. A collective."""


class Whole:
    """A `Split` for a rank that works on all rows."""

    def begin(self, length: int) -> None:
        """See `Split`."""

    def local(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """See `Split`."""
        return whole

    def gather(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """See `Split`."""
        return local


class Dit:
    """A transformer partition whose AdaLN projections are `modulation`, over the rows that `split` gives this rank."""

    def __init__(
        self,
        transformer: Any,
        modulation: Modulation,
        split: Split | None = None,
        blocks: Blocks | None = None,
        total: Total = tuple,
    ) -> None:
        """`blocks` are the transformer's; None: they have all their weights where they compute.

        `total` is over all ranks of the group; one rank alone is its own sum.
        """
        self.transformer = transformer
        self.modulation = modulation
        self.split = split or Whole()
        self.blocks = ResidentBlocks(transformer.transformer_blocks) if blocks is None else blocks
        self._total: Total = total

    @torch.no_grad()
    def warm_up(self, rows: int) -> None:
        """Compile the blocks, before anybody waits for it: one block over `rows` rows serves all of its kind.

        A collective. Kinds differ where FP8 leaves some blocks as they are.

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
        self.split.begin(rows)
        sequence = self.split.local(torch.zeros(1, rows, hidden, **like), 1)
        angles = (self.split.local(angles[0], 0), self.split.local(angles[1], 0))
        left = {_kind(block) for block in model.transformer_blocks}
        for block in self.blocks:
            if (kind := _kind(block)) in left:
                block(sequence, table, self.split.local(modalities, 0), angles)
                left.remove(kind)
            if not left:
                break

    @torch.no_grad()
    def begin(
        self, text: torch.Tensor, rows: Rows, schedule: Sequence[Moment], reuse: Reuse | None = None
    ) -> "Denoising":
        """Everything of a request that its steps share. A collective.

        Args:
            text: `(1, tokens, text_dim)`, as the encoder made it.
            rows: the packed sequence.
            schedule: its steps, in order.
            reuse: how blocks may be left out; None: every step runs all of them.
        """
        model, split = self.transformer, self.split
        split.begin(len(rows.position_ids))
        angles = model.rope(rows.position_ids)
        # The bias is never quantized, as the weight may be.
        text = model.token_refiner(model.context_embedder(text.to(model.context_embedder.bias.dtype)))
        packed = text.new_zeros((1, len(rows.position_ids), text.shape[-1]))
        packed.index_copy_(1, rows.text_indices, text)
        float_ = get_parameter_dtype(model.time_embedder)
        embedded = [model.time_embedder(model.time_proj(moment.timesteps).to(float_)) for moment in schedule]
        cosine, sine = (split.local(each.to(packed.dtype), 0) for each in angles)
        return Denoising(
            model,
            split,
            self.blocks,
            rows,
            packed,
            (cosine, sine),
            schedule,
            embedded,
            self.modulation.tables([moment.timesteps for moment in schedule], embedded),
            None if reuse is None else self._cache(reuse, len(rows.position_ids)),
        )

    def _cache(self, reuse: Reuse, length: int) -> FirstBlockCache:
        whole = torch.zeros(len(reuse.streams), length, device=reuse.streams[0].device)
        for stream, denoised in zip(whole, reuse.streams, strict=True):
            stream[denoised] = 1
        return FirstBlockCache(reuse.profile, self.split.local(whole, 1), self._total)


def _kind(block: nn.Module) -> tuple[type[nn.Module], ...]:
    """Blocks of one kind are one graph."""
    return tuple(type(module) for module in block.modules())


class Denoising:
    """One request on its way through a `Dit`."""

    def __init__(
        self,
        transformer: Any,
        split: Split,
        blocks: Blocks,
        rows: Rows,
        packed: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        schedule: Sequence[Moment],
        embedded: Sequence[torch.Tensor],
        tables: Tables,
        cache: FirstBlockCache | None,
    ) -> None:
        self._transformer = transformer
        self._split = split
        self._blocks = blocks
        self._rows = rows
        self._packed = packed
        """The sequence `(1, rows, hidden)`: text in its place, picture and sound overwritten by every step."""
        self._angles = angles
        """Of this rank's rows, as the next two."""
        self._moments = [split.local(moment.of_row, 0) for moment in schedule]
        tags = split.local(rows.token_tags, 0)
        self._modalities = [of_row * MINIMAX_H3_MODALITY_NUM + tags for of_row in self._moments]
        self._embedded = embedded
        self._tables = tables
        self._cache = cache

    @property
    def skipped(self) -> int:
        """Steps so far that ended after the first block."""
        return 0 if self._cache is None else self._cache.skips.skipped

    @torch.no_grad()
    def step(self, number: int, video: torch.Tensor, audio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocities of the video rows `(1, rows, 96)` and audio rows `(1, rows, 32)` at a step. A collective.

        Args:
            number: of the step, from 0.
            video: latent rows `(1, rows, 96)`, conditions first.
            audio: latent rows `(1, rows, 32)`, references first.
        """
        model, split, rows, packed = self._transformer, self._split, self._rows, self._packed
        for project, latents, place in (
            (model.proj_in, video, rows.video_indices),
            (model.audio_proj_in, audio, rows.audio_indices),
        ):
            packed.index_copy_(1, place, project(latents.to(get_parameter_dtype(project))).to(packed.dtype))
        hidden_states = self._through_blocks(number, split.local(packed, 1))
        hidden_states = model.norm_out(hidden_states, self._embedded[number], self._moments[number])
        hidden_states = hidden_states.to(get_parameter_dtype(model.proj_out))
        return (
            split.gather(model.proj_out(hidden_states), 1).index_select(1, rows.video_indices),
            split.gather(model.audio_proj_out(hidden_states), 1).index_select(1, rows.audio_indices),
        )

    def _through_blocks(self, number: int, hidden_states: torch.Tensor) -> torch.Tensor:
        cache = self._cache
        for place, (block, table) in enumerate(zip(self._blocks, self._tables[number], strict=True)):
            made = block(hidden_states, table, self._modalities[number], self._angles)
            if cache is not None and place == 0:
                reused = cache.reuse(hidden_states, made)
                if reused is not None:
                    # Blocks that were copied ahead stay where they are, for the next step.
                    return reused
            hidden_states = made
        if cache is not None:
            cache.keep(hidden_states)
        return hidden_states
