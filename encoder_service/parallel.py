"""How the encoder's models are spread over its ranks: text cut, pictures in tiles, sound on the leader. Torch."""

from dataclasses import dataclass
from typing import Any

import torch

from shared_runtime.ranks.comm import RankComm
from shared_runtime.sharding import Cut, ShardPlan

TEXT_PLAN: ShardPlan = {
    "model.language_model.layers.*.self_attn.[qkv]_proj": Cut.COLUMN,
    "model.language_model.layers.*.self_attn.o_proj": Cut.ROW,
    "model.language_model.layers.*.mlp.gate_proj": Cut.COLUMN,
    "model.language_model.layers.*.mlp.up_proj": Cut.COLUMN,
    "model.language_model.layers.*.mlp.down_proj": Cut.ROW,
}
"""Attention by heads and the MLP by channels. The vision tower (0.6 of 24.5 billion parameters) and the embeddings are
replicated: cutting them would save 2 % and cost a collective a layer.
"""


@dataclass(frozen=True)
class _Mode:
    """A posterior of which only the mode is asked."""

    latents: torch.Tensor

    def mode(self) -> torch.Tensor:
        return self.latents


class LeaderAudioVae:
    """The audio VAE's encoder half on the leader alone; `encode` is a collective whose result every rank gets."""

    def __init__(self, vae: Any | None, comm: RankComm) -> None:
        self._vae = vae
        self._comm = comm
        self.config = comm.from_leader(lambda: None if vae is None else vae.config)

    def encode(self, waveform: torch.Tensor, return_dict: bool = True) -> tuple[_Mode]:
        """The latents' mode for a batch of mono waveforms `(channels, 1, samples)`, on every rank."""
        del return_dict

        def encode() -> torch.Tensor:
            assert self._vae is not None
            latents: torch.Tensor = self._vae.encode(waveform, return_dict=False)[0].mode()
            return latents

        return (_Mode(self._comm.from_leader(encode)),)
