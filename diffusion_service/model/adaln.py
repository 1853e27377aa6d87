"""AdaLN tables of a whole schedule, made once a request: with one GPU, what makes them needs no room on it.

13 of the DiT's 33 billion parameters only map timesteps to modulation, and the timesteps of a request are known before
its first step. Every table is made by the product that the block itself would have made, from as many rows: same bits.
Diffusion ranks; torch.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

logger = logging.getLogger(__name__)

Tables = tuple[tuple[torch.Tensor, ...], ...]
"""By step, then by block: `(timesteps x modalities, 6 x hidden)`."""
Parameters = dict[str, torch.Tensor]
Kind = tuple[str, torch.Size, torch.dtype]

_SLOTS = 2
"""Projections on the GPU at a time when they live on the host: one in use, one arriving."""


class GivenTable(nn.Module):
    """Stands in a block where its `adaln_proj` stood, and is handed the finished table instead of the timesteps."""

    def forward(self, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Shift, scale and gate of attention and of feed-forward, each `(timesteps x modalities, hidden)`."""
        return table.chunk(6, dim=-1)


class Modulation:
    """The AdaLN projections of all blocks, taken out of them, and the tables of the schedule asked for last."""

    def __init__(
        self, transformer: Any, *, on_host: bool, device: torch.device | None = None, pinned: bool = True
    ) -> None:
        """Take the projections of `transformer`; with `on_host` to memory of the host, page-locked where `pinned`.

        `device` is where products are made; None: where the projections are now.
        """
        self._projections: list[nn.Module] = []
        for block in transformer.transformer_blocks:
            self._width = 6 * block.adaln_proj.hidden_size
            self._projections.append(block.adaln_proj.linear)
            block.adaln_proj = GivenTable()
        bias = self._projections[0].bias
        assert isinstance(bias, nn.Parameter)  # never quantized, as weights may be
        self._device, self._dtype = bias.device if device is None else device, bias.dtype
        self._on_host = on_host
        self._made: tuple[tuple[bytes, ...], Tables] | None = None
        if on_host:
            for projection in self._projections:
                _to_host(projection, pinned=pinned)
            logger.info("AdaLN: %d MiB of projections stay on the host", self.weight_bytes >> 20)

    @property
    def weight_bytes(self) -> int:
        """Of all projections, wherever they are."""
        return sum(p.numel() * p.element_size() for each in self._projections for p in each.parameters())

    @property
    def resident_bytes(self) -> int:
        """What of them stays on the GPU."""
        return 0 if self._on_host else self.weight_bytes

    @property
    def offloaded_bytes(self) -> int:
        """What of them stays on the host."""
        return self.weight_bytes - self.resident_bytes

    @property
    def projections(self) -> Sequence[nn.Module]:
        """Those of the blocks, in their order."""
        return self._projections

    def forget(self) -> None:
        """The projections have other weights now: tables that were made of them hold no more."""
        self._made = None

    def tables(self, timesteps: Sequence[torch.Tensor], embedded: Sequence[torch.Tensor]) -> Tables:
        """The tables of a schedule: those of the last call if its timesteps were the same. A collective.

        Args:
            timesteps: the distinct timesteps of each step, `(n,)`, on any device.
            embedded: their embeddings, `(n, time_embed_dim)`.
        """
        key = tuple(each.cpu().numpy().tobytes() for each in timesteps)
        if self._made is None or self._made[0] != key:
            self._made = None
            self._made = key, self._make(embedded)
        return self._made[1]

    def _make(self, embedded: Sequence[torch.Tensor]) -> Tables:
        # As `MiniMaxH3AdaLayerNormModulation`: activate in the embedding's precision, cast to the projection's after.
        activated = [nn.functional.silu(each).to(self._dtype) for each in embedded]
        by_block = [
            [functional_call(projection, parameters, (each,)).view(-1, self._width) for each in activated]
            for projection, parameters in self._present()
        ]
        return tuple(zip(*by_block, strict=True))

    def _present(self) -> Iterator[tuple[nn.Module, Parameters]]:
        """Every projection with its parameters on the rank's device."""
        if self._on_host:
            return self._streamed()
        return ((each, dict(each.named_parameters())) for each in self._projections)

    def _streamed(self) -> Iterator[tuple[nn.Module, Parameters]]:
        """The next projection is copied while the products of this one are made."""
        main, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        every = {_kind(name, p): p for each in self._projections for name, p in each.named_parameters()}
        slots = [{kind: torch.empty_like(p, device=self._device) for kind, p in every.items()} for _ in range(_SLOTS)]
        side.wait_stream(main)
        arriving = self._copy(0, slots[0], side)
        used = main.record_event()
        for number, projection in enumerate(self._projections):
            main.wait_event(arriving)
            side.wait_event(used)
            if number + 1 < len(self._projections):
                arriving = self._copy(number + 1, slots[(number + 1) % _SLOTS], side)
            slot = slots[number % _SLOTS]
            yield projection, {name: slot[_kind(name, p)] for name, p in projection.named_parameters()}
            used = main.record_event()

    def _copy(self, number: int, slot: "dict[Kind, torch.Tensor]", side: torch.cuda.Stream) -> torch.cuda.Event:
        with torch.cuda.stream(side):
            for name, parameter in self._projections[number].named_parameters():
                slot[_kind(name, parameter)].copy_(parameter, non_blocking=True)
        copied: torch.cuda.Event = side.record_event()
        return copied


def _kind(name: str, parameter: torch.Tensor) -> Kind:
    """What projections have in common; where FP8 leaves a block as it is, its projection has other parameters."""
    return name, parameter.shape, parameter.dtype


def _to_host(module: nn.Module, *, pinned: bool) -> None:
    for parameter in module.parameters():
        parameter.data = _host_memory(parameter, pinned=pinned).copy_(parameter)


def _host_memory(like: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    """Page-locked if asked for and if the system allows as much."""
    if pinned:
        try:
            return torch.empty_like(like, device="cpu", pin_memory=True)
        except RuntimeError as error:
            logger.warning("AdaLN: a projection is not page-locked and copied slower: %s", str(error).splitlines()[0])
    return torch.empty_like(like, device="cpu")
