"""Page-locking in chunks, and bytes between tensors and a slab, on whatever devices there are."""

import logging
import mmap
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared_runtime.device_memory import (
    COPY_PIECE,
    PageLocker,
    Staging,
    TensorSource,
    address_of,
    cuda_locker,
    flat_bytes,
    from_bytes,
)
from shared_runtime.transport.codec import checksum
from shared_runtime.transport.shm import ShmSender, SlabReader
from shared_runtime.transport.slab import Slab

MIB = 2**20
CHUNK = 64 * 1024
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool)


class FakeDriver:
    """Locks what it is told, and refuses from the `limit`-th call on."""

    def __init__(self, limit: int = 99) -> None:
        self.limit = limit
        self.locked: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> str | None:
        if len(self.locked) >= self.limit:
            return "out of memory (2)"
        self.locked[address] = nbytes
        return None

    def unregister(self, address: int) -> None:
        del self.locked[address]


def locker_of(driver: FakeDriver) -> PageLocker:
    return PageLocker(driver.register, driver.unregister, chunk=CHUNK)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Shared memory, as in service: CUDA page-locks no mapping of a file on a disk.
    with tempfile.TemporaryDirectory(prefix="h3-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_mapping_is_locked_in_chunks_and_let_go_before_it_is_unmapped() -> None:
    driver = FakeDriver()
    locker, mapping = locker_of(driver), mmap.mmap(-1, 5 * CHUNK // 2)
    base = address_of(memoryview(mapping))
    undo = locker.lock(memoryview(mapping))
    assert driver.locked == {base: CHUNK, base + CHUNK: CHUNK, base + 2 * CHUNK: CHUNK // 2}
    assert locker.locked_bytes == 5 * CHUNK // 2
    undo()
    undo()
    assert (driver.locked, locker.locked_bytes) == ({}, 0)


def test_what_cannot_be_locked_is_said_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver(limit=1)
    locker = locker_of(driver)
    with caplog.at_level(logging.WARNING):
        undo = locker.lock(memoryview(mmap.mmap(-1, 4 * CHUNK)))
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["out of memory (2)"]
    assert locker.locked_bytes == CHUNK
    undo()
    assert driver.locked == {}


def test_copies_never_cross_the_border_of_a_locked_chunk() -> None:
    """CUDA refuses a copy that begins in one locked range and ends in another, or outside."""
    locker, mapping = locker_of(FakeDriver(limit=2)), memoryview(mmap.mmap(-1, 4 * CHUNK))
    locker.lock(mapping)
    base = address_of(mapping)
    assert locker.cuts(base + 100, 4 * CHUNK - 100) == [CHUNK - 100, 2 * CHUNK - 100]
    assert locker.cuts(base, CHUNK) == []
    assert locker.cuts(base + 3 * CHUNK, CHUNK) == []


def test_a_sender_locks_each_slab_that_it_maps_and_lets_go_of_it(folder: Path) -> None:
    driver, slab = FakeDriver(), Slab.create(folder, 4 * CHUNK, "test")
    locker = locker_of(driver)
    sender, reader = ShmSender(folder, on_map=locker.lock), SlabReader(folder, locker.lock)
    landing = slab.reserve(1000, "1" * 32, 30.0, time.time())
    slab.verify(landing, sender.push_bytes(landing, memoryview(bytes(1000))).checksum)
    reader.view(landing)
    assert locker.locked_bytes == 2 * 4 * CHUNK
    slab.close()
    sender.forget_removed()
    assert locker.locked_bytes == 4 * CHUNK
    reader.close()
    sender.close()
    assert driver.locked == {}


def every_bit_pattern(dtype: torch.dtype) -> torch.Tensor:
    """Values of a type with all kinds of bits: NaN payloads, infinities, both zeros."""
    if dtype is torch.bool:
        return torch.tensor([True, False, True])
    width = dtype.itemsize
    raw = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8) if width == 2 else None
    if raw is None:
        raw = torch.randint(0, 256, (4096 * width,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        raw[-8:] = 255  # a NaN with every bit set
    return raw.view(dtype)


def shapes_of(values: torch.Tensor) -> dict[str, torch.Tensor]:
    square = values[: values.numel() // 2 * 2].reshape(2, -1)
    return {
        "flat": values,
        "rows": square,
        "no rows": values[:0].reshape(0, 96),
        "no dimension": values[0],
        "transposed": square.T,
        "every other": values[::2],
        "expanded": values[:1].expand(7),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_and_shape_comes_back_bit_for_bit_through_a_slab(
    folder: Path, dtype: torch.dtype, device: str
) -> None:  # case 35
    slab, sender, reader = Slab.create(folder, 4 * MIB, "test"), ShmSender(folder), SlabReader(folder)
    locker = cuda_locker() if device == "cuda" else None
    for name, tensor in shapes_of(every_bit_pattern(dtype).to(device)).items():
        source = TensorSource(flat_bytes(tensor), locker)
        tensor_bytes = tensor.numel() * tensor.element_size()
        assert source.nbytes == tensor_bytes
        landing = slab.reserve(source.nbytes, "1" * 32, 30.0, time.time())
        receipt = sender.push_source(landing, source)
        slab.verify(landing, receipt.checksum)
        assert slab.stats.bytes_in_use <= 1.01 * tensor_bytes + 3 * 4096  # header, half a page, rounding
        got = from_bytes(reader.view(landing), dtype, tensor.shape, torch.device(device), locker)
        slab.release(landing)
        assert (got.dtype, got.shape, got.device.type) == (dtype, tensor.shape, device), name
        assert torch.equal(flat_bytes(got), flat_bytes(tensor)), name
    for each in (reader, sender, slab):
        each.close()


@pytest.mark.parametrize("device", DEVICES)
def test_many_pieces_arrive_whole_and_their_checksum_is_that_of_all(folder: Path, device: str) -> None:
    size = 2 * COPY_PIECE + 12345
    slab, sender = Slab.create(folder, size + MIB, "test"), ShmSender(folder)
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    landing = slab.reserve(size, "1" * 32, 30.0, time.time())
    receipt = sender.push_source(landing, TensorSource(raw.to(device)))
    assert receipt.checksum == checksum(raw.numpy().data)
    slab.verify(landing, receipt.checksum)
    got = from_bytes(slab.view(landing), torch.uint8, (size,), torch.device(device))
    assert torch.equal(got.cpu(), raw)
    del got
    sender.close()
    slab.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_bytes_that_are_still_being_made_are_waited_for(folder: Path) -> None:
    slab, sender = Slab.create(folder, 4 * MIB, "test"), ShmSender(folder)
    landing = slab.reserve(3 * MIB, "1" * 32, 30.0, time.time())
    raw = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(200_000_000)  # about a tenth of a second of the device, which the host does not wait for
    raw += 7
    slab.verify(landing, sender.push_source(landing, TensorSource(raw)).checksum)
    assert set(slab.view(landing)) == {7}
    sender.close()
    slab.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_locks_a_slab_and_copies_across_its_chunks(folder: Path) -> None:
    slab, locker = Slab.create(folder, 4 * MIB, "test"), cuda_locker(chunk=MIB)
    sender = ShmSender(folder, on_map=locker.lock)
    raw = torch.arange(3 * MIB, dtype=torch.int32, device="cuda").to(torch.uint8)
    landing = slab.reserve(3 * MIB, "1" * 32, 30.0, time.time())
    receipt = sender.push_source(landing, TensorSource(raw, locker))
    assert locker.locked_bytes == 4 * MIB
    slab.verify(landing, receipt.checksum)
    assert torch.equal(from_bytes(slab.view(landing), torch.uint8, (3 * MIB,), torch.device("cuda")), raw)
    sender.close()
    assert locker.locked_bytes == 0
    slab.close()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_staged_is_whole_and_its_memory_is_kept(device: str) -> None:
    staging = Staging(page_locked=device == "cuda")
    addresses = set()
    for size in (COPY_PIECE + 777, 3, 0, 2 * COPY_PIECE):
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        with staging.holding(raw.to(device)) as (data, known):
            assert known == checksum(raw.numpy().data)
            assert bytes(data) == bytes(raw.numpy().data)
            addresses |= {address_of(data)} if size else set()
    assert len(addresses) == 1


def test_memory_that_a_late_write_may_still_read_is_left_to_it() -> None:
    """A WRITE past its deadline cannot be taken back: what it sends then must not be the next payload."""
    staging = Staging(page_locked=False)
    first, second = torch.full((64,), 1, dtype=torch.uint8), torch.full((64,), 2, dtype=torch.uint8)
    late: list[memoryview] = []

    def push() -> None:
        with staging.holding(first) as (data, _):
            late.append(data)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        push()
    with staging.holding(second) as (data, _):
        assert set(data) == {2}
        assert set(late[0]) == {1}
