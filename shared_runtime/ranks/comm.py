"""What ranks say to each other: one process group a rank group, one sub-group an axis. Runs in ranks; torch.

CPU tensors go over gloo and CUDA tensors over NCCL, so that both can be spoken at any time. The leader owns the
rendezvous, on a port that it chose itself: on loopback, or on its host's address in the cluster when there are ranks on
other hosts. Nobody else listens before the group is complete.
"""

import io
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shared_runtime.ranks.interfaces import interface_towards
from shared_runtime.ranks.mesh import Axis, Mesh, RankSpec
from shared_schema.errors import H3Error

T = TypeVar("T")

_JOIN_TIMEOUT = timedelta(seconds=120)
_COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Longer than any limit of ours: a hang is found by its missing beats, and ended from outside."""
_CHUNK_BYTES = 256 * 2**20
_PULSE_GAP_S = 0.2


class RankComm:
    """The collectives of one rank."""

    def __init__(self, spec: RankSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self._world: dist.ProcessGroup | None = None
        self._groups: dict[Axis, dist.ProcessGroup | None] = {"tp": None, "ulysses": None}
        self._agreed: H3Error | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the whole group."""
        return self.spec.world_size

    @property
    def is_leader(self) -> bool:
        """Whether this rank answers for the group."""
        return self.spec.is_leader

    def size(self, axis: Axis) -> int:
        """Ranks on an axis."""
        return self.spec.mesh.tp if axis == "tp" else self.spec.mesh.ulysses

    def index(self, axis: Axis) -> int:
        """This rank's place on an axis."""
        return self.spec.mesh.index(axis, self.spec.rank)

    @property
    def world(self) -> dist.ProcessGroup | None:
        """Torch's group of all ranks; None where this rank is alone."""
        return self._world

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """The process group of the ranks on this rank's line of the axis; None where it is alone."""
        return self._groups[axis]

    def connect(self, host: str, store: Store) -> None:
        """Join the group; returns once every rank has, and every sub-group has spoken on its device."""
        interface = interface_towards(host)
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=store, rank=self.spec.rank, world_size=self.world_size, timeout=_COLLECTIVE_TIMEOUT
        )
        self._world = dist.group.WORLD
        self._make_axes(tuple(range(self.world_size)))
        for group in (self._world, *self._groups.values()):
            if group is not None:
                self._greet(group)

    def _greet(self, group: dist.ProcessGroup) -> None:
        """A sum and an exchange: NCCL connects at the first of each kind, and no request is to wait for that."""
        received = torch.zeros(group.size(), device=self.device)
        dist.all_to_all_single(received, torch.ones_like(received), group=group)
        dist.all_reduce(received, group=group)
        if received.sum().item() != group.size() ** 2:
            raise RuntimeError(f"ranks of {group.size()} do not hear each other: {received.tolist()}")

    def split(self, mesh: Mesh, members: tuple[int, ...] | None = None) -> "RankComm | None":
        """A comm of some ranks of a whole group, numbered anew; None on the others. A collective of all ranks.

        `members` are in ascending order, the first ones if not named.
        """
        members = tuple(range(mesh.world_size)) if members is None else members
        inside = self.spec.rank in members
        number = members.index(self.spec.rank) if inside else -1
        comm = RankComm(replace(self.spec, mesh=mesh, rank=number), self.device)
        made = dist.new_group(list(members)) if len(members) > 1 else None
        comm._world = made if isinstance(made, dist.ProcessGroup) else None
        comm._make_axes(members)
        return comm if inside else None

    def _make_axes(self, members: tuple[int, ...]) -> None:
        """`members` are torch's numbers of this comm's ranks."""
        for axis in self._groups:
            for line in self.spec.mesh.groups(axis):
                # Every rank makes every group, also those it is not in: the calls must match.
                made = dist.new_group([members[rank] for rank in line]) if len(line) > 1 else None
                if self.spec.rank in line and isinstance(made, dist.ProcessGroup):
                    self._groups[axis] = made

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. A collective."""
        if self.world_size == 1:
            return flag
        seen = torch.tensor([flag], dtype=torch.uint8)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self._world)
        return bool(seen.item())

    def total(self, values: Sequence[float]) -> tuple[float, ...]:
        """The sums over all ranks, added up in one order: the same bits on each. A collective."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.world_size == 1:
            return tuple(mine.tolist())
        every = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(every, mine, group=self._world)
        return tuple(map(sum, zip(*(each.tolist() for each in every), strict=True)))

    def from_leader(self, make: Callable[[], T]) -> T:
        """What `make` returns on the leader, on every rank; tensors and arrays in it travel as they are. A collective.

        Only the leader calls `make`. An `H3Error` it raises is raised on every rank, so that all of them agree before
        the next collective; any other exception ends the group.
        """
        if self.world_size == 1:
            return make()
        value: object = None
        if self.is_leader:
            try:
                value = make()
            except H3Error as error:
                value = _Raised(error)
        value = self._spread(value)
        if isinstance(value, _Raised):
            self._agreed = value.error
            raise value.error
        return value  # type: ignore[return-value]

    def from_busy_leader(self, make: Callable[[Callable[[], None]], T], beat: Callable[[], None]) -> T:
        """`from_leader` for work that takes long: the others beat with the leader instead of falling silent.

        `make` is handed what it should call at its points of progress. A collective.
        """
        if self.world_size == 1:
            return make(beat)
        if not self.is_leader:
            while self.any(False):
                beat()
            return self.from_leader(_never)
        last = time.monotonic()

        def pulse() -> None:
            nonlocal last
            beat()
            if time.monotonic() - last >= _PULSE_GAP_S:
                last = time.monotonic()
                self.any(True)

        def work() -> T:
            try:
                return make(pulse)
            finally:
                self.any(False)

        return self.from_leader(work)

    def agree(self, error: H3Error | None) -> None:
        """Raise on every rank what one of them found, the lowest rank's, or go on on all. A collective."""
        if not self.any(error is not None):
            return
        found = [error]
        if self.world_size > 1:
            found = [None] * self.world_size
            dist.all_gather_object(found, error, group=self._world)
        self._agreed = next(each for each in found if each is not None)
        raise self._agreed

    def agreed(self, error: Exception) -> bool:
        """Whether every rank raised this error, so that none of them waits in a collective for another."""
        return error is self._agreed

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[int]) -> list[torch.Tensor]:
        """Send bytes to every rank and receive what they send: both have one entry a rank, which may be empty.

        A collective: ranks with nothing to say take part too. `outgoing` are flat uint8 tensors on this rank's device,
        `incoming` are sizes in bytes.
        """
        if self.world_size == 1:
            return list(outgoing)
        received = torch.empty(sum(incoming), dtype=torch.uint8, device=self.device)
        sizes = [each.numel() for each in outgoing]
        dist.all_to_all_single(received, torch.cat(list(outgoing)), list(incoming), sizes, group=self._world)
        return list(torch.split(received, list(incoming)))

    def _spread(self, value: object) -> object:
        if self.is_leader:
            skeleton, buffers = _take_apart(value)
            frame = (skeleton, [_Shape.of(buffer) for buffer in buffers])
            dist.broadcast_object_list([frame], group=self._world, group_src=0, device=torch.device("cpu"))
            for buffer in buffers:
                self._broadcast(_bytes_of(buffer))
            return value
        received: list[Any] = [None]
        dist.broadcast_object_list(received, group=self._world, group_src=0, device=torch.device("cpu"))
        skeleton, shapes = received[0]
        buffers = [shape.empty() for shape in shapes]
        for buffer in buffers:
            self._broadcast(_bytes_of(buffer))
        return _put_together(skeleton, buffers)

    def _broadcast(self, raw: torch.Tensor) -> None:
        for start in range(0, raw.numel(), _CHUNK_BYTES):
            dist.broadcast(raw[start : start + _CHUNK_BYTES], group=self._world, group_src=0)


