"""The audio VAE's encoder in a group: the leader runs it, every rank has the result. Runs in ranks; torch."""

from dataclasses import dataclass
from typing import Any

import torch

from shared_runtime.ranks.comm import RankComm
from shared_runtime.tensor_float import tensor_float


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
            with tensor_float(False):
                latents: torch.Tensor = self._vae.encode(waveform, return_dict=False)[0].mode()
            return latents

        return (_Mode(self._comm.from_leader(encode)),)
