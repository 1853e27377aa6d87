"""Tensors and a slab, with nothing in between: page-locking, and copies to and from a device. Runs in ranks; torch.

A copy between a device and page-locked memory runs at the full rate of the bus and beside the host's work; from memory
that is not, the driver first copies into a small buffer of its own. Everything here works on a CPU as well.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import xxhash

logger = logging.getLogger(__name__)

LOCK_CHUNK = 256 * 2**20
"""Bytes locked by one call: a call holds the driver's lock for its whole time, and fails as a whole."""
COPY_PIECE = 8 * 2**20
"""Bytes of one copy: the checksum of a piece is made while the next one is on its way."""
STAGING_STEP = 64 * 2**20
"""What kept memory grows by: payloads differ, and to page-lock more takes longer than to copy it."""
Register = Callable[[int, int], str | None]
"""Page-locks bytes from an address; None, or why that did not work."""
Unregister = Callable[[int], None]
"""Undoes it for the piece that begins at an address."""


class PageLocker:
    """Page-locks mappings in chunks. What cannot be locked stays as it is, with one line in the log that says why."""

    def __init__(self, register: Register, unregister: Unregister, *, chunk: int = LOCK_CHUNK) -> None:
        self._register = register
        self._unregister = unregister
        self._chunk = chunk
        self._locked: dict[int, int] = {}
        """Bytes by address, of every chunk that is locked now."""

    @property
    def locked_bytes(self) -> int:
        """Locked now."""
        return sum(self._locked.values())

    def lock(self, view: memoryview) -> Callable[[], None]:
        """Lock a whole mapping, as far as that goes; the function that is returned undoes it before it is unmapped."""
        mine, reason = self._lock(view)
        if reason is not None:
            done, whole = sum(self._locked[each] for each in mine) >> 20, view.nbytes >> 20
            logger.warning("page-locked %d of %d MiB of the slab, the rest is copied slower: %s", done, whole, reason)
        else:
            logger.info("page-locked the slab, %d MiB", view.nbytes >> 20)
        return lambda: self._unlock(mine)

    def extend(self, view: memoryview) -> tuple[int, str | None]:
        """Lock memory that lives as long as this process: bytes that are locked, and why no more are."""
        mine, reason = self._lock(view)
        return sum(self._locked[each] for each in mine), reason

    def _lock(self, view: memoryview) -> tuple[list[int], str | None]:
        base = address_of(view)
        mine: list[int] = []
        for start in range(0, view.nbytes, self._chunk):
            nbytes = min(self._chunk, view.nbytes - start)
            reason = self._register(base + start, nbytes)
            if reason is not None:
                return mine, reason
            self._locked[base + start] = nbytes
            mine.append(base + start)
        return mine, None

    def _unlock(self, addresses: list[int]) -> None:
        for address in addresses:
            self._unregister(address)
            del self._locked[address]
        addresses.clear()

    def cuts(self, address: int, nbytes: int) -> list[int]:
        """Where copies from `address` on have to end, as offsets: none may cross the border of a locked chunk."""
        borders = {border - address for start, length in self._locked.items() for border in (start, start + length)}
        return sorted(border for border in borders if 0 < border < nbytes)


