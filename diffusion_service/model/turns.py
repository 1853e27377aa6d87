"""Whole modules that take turns on the GPU: the transformer while it denoises, the decoders while they decode. Torch.

Runs in diffusion ranks.
"""

from collections.abc import Sequence

import torch
from torch import nn

from diffusion_service.model.offload import Run, lock
from shared_runtime.device_memory import PageLocker

DECODERS = "decoders"
"""Their name; a transformer's is its partition."""


class Parked:
    """Modules whose weights wait in host memory until it is their turn."""

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, locker: PageLocker | None, what: str
    ) -> None:
        """Take their weights to the host; buffers, which are small, stay."""
        self._device = device
        self._locker = locker
        self._runs = [Run(module) for module in modules if any(True for _ in module.parameters())]
        lock(self._runs, locker, what)
        self._here = False

    @property
    def nbytes(self) -> int:
        """On the host always, on the device as well while it is their turn."""
        return sum(each.nbytes for each in self._runs)

    @property
    def weight_bytes(self) -> int:
        """Of the weights themselves."""
        return sum(each.weight_bytes for each in self._runs)

    def come(self) -> None:
        """Bring the weights onto the device."""
        if self._here:
            return
        for run in self._runs:
            flat = torch.empty(run.nbytes, dtype=torch.uint8, device=self._device)
            run.copy_to(flat, self._locker)
            run.point_at(flat)
        self._here = True

    def go(self) -> None:
        """Give their memory on the device back: weights never change, so nothing is copied."""
        for run in self._runs:
            run.point_at(run.host)
        self._here = False


class Turns:
    """Who is on the device: one of several, or nobody."""

    def __init__(self) -> None:
        self._parked: dict[str, Parked] = {}

    def park(self, name: str, parked: Parked) -> None:
        """One more that waits for its turn."""
        self._parked[name] = parked

    def take(self, name: str) -> None:
        """Only `name` is on the device from here on; a name that nothing is parked under is there always."""
        for other, parked in self._parked.items():
            if other != name:
                parked.go()
        if name in self._parked:
            self._parked[name].come()

    @property
    def weight_bytes(self) -> int:
        """Of all that is parked."""
        return sum(each.weight_bytes for each in self._parked.values())

    @property
    def resident_bytes(self) -> int:
        """At most, at any time."""
        return max((each.nbytes for each in self._parked.values()), default=0)

    @property
    def offloaded_bytes(self) -> int:
        """Of host memory."""
        return sum(each.nbytes for each in self._parked.values())
