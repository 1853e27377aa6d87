"""What ranks say to each other, tried on whatever ranks there are: runs in the ranks of `tests.ranks`."""

import time
from typing import Any

import torch
import torch.distributed as dist

from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.parcels import Parcel, deliver
from shared_runtime.ranks.worker import TaskHandle
from shared_schema.errors import H3Error, InvalidRequest, NotFinite


def ring(comm: RankComm, _task: TaskHandle, dtype: torch.dtype) -> bool:
    """Every rank sends to itself, to the next one and, all but the last, to the leader; some tensors are empty."""
    size, me = comm.world_size, comm.spec.rank
    parcels = [Parcel(("own", r), r, r, (2, 3)) for r in range(size)]
    parcels += [Parcel(("next", r), r, (r + 1) % size, (r, 5)) for r in range(size)]
    parcels += [Parcel(("leader", r), r, 0, (4,)) for r in range(size - 1)]

    def content(key: tuple[str, int]) -> torch.Tensor:
        shape = next(parcel.shape for parcel in parcels if parcel.key == key)
        return torch.full((*shape, 2), key[1] + 1).to(dtype)[..., 0]

    got = deliver(comm, parcels, content, dtype)
    wanted = {parcel.key: parcel for parcel in parcels if parcel.target == me}
    right = got.keys() == wanted.keys() and all(torch.equal(got[key], content(key)) for key in wanted)
    return all(_everybody(comm, right))


def nothing(comm: RankComm, _task: TaskHandle) -> bool:
    """A delivery in which no rank takes part with anything."""
    parcels: list[Parcel[int]] = []
    return deliver(comm, parcels, lambda _: torch.empty(0), torch.float32) == {}


def agree(comm: RankComm, _task: TaskHandle, guilty: tuple[int, ...]) -> list[str]:
    """What every rank raises when `guilty` ranks found something."""
    mine = NotFinite(f"rank {comm.spec.rank}", slot="x") if comm.spec.rank in guilty else None
    raised = "nothing"
    try:
        comm.agree(mine)
    except NotFinite as error:
        raised = error.message if comm.agreed(error) else "not agreed"
    return _everybody(comm, raised)


def total(comm: RankComm, _task: TaskHandle) -> list[tuple[str, ...]]:
    """What every rank has as the sums of numbers that add up to other bits in another order."""
    mine = 10.0 ** (16 - 5 * comm.spec.rank) / 3
    return _everybody(comm, tuple(each.hex() for each in comm.total([mine, -1.0])))


def busy(comm: RankComm, _task: TaskHandle, seconds: float, fails: bool) -> list[tuple[str, int]]:
    """What every rank got from a leader at work for `seconds`, and how often it beat meanwhile."""
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1

    def work(tell: Any) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
            tell()
        if fails:
            raise InvalidRequest("no good")
        return "done"

    try:
        result = comm.from_busy_leader(work, beat)
    except H3Error as error:
        result = error.message
    return _everybody(comm, (result, beats))


def _everybody(comm: RankComm, mine: Any) -> list[Any]:
    told = [mine] * comm.world_size
    if comm.world_size > 1:
        dist.all_gather_object(told, mine, group=comm.world)
    return told