def cuda_locker(chunk: int = LOCK_CHUNK) -> PageLocker:
    """Page-locking by CUDA, for every device of this process."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, nbytes: int) -> str | None:
        # 1: page-locked for every context of the process.
        code = runtime.cudaHostRegister(address, nbytes, 1)
        if int(code) == 0:
            return None
        _drop_pending_error()
        return f"cudaHostRegister: {torch.cuda.CudaError(int(code))}"

    def unregister(address: int) -> None:
        runtime.cudaHostUnregister(address)

    return PageLocker(register, unregister, chunk=chunk)


def _drop_pending_error() -> None:
    """CUDA keeps the error of a call that failed for whoever launches the next kernel, and it would be blamed."""
    with suppress(torch.AcceleratorError):
        torch.zeros(1, device="cuda")


def locker_for(device: torch.device) -> PageLocker | None:
    """A locker where page-locking makes a difference."""
    return cuda_locker() if device.type == "cuda" else None


def address_of(view: memoryview) -> int:
    """Where writable bytes begin in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes in order, flat, on the tensor's device; a copy only where the tensor is not contiguous."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(
    view: memoryview, dtype: torch.dtype, shape: Sequence[int], device: torch.device, locker: PageLocker | None = None
) -> torch.Tensor:
    """A tensor on `device` out of host bytes, copied once and complete when this returns."""
    raw = torch.empty(view.nbytes, dtype=torch.uint8, device=device)
    if view.nbytes:
        source = torch.frombuffer(view, dtype=torch.uint8)
        for start, end in pieces(view, locker):
            raw[start:end].copy_(source[start:end], non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return raw.view(dtype).reshape(tuple(shape))


class TensorSource:
    """Flat bytes on a device as a `transport.base.Source`: they go straight into a landing.

    On a GPU the copies wait for the work that was queued on the current stream before this was built, and for no other.
    """

    def __init__(self, raw: torch.Tensor, locker: PageLocker | None = None) -> None:
        self._raw = raw
        self._locker = locker
        # Not the current stream: there the next request's work may be queued by the time of the copies.
        self._stream: torch.cuda.Stream | None = None
        if raw.device.type == "cuda":
            self._stream = torch.cuda.Stream(raw.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(raw.device))

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return self._raw.numel()

    def write_into(self, target: memoryview) -> str:
        """Copy everything into `target`, and the checksum of what lies there then, made beside the copy."""
        digest = xxhash.xxh3_64()
        if target.nbytes:
            bare = torch.frombuffer(target, dtype=torch.uint8)
            waits = [(start, end, self._copy(bare, start, end)) for start, end in pieces(target, self._locker)]
            for start, end, wait in waits:
                wait()
                digest.update(target[start:end])
        return digest.hexdigest()

    def _copy(self, target: torch.Tensor, start: int, end: int) -> Callable[[], None]:
        """Start one copy; what waits for its end."""
        if self._stream is None:
            target[start:end].copy_(self._raw[start:end])
            return _nothing
        with torch.cuda.stream(self._stream):
            target[start:end].copy_(self._raw[start:end], non_blocking=True)
            copied = self._stream.record_event()
        return lambda: copied.synchronize()


class Staging:
    """Host memory that is kept, through which bytes of a GPU leave where they cannot leave from there.

    Fresh memory costs more than the copy: its pages are touched for the first time, and it is not page-locked.
    """

    def __init__(self, *, page_locked: bool) -> None:
        self._page_locked = page_locked
        self._kept: torch.Tensor | None = None

    @contextmanager
    def holding(self, raw: torch.Tensor) -> Iterator[tuple[memoryview, str]]:
        """Flat bytes in host memory, and their checksum, while the context lasts.

        After an error the memory is not used again: a write that did not end in time may still read it.
        """
        kept, self._kept = self._kept, None
        if kept is None or kept.numel() < raw.numel():
            room = -(-raw.numel() // STAGING_STEP) * STAGING_STEP
            kept = torch.empty(room, dtype=torch.uint8, pin_memory=self._page_locked)
        view = kept.numpy().data[: raw.numel()]
        yield view, TensorSource(raw).write_into(view)
        self._kept = kept


def _nothing() -> None:
    return None


def pieces(view: memoryview, locker: PageLocker | None) -> Iterator[tuple[int, int]]:
    """Begin and end of every copy to or from a view, in order."""
    cuts = locker.cuts(address_of(view), view.nbytes) if locker is not None else []
    ends = sorted({*cuts, *range(COPY_PIECE, view.nbytes, COPY_PIECE), view.nbytes})
    yield from zip([0, *ends[:-1]], ends, strict=True)
