"""What the leader hands to the other ranks, as each of them has it: runs in the ranks of `tests.ranks`."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh
from shared_runtime.ranks.worker import TaskHandle

Payload = dict[str, torch.Tensor | None]


def payload(nbytes: int) -> Payload:
    """About `nbytes` in all types that a payload has, with slots that are empty or absent."""
    random = torch.Generator().manual_seed(33)
    text = torch.randint(-(2**15), 2**15, (nbytes // 4 // 5120, 5120), dtype=torch.int16, generator=random)
    return {
        "text": text.view(torch.bfloat16),
        "turned": text[:7].view(torch.bfloat16).T,
        "roles": torch.arange(nbytes // 4 // 8),
        "rows": torch.arange(nbytes // 2 // 4, dtype=torch.float32).reshape(-1, 4),
        "none": None,
        "empty": torch.empty(0),
        "no rows": torch.empty((0, 96), dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
    }


def digest(held: Payload) -> str:
    """sha256 of names, types, shapes and bytes."""
    made = hashlib.sha256()
    for name, tensor in held.items():
        if tensor is None:
            made.update(f"{name} None".encode())
            continue
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        made.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def hand_over(comm: RankComm, _task: TaskHandle, members: tuple[int, ...], nbytes: int) -> list[str]:
    """The digest of what each rank holds after the first of `members` made it for them; empty outside of them."""
    group = comm.split(Mesh(tp=len(members)), members)
    mine = "" if group is None else digest(group.from_leader(lambda: payload(nbytes)))
    told: list[Any] = [None] * comm.world_size
    dist.all_gather_object(told, mine, group=comm.world)
    return told


def sums(comm: RankComm, _task: TaskHandle) -> list[tuple[int, int]]:
    """By rank: the sum of all numbers on its tensor-parallel line and on its Ulysses line."""
    told: list[Any] = [None] * comm.world_size
    dist.all_gather_object(told, (_sum(comm, "tp"), _sum(comm, "ulysses")), group=comm.world)
    return told


def _sum(comm: RankComm, axis: Any) -> int:
    number = torch.tensor([comm.spec.rank])
    if comm.group(axis) is not None:
        dist.all_reduce(number, group=comm.group(axis))
    return int(number)
