"""Qwen3-VL's vision attention over all pictures and frames at once. Runs in encoder ranks; torch.

Transformers' own takes them one by one, asks the GPU for their lengths three times a layer, and waits each time: the
two frames a second of a video are some thousand small calls. Frames of one video have one size, so that they are a
batch; what has another size is a batch of its own.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision


def batch_vision(text_encoder: Any) -> None:
    """Put it into every block of the vision tower."""
    borders = Borders()
    for block in text_encoder.model.visual.blocks:
        block.attn = BatchedAttention(block.attn, borders)


class Borders:
    """The runs of pictures of one size, read from the device once for all layers."""

    def __init__(self) -> None:
        self._of: torch.Tensor | None = None
        self._runs: tuple[tuple[int, int], ...] = ()

    def runs(self, cumulative: torch.Tensor) -> tuple[tuple[int, int], ...]:
        """Pictures and patches of each, by run; `cumulative` is 0 and the end of every picture in the sequence."""
        if self._of is not cumulative:
            self._of, self._runs = cumulative, runs_of(cumulative.diff().tolist())
        return self._runs


def runs_of(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """How often each length follows itself, and the length."""
    return tuple((len(list(same)), length) for length, same in groupby(lengths))


class BatchedAttention(nn.Module):
    """Stands where `Qwen3VLVisionAttention` stood, with its weights."""

    def __init__(self, stock: Any, borders: Borders) -> None:
        super().__init__()
        self.qkv, self.proj = stock.qkv, stock.proj
        self._heads: int = stock.num_heads
        self._borders = borders

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """Attention within every picture of `(patches, channels)`."""
        patches = hidden_states.shape[0]
        query, key, value = self.qkv(hidden_states).reshape(patches, 3, self._heads, -1).unbind(1)
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        made, begin = [], 0
        for count, length in self._borders.runs(cu_seqlens):
            end = begin + count * length
            parts = (each[begin:end].unflatten(0, (count, length)).transpose(1, 2) for each in (query, key, value))
            attended = functional.scaled_dot_product_attention(*parts)
            made.append(attended.transpose(1, 2).reshape(count * length, -1))
            begin = end
        projected: torch.Tensor = self.proj(torch.cat(made))
        return projected
