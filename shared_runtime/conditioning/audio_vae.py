"""The audio VAE's encoder in a group: the leader runs it, every rank has the result. Runs in ranks; torch."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shared_runtime.conditioning.side_stream import SideStream
from shared_runtime.ranks.comm import RankComm
from shared_runtime.tensor_float import tensor_float


@dataclass(frozen=True)
class _Mode:
    """A posterior of which only the mode is asked."""

    latents: torch.Tensor

    def mode(self) -> torch.Tensor:
        return self.latents


class LeaderAudioVae:
    """The audio VAE's encoder half on the leader alone; `encode` is a collective whose result every rank gets.

    On a GPU it works on a stream of its own: sounds are many small kernels, which run beside the pictures' large ones.
    """

    def __init__(self, vae: Any | None, comm: RankComm) -> None:
        self._vae = vae
        self._comm = comm
        self._begun: deque[torch.Tensor] = deque()
        self._side = SideStream(comm.device)
        self.config = comm.from_leader(lambda: None if vae is None else vae.config)

    @contextmanager
    def begun(self, waveforms: Sequence[torch.Tensor]) -> Iterator[None]:
        """Begin the work of the calls of `encode` within it, whose waveforms these are, in order.

        No collective: the leader's GPU gets work that nobody waits for yet, and the other ranks go on with theirs. What
        nobody asked for, because something failed, is gone afterwards.
        """
        try:
            if self._vae is not None:
                with self._side.aside():
                    self._begun.extend(self._encoded(each.to(self._comm.device)) for each in waveforms)
            yield
        finally:
            self._begun.clear()

    def encode(self, waveform: torch.Tensor, return_dict: bool = True) -> tuple[_Mode]:
        """The latents' mode for a batch of mono waveforms `(channels, 1, samples)`, on every rank."""
        del return_dict
        return (_Mode(self._comm.from_leader(lambda: self._arrived(waveform))),)

    def _arrived(self, waveform: torch.Tensor) -> torch.Tensor:
        if not self._begun:
            return self._encoded(waveform)
        latents = self._begun.popleft()
        self._side.join(latents)
        return latents

    def _encoded(self, waveform: torch.Tensor) -> torch.Tensor:
        assert self._vae is not None
        with tensor_float(False):
            latents: torch.Tensor = self._vae.encode(waveform, return_dict=False)[0].mode()
        return latents
