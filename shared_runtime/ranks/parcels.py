"""Tensors that some ranks have and others need, delivered in one collective. Runs in ranks; torch.

Every rank lists the same parcels in the same order, so that nothing but their bytes has to travel.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

import torch

from shared_runtime.ranks.comm import RankComm

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Parcel(Generic[K]):
    """A tensor of `shape` that rank `source` has and rank `target` needs, perhaps the same one."""

    key: K
    source: int
    target: int
    shape: tuple[int, ...]


def deliver(
    comm: RankComm, parcels: Sequence[Parcel[K]], content: Callable[[K], torch.Tensor], dtype: torch.dtype
) -> dict[K, torch.Tensor]:
    """What this rank is to receive, by key; `content` is asked for what it has. All parcels are of `dtype`.

    A collective: also for ranks that neither have nor need anything.
    """
    me = comm.spec.rank
    had = {parcel.key: content(parcel.key) for parcel in parcels if parcel.source == me}
    outgoing: list[list[torch.Tensor]] = [[] for _ in range(comm.world_size)]
    awaited: list[list[Parcel[K]]] = [[] for _ in range(comm.world_size)]
    received: dict[K, torch.Tensor] = {}
    for parcel in parcels:
        if parcel.source == me:
            tensor = had[parcel.key]
            assert (tensor.shape, tensor.dtype) == (parcel.shape, dtype), (parcel, tensor.shape, tensor.dtype)
            if parcel.target == me:
                received[parcel.key] = tensor
            else:
                outgoing[parcel.target].append(tensor.reshape(-1))
        elif parcel.target == me:
            awaited[parcel.source].append(parcel)
    sizes = [sum(prod(parcel.shape) for parcel in each) * dtype.itemsize for each in awaited]
    nothing = torch.empty(0, dtype=torch.uint8, device=comm.device)
    arrived = comm.exchange([torch.cat(each).view(torch.uint8) if each else nothing for each in outgoing], sizes)
    for flat, expected in zip(arrived, awaited, strict=True):
        lengths = [prod(parcel.shape) for parcel in expected]
        for parcel, part in zip(expected, torch.split(flat.view(dtype), lengths) if lengths else (), strict=True):
            received[parcel.key] = part.view(parcel.shape)
    return received
