"""The DiT's blocks kept in host memory, each on the GPU only while it is near its turn. Diffusion ranks; torch.

A block's weights are one run of bytes on the host, page-locked in chunks, and one run of bytes in a slot on the GPU.
While a block computes, the next one is copied on a stream of its own. Where ranks hold the same weights, each may keep
its share of every block alone, and they gather a block when its turn comes.

On a CPU the slots are memory as well, so that the same code runs: same bits as without.
"""

import logging
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from shared_runtime.device_memory import PageLocker, pieces
from shared_runtime.weights import CACHE_LINE, weight_bytes

logger = logging.getLogger(__name__)

SLOTS = 2
"""Blocks on the GPU: one at work, one arriving. A copy takes an eighth of a block's time: more would hide no more."""
ALIGNMENT = 256
"""Bytes, of every weight on a GPU."""


class Blocks(Protocol):
    """The blocks of a partition, in order, each with its weights where it computes until the next one is asked for."""

    def __iter__(self) -> Iterator[nn.Module]:
        """All of them, once."""

    @property
    def resident_bytes(self) -> int:
        """What they always take on the rank's device."""

    @property
    def offloaded_bytes(self) -> int:
        """What they take of this rank's host memory."""


class ResidentBlocks:
    """`Blocks` whose weights stay where they were loaded."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self.offloaded_bytes = 0

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._blocks)

    @property
    def resident_bytes(self) -> int:
        """All of them."""
        return sum(weight_bytes(block) for block in self._blocks)


@dataclass(frozen=True)
class _Spot:
    """Where a weight lies in the bytes of its block."""

    parameter: nn.Parameter
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


class Run:
    """The weights of a module as one run of bytes in host memory, and where they are now."""

    def __init__(self, module: nn.Module, unit: int = 1) -> None:
        """Move the weights of `module` to the host; the run's length is a multiple of `unit` bytes."""
        self._spots: list[_Spot] = []
        end = 0
        for parameter in module.parameters():
            # A CPU's sums end in other bits where an operand begins elsewhere within a cache line.
            within = parameter.data_ptr() % CACHE_LINE if parameter.device.type == "cpu" else 0
            begin = -(-end // ALIGNMENT) * ALIGNMENT + within
            nbytes = parameter.numel() * parameter.element_size()
            self._spots.append(_Spot(parameter, begin, nbytes, parameter.dtype, parameter.shape))
            end = begin + nbytes
        self.nbytes = -(-end // unit) * unit
        self.host = _mapped(self.nbytes)
        for spot in self._spots:
            spot.within(self.host).copy_(spot.parameter.data)
        self.point_at(self.host)

    @property
    def weight_bytes(self) -> int:
        """Without what lies between the weights."""
        return sum(spot.nbytes for spot in self._spots)

    def point_at(self, flat: torch.Tensor) -> None:
        """Have the module compute with the weights in `flat`."""
        for spot in self._spots:
            spot.parameter.data = spot.within(flat)

    def keep_share(self, index: int, size: int) -> None:
        """Keep one of `size` equal parts; the module has no weights until it is pointed at all of them."""
        share = self.nbytes // size
        for spot in self._spots:
            spot.parameter.data = torch.empty(0, dtype=spot.dtype)
        kept = _mapped(share)
        self.host = kept.copy_(self.host[index * share : (index + 1) * share])

    def copy_to(self, flat: torch.Tensor, locker: PageLocker | None) -> None:
        """Copy what is kept to the start of `flat`, on the current stream."""
        for begin, end in pieces(self.host.numpy().data, locker):
            flat[begin:end].copy_(self.host[begin:end], non_blocking=True)


def _mapped(nbytes: int) -> torch.Tensor:
    """Host memory that begins at a page of its own: pages are locked whole, and each only once."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def lock(runs: Sequence[Run], locker: PageLocker | None, what: str) -> None:
    """Page-lock the host memory of all runs as far as that goes, and say how far."""
    whole = sum(each.host.numel() for each in runs)
    if locker is None:
        logger.info("%s: %d MiB in host memory, not page-locked", what, whole >> 20)
        return
    locked = 0
    for each in runs:
        done, reason = locker.extend(each.host.numpy().data)
        locked += done
        if reason is not None:
            logger.warning(
                "%s: page-locked %d of %d MiB, the rest is copied slower: %s", what, locked >> 20, whole >> 20, reason
            )
            return
    logger.info("%s: %d MiB in page-locked host memory", what, whole >> 20)


class StreamedBlocks:
    """`Blocks` that come from host memory, this rank's own or a group's together."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        device: torch.device,
        locker: PageLocker | None,
        *,
        resident: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Take the weights of all blocks to the host but the first `resident`; over `group`, a share of each."""
        self._blocks = blocks = list(blocks)
        self._resident = min(resident, len(blocks))
        self._device = device
        self._locker = locker
        self._group = group
        self._size = 1 if group is None else group.size()
        for block in blocks[: self._resident]:
            block.to(device)
        self._runs = [Run(block, ALIGNMENT * self._size) for block in blocks[self._resident :]]
        self._room = max((each.nbytes for each in self._runs), default=0)
        self._count = min(SLOTS, len(self._runs))
        if group is not None:
            for each in self._runs:
                each.keep_share(group.rank(), self._size)
        lock(self._runs, locker, "offloaded blocks")
        self._slots = [self._bytes(self._room) for _ in range(self._count)]
        self._shares = [self._bytes(self._room // self._size) for _ in range(self._count if group else 0)]
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._arrived: list[torch.cuda.Event | None] = [None] * self._count
        self._used: list[torch.cuda.Event | None] = [None] * self._count
        self._next = self._asked = 0
        """Turns taken and copies begun, over all passes; turn `t` is in slot `t % count`."""
        self.waited: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        """Where a benchmark puts a list: before and after each wait for a block."""

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)

    @property
    def resident_bytes(self) -> int:
        """Blocks that stay, and the slots."""
        staying = sum(weight_bytes(block) for block in self._blocks[: self._resident])
        return staying + sum(each.numel() for each in (*self._slots, *self._shares))

    @property
    def offloaded_bytes(self) -> int:
        """Of this rank's own host memory."""
        return sum(each.host.numel() for each in self._runs)

    def __iter__(self) -> Iterator[nn.Module]:
        yield from self._blocks[: self._resident]
        if self._runs and self._next % len(self._runs):
            self._begin_anew()
        for block, run in zip(self._blocks[self._resident :], self._runs, strict=True):
            while self._asked < self._next + self._count:
                self._fetch(self._asked)
                self._asked += 1
            slot = self._next % self._count
            self._wait(self._arrived[slot])
            run.point_at(self._slots[slot])
            yield block
            self._used[slot] = self._mark()
            self._next += 1

    def _begin_anew(self) -> None:
        """After a pass that broke off, what lies in the slots is not what comes next."""
        self._used = [self._mark()] * self._count
        self._next = self._asked = 0

    def _mark(self) -> torch.cuda.Event | None:
        return None if self._side is None else torch.cuda.current_stream(self._device).record_event()

    def _wait(self, arrived: torch.cuda.Event | None) -> None:
        if arrived is None:
            return
        main = torch.cuda.current_stream(self._device)
        if self.waited is None:
            main.wait_event(arrived)
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        main.record_event(before)
        main.wait_event(arrived)
        main.record_event(after)
        self.waited.append((before, after))

    def _fetch(self, turn: int) -> None:
        """Begin to bring the block of a turn into its slot, once the slot's last block has computed."""
        run, slot = self._runs[turn % len(self._runs)], turn % self._count
        if self._side is None:
            self._bring(run, slot)
            return
        used = self._used[slot]
        if used is None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._side.wait_event(used)
        with torch.cuda.stream(self._side):
            self._bring(run, slot)
            self._arrived[slot] = self._side.record_event()

    def _bring(self, run: Run, slot: int) -> None:
        target = self._slots[slot][: run.nbytes]
        if self._group is None:
            run.copy_to(target, self._locker)
            return
        share = self._shares[slot][: run.nbytes // self._size]
        run.copy_to(share, self._locker)
        if self._side is None:
            dist.all_gather(list(target.chunk(self._size)), share, group=self._group)
        else:
            dist.all_gather_into_tensor(target, share, group=self._group)
