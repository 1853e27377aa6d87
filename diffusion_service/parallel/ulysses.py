"""Ulysses: every rank holds part of the packed sequence, and inside attention all of it for part of the heads.

Applied from outside by hooks on diffusers' `MiniMaxH3Transformer3DModel`. Lengths need not divide: rows are padded to
a multiple of the axis, and the padding is cut off before any attention sees it. Runs in diffusion ranks; torch.
"""

from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention, _apply_rotary_emb
from torch import nn

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
        """Rows of the whole sequence."""

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


class UlyssesProcessor:
    """diffusers' attention of one block, with the exchange of rows for heads around the product."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, shard: SequenceShard) -> None:
        self._shard = shard

    def __call__(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`(1, rows, hidden)` to the same; `rotary_emb` is of this rank's rows."""
        query, key, value = (
            project(hidden_states).unflatten(-1, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        if rotary_emb is not None:
            query, key = _apply_rotary_emb(query, *rotary_emb), _apply_rotary_emb(key, *rotary_emb)
        product = dispatch_attention_fn(
            self._shard.to_heads(query),
            self._shard.to_heads(key),
            self._shard.to_heads(value),
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
        )
        joined: torch.Tensor = self._shard.to_rows(product).flatten(2, 3).type_as(query)
        return attn.to_out[1](attn.to_out[0](joined))  # type: ignore[no-any-return]


def shard_sequence(transformer: Any, comm: RankComm) -> None:
    """Make `transformer` work on this rank's rows between its first block and its output heads.

    The text refiner runs on every rank over all text rows: they are few, and every rank needs them.
    """
    shard = SequenceShard(comm)

    def begin(_model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        shard.length = kwargs["position_ids"].shape[0]

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

    transformer.register_forward_pre_hook(begin, with_kwargs=True)
    transformer.rope.register_forward_hook(rotary)
    transformer.transformer_blocks[0].register_forward_pre_hook(enter)
    for block in transformer.transformer_blocks:
        block.register_forward_pre_hook(block_rows)
        block.attn.set_processor(UlyssesProcessor(shard))
    transformer.norm_out.register_forward_pre_hook(norm_rows)
    transformer.proj_out.register_forward_hook(leave)
    transformer.audio_proj_out.register_forward_hook(leave)
