"""Ulysses: every rank holds part of the packed sequence, and inside attention all of it for part of the heads.

Applied from outside by hooks on diffusers' `MiniMaxH3Transformer3DModel`. Lengths need not divide: rows are padded to
a multiple of the axis, and the padding is cut off before any attention sees it. Runs in diffusion ranks; torch.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diffusion_service.model.attention import Attend, DitAttention
from shared_runtime.ranks.comm import RankComm


class SequenceShard:
    """This rank's rows of the packed sequence of the forward under way."""

    def __init__(self, comm: RankComm) -> None:
        group = comm.group("ulysses")
        assert group is not None
        self.group = group
        self.size = comm.size("ulysses")
        self.index = comm.index("ulysses")
        self.length = 0
        """Rows of the whole sequence, since its rotary table was made."""

    @property
    def rows(self) -> int:
        """Rows that each rank holds, padding included."""
        return -(-self.length // self.size)

    def pad(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole sequence with zeros up to `rows * size`."""
        missing = self.rows * self.size - whole.shape[dim]
        if missing == 0:
            return whole
        shape = list(whole.shape)
        shape[dim] = missing
        return torch.cat([whole, whole.new_zeros(shape)], dim=dim)

    def local(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's rows of a whole sequence."""
        return self.pad(whole, dim).narrow(dim, self.index * self.rows, self.rows)

    def gather(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole sequence again, on every rank, without padding."""
        parts = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(parts, local.contiguous(), group=self.group)
        return torch.cat(parts, dim=dim).narrow(dim, 0, self.length)

    def to_heads(self, local: torch.Tensor) -> torch.Tensor:
        """`(1, rows, heads, dim)` to `(1, length, heads / size, dim)`."""
        _, rows, heads, width = local.shape
        sent = local[0].reshape(rows, self.size, heads // self.size, width).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.reshape(1, self.size * rows, heads // self.size, width)[:, : self.length]

    def to_rows(self, by_heads: torch.Tensor) -> torch.Tensor:
        """`(1, length, heads / size, dim)` to `(1, rows, heads, dim)`."""
        _, _, heads, width = by_heads.shape
        sent = self.pad(by_heads[0], 0).reshape(self.size, self.rows, heads, width).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.permute(1, 0, 2, 3).reshape(1, self.rows, self.size * heads, width)


def attend_by_heads(shard: SequenceShard, attend: Attend) -> Attend:
    """`attend` over all rows and this rank's heads, for this rank's rows and all heads."""

    def exchanged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return shard.to_rows(attend(shard.to_heads(query), shard.to_heads(key), shard.to_heads(value)))

    return exchanged


def shard_sequence(transformer: Any, comm: RankComm, attend: Attend) -> None:
    """Make `transformer` work on this rank's rows between its first block and its output heads.

    The rotary table says how many rows there are, so it is made before anything else of a sequence. The text refiner
    runs on every rank over all text rows: they are few, and every rank needs them.
    """
    shard = SequenceShard(comm)

    def begin(_rope: nn.Module, args: tuple[torch.Tensor]) -> None:
        shard.length = args[0].shape[0]

    def rotary(_rope: nn.Module, _args: Any, angles: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return tuple(shard.local(each, 0) for each in angles)

    def enter(_block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (shard.local(args[0], 1), *args[1:])

    def block_rows(_block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_states, temb, adaln_indices, angles = args
        return hidden_states, temb, shard.local(adaln_indices, 0), angles

    def norm_rows(_norm: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_states, temb, timestep_indices = args
        return hidden_states, temb, shard.local(timestep_indices, 0)

    def leave(_head: nn.Module, _args: Any, rows: torch.Tensor) -> torch.Tensor:
        return shard.gather(rows, 1)

    transformer.rope.register_forward_pre_hook(begin)
    transformer.rope.register_forward_hook(rotary)
    transformer.transformer_blocks[0].register_forward_pre_hook(enter)
    for block in transformer.transformer_blocks:
        block.register_forward_pre_hook(block_rows)
        block.attn.set_processor(DitAttention(attend_by_heads(shard, attend)))
    transformer.norm_out.register_forward_pre_hook(norm_rows)
    transformer.proj_out.register_forward_hook(leave)
    transformer.audio_proj_out.register_forward_hook(leave)
