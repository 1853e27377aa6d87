"""Made-up weights of a configuration's real shapes, for measurements without a checkpoint. Runs in ranks; torch.

Values come from the tensor's name alone and are made on the device that holds them, so that every rank of a group cuts
its part from the same tensor. What a trained model keeps near one or near zero is kept there, so that activations
stay finite through all layers; clips made from it are noise.
"""

import zlib
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

SPREAD = 0.02
"""Standard deviation of biases, and of what lies around something else than zero."""
BRANCH = 0.2
"""Gain of a layer whose output is added to its input."""


@dataclass(frozen=True)
class DummyTensor:
    """A tensor that is made when a part of it is read; see `shared_runtime.weights.TensorReader`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __getitem__(self, index: Any) -> torch.Tensor:
        """That part of it, on its device."""
        random = torch.Generator(self.device).manual_seed(zlib.crc32(self.name.encode()))
        made = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if made.ndim > 1:
            made.normal_(0.0, prod(self.shape[1:]) ** -0.5, generator=random)
        else:
            made.normal_(0.0, SPREAD, generator=random)
        around = self._centre()
        made = made.add_(around) if made.ndim == 1 else made.mul_(SPREAD).add_(around) if around else made
        part: torch.Tensor = made[index]
        return part

    def _centre(self) -> float:
        """What the values lie around: norms around one, residual branches below it, the rest around zero."""
        kind = self.name.rpartition(".")[2]
        if kind in ("weight_g", "alpha") or (kind == "weight" and len(self.shape) == 1):
            return 1.0
        return BRANCH if kind in ("scale1", "scale2") else 0.0