def _never() -> NoReturn:
    raise AssertionError("only the leader makes values")


class _Raised:
    """An error of the leader on its way to the others."""

    def __init__(self, error: H3Error) -> None:
        self.error = error.with_traceback(None)


class _Shape:
    """A buffer without its bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, is_array: bool) -> None:
        self._shape, self._dtype, self._is_array = shape, dtype, is_array

    @classmethod
    def of(cls, buffer: "torch.Tensor | np.ndarray[Any, Any]") -> "_Shape":
        is_array = isinstance(buffer, np.ndarray)
        tensor = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
        return cls(tuple(tensor.shape), tensor.dtype, is_array)

    def empty(self) -> "torch.Tensor | np.ndarray[Any, Any]":
        tensor = torch.empty(self._shape, dtype=self._dtype)
        return tensor.numpy() if self._is_array else tensor


def _bytes_of(buffer: "torch.Tensor | np.ndarray[Any, Any]") -> torch.Tensor:
    tensor = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


class _Apart(pickle.Pickler):
    """Pickles everything but tensors and arrays, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.buffers: list[torch.Tensor | np.ndarray[Any, Any]] = []

    def persistent_id(self, obj: object) -> int | None:
        if isinstance(obj, torch.Tensor):
            self.buffers.append(obj.detach().cpu().contiguous())
        elif isinstance(obj, np.ndarray) and obj.dtype != object:
            self.buffers.append(np.ascontiguousarray(obj).reshape(obj.shape))
        else:
            return None
        return len(self.buffers) - 1


class _Together(pickle.Unpickler):
    """The other way round."""

    def __init__(self, file: io.BytesIO, buffers: "list[torch.Tensor | np.ndarray[Any, Any]]") -> None:
        super().__init__(file)
        self._buffers = buffers

    def persistent_load(self, pid: int) -> "torch.Tensor | np.ndarray[Any, Any]":
        return self._buffers[pid]


def _take_apart(value: object) -> "tuple[bytes, list[torch.Tensor | np.ndarray[Any, Any]]]":
    file = io.BytesIO()
    pickler = _Apart(file)
    pickler.dump(value)
    return file.getvalue(), pickler.buffers


def _put_together(skeleton: bytes, buffers: "list[torch.Tensor | np.ndarray[Any, Any]]") -> object:
    return _Together(io.BytesIO(skeleton), buffers).load()


def host_store(host: str, world_size: int) -> tuple[Store, int]:
    """The leader's rendezvous, listening on `host` alone: torch by itself would listen on every address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(world_size)
    port: int = listener.getsockname()[1]
    store: Store = TCPStore(
        host, port, world_size, True, _JOIN_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def join_store(host: str, port: int, world_size: int) -> Store:
    """A follower's end of the rendezvous."""
    store: Store = TCPStore(host, port, world_size, False, _JOIN_TIMEOUT)
    return store
