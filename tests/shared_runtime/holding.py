"""What ranks hold of a component, tensor by tensor: runs in the ranks of `tests.ranks`."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diffusion_service.parallel.tensor import DIT_PLAN
from encoder_service.parallel import TEXT_PLAN
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.worker import TaskHandle
from shared_runtime.sharding import Sharding
from shared_runtime.weights import load_text_encoder, load_transformer


@dataclass(frozen=True)
class Held:
    """One tensor as one rank holds it."""

    nbytes: int
    sha256: str


def text_encoder(comm: RankComm, _task: TaskHandle, path: Path) -> list[Mapping[str, Held]]:
    """By rank: every stored tensor of the text encoder that it holds, or its part of it."""
    return _everybody(comm, load_text_encoder(path, comm.device, Sharding(TEXT_PLAN, comm)))


def transformer(comm: RankComm, _task: TaskHandle, path: Path, partition: Any) -> list[Mapping[str, Held]]:
    """The same for a partition of the DiT."""
    return _everybody(comm, load_transformer(path, partition, comm.device, Sharding(DIT_PLAN, comm)))


def _everybody(comm: RankComm, module: nn.Module) -> list[Mapping[str, Held]]:
    mine = {name: _held(tensor) for name, tensor in module.state_dict().items()}
    told: list[Any] = [mine] * comm.world_size
    if comm.world_size > 1:
        dist.all_gather_object(told, mine, group=comm.world)
    return told


def _held(tensor: torch.Tensor) -> Held:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return Held(raw.numel(), hashlib.sha256(raw.numpy().data).hexdigest())
