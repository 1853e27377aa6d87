from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from shared_runtime.transport.header import PAGE
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.slab import Slab
from shared_schema.encode import PushReceipt, ShmLanding
from shared_schema.errors import ChecksumMismatch, LeaseExpired, SlabFull, TransportError, WrongRequest
from tests.shared_runtime.transport.held import HeldCopy
from tests.shared_runtime.transport.processes import pattern

ONE, TWO = "1" * 32, "2" * 32
NOW = 1000.0


def push(slab: Slab, landing: ShmLanding) -> PushReceipt:
    sender = ShmSender(slab.path.parent, clock=lambda: NOW)
    try:
        return sender.push_bytes(landing, memoryview(pattern(landing)))
    finally:
        sender.close()


def start_push(sender: ShmSender, landing: ShmLanding) -> Future[PushReceipt]:
    pool = ThreadPoolExecutor(1)
    pushing = pool.submit(sender.push_bytes, landing, memoryview(pattern(landing)))
    pool.shutdown(wait=False)
    return pushing


def test_a_landing_is_reserved_pushed_verified_and_read_where_it_lies(slab: Slab) -> None:
    landing = slab.reserve(100_000, ONE, 5.0, NOW)
    assert (landing.deadline, landing.length, landing.request_id) == (NOW + 5, 100_000, ONE)
    slab.verify(landing, push(slab, landing).checksum)
    assert slab.view(landing) == pattern(landing)
    assert slab.stats.landings == 1
    slab.release(landing)
    slab.release(landing)
    stats = slab.stats
    assert (stats.landings, stats.bytes_in_use, stats.reserved_total, stats.lapsed_total) == (0, 0, 1, 0)
    assert stats.high_water == 102_400


def test_a_full_slab_makes_a_push_wait_and_room_comes_back(slab: Slab) -> None:
    landings = [slab.reserve(2**20 - PAGE, ONE, 5.0, NOW) for _ in range(4)]
    with pytest.raises(SlabFull):
        slab.reserve(1, TWO, 5.0, NOW)
    slab.release(landings[1])
    assert slab.reserve(2**20 - PAGE, TWO, 5.0, NOW).offset == landings[1].offset


def test_the_largest_landing_fits_and_one_byte_more_never_does(slab: Slab) -> None:
    slab.release(slab.reserve(slab.largest_landing, ONE, 5.0, NOW))
    with pytest.raises(TransportError, match=str(slab.size)):
        slab.reserve(slab.largest_landing + 1, ONE, 5.0, NOW)


def test_what_can_never_fit_is_another_error_than_full(slab: Slab) -> None:
    with pytest.raises(TransportError, match="slab_bytes") as never:
        slab.reserve(4 * 2**20, ONE, 5.0, NOW)
    assert not isinstance(never.value, SlabFull)


@pytest.mark.parametrize("lease", [0.0, -1.0, float("nan"), float("inf"), -float("inf")])  # case 34
def test_a_lease_is_positive_and_finite(slab: Slab, lease: float) -> None:
    with pytest.raises(ValueError, match="lease"):
        slab.reserve(1, ONE, lease, NOW)


def test_a_lease_may_be_shorter_than_a_second(slab: Slab) -> None:
    assert slab.reserve(1, ONE, 0.25, NOW).deadline == NOW + 0.25


def test_a_size_is_rounded_up_to_whole_pages_and_all_of_it_can_be_used(folder: Path) -> None:
    slab = Slab.create(folder, 2**20 + 1, "test")
    assert slab.size == slab.path.stat().st_size == 2**20 + PAGE
    assert slab.view(slab.reserve(slab.largest_landing, ONE, 5.0, NOW)).nbytes == slab.largest_landing
    slab.close()


def test_a_lease_lapses_at_its_deadline_and_only_then(slab: Slab) -> None:  # cases 34, 46
    landing = slab.reserve(1000, ONE, 5.0, NOW)
    assert slab.expire(NOW + 4.99) == []
    assert slab.expire(NOW + 5) == [landing]
    assert slab.expire(NOW + 5) == []
    assert (slab.stats.lapsed_total, slab.stats.bytes_in_use) == (1, 0)
    for use in (slab.view, lambda lost: slab.verify(lost, "0" * 16)):
        with pytest.raises(LeaseExpired):
            use(landing)
    with pytest.raises(LeaseExpired):
        push(slab, landing)


def test_a_verified_landing_has_no_lease_any_more(slab: Slab) -> None:
    landing = slab.reserve(1000, ONE, 5.0, NOW)
    slab.verify(landing, push(slab, landing).checksum)
    assert slab.expire(NOW + 1e9) == []
    assert slab.view(landing) == pattern(landing)


def test_a_landing_nobody_wrote_is_not_verified_and_its_lease_runs_on(slab: Slab) -> None:
    landing = slab.reserve(1000, ONE, 5.0, NOW)
    with pytest.raises(WrongRequest):
        slab.verify(landing, "0" * 16)
    assert slab.expire(NOW + 5) == [landing]


def test_one_changed_byte_or_a_lie_about_the_checksum_is_found(slab: Slab) -> None:
    landing = slab.reserve(1000, ONE, 5.0, NOW)
    checksum = push(slab, landing).checksum
    with pytest.raises(ChecksumMismatch):
        slab.verify(landing, "0" * 16)
    slab.view(landing)[500] ^= 1
    with pytest.raises(ChecksumMismatch):
        slab.verify(landing, checksum)
    slab.view(landing)[500] ^= 1
    slab.verify(landing, checksum)


@pytest.mark.parametrize(
    "change", [{"request_id": TWO}, {"length": 999}, {"offset": 4096}, {"path": "/dev/shm/other.slab"}]
)
def test_a_landing_of_another_request_is_refused(slab: Slab, change: dict[str, object]) -> None:
    landing = slab.reserve(1000, ONE, 5.0, NOW)
    checksum = push(slab, landing).checksum
    wrong = landing.model_copy(update=change)
    for use in (slab.view, lambda other: slab.verify(other, checksum)):
        with pytest.raises(WrongRequest):
            use(wrong)
    slab.verify(landing, checksum)


@pytest.mark.parametrize("byte", range(64))
def test_a_harmed_header_is_found(slab: Slab, byte: int) -> None:
    landing = slab.reserve(1000, ONE, 5.0, NOW)
    checksum = push(slab, landing).checksum
    with slab.path.open("r+b") as file:
        file.seek(landing.offset + byte)
        old = file.read(1)[0]
        file.seek(landing.offset + byte)
        file.write(bytes([old ^ 0x80]))
    if byte in range(12, 16) or byte in range(56, 64):  # padding; the deadline, which a finished push has no use for
        slab.verify(landing, checksum)
        return
    with pytest.raises((TransportError, WrongRequest, ChecksumMismatch)):
        slab.verify(landing, checksum)


def test_memory_under_a_late_writer_is_kept_until_it_has_gone(slab: Slab) -> None:  # case 34
    held = HeldCopy()
    sender = ShmSender(slab.path.parent, clock=lambda: NOW, copy=held)
    landing = slab.reserve(3 * 2**20, ONE, 5.0, NOW)
    pushing = start_push(sender, landing)
    assert held.half_done.wait(10)
    assert slab.expire(NOW + 5) == [landing]
    assert (slab.stats.quarantined, slab.stats.landings) == (1, 0)
    with pytest.raises(SlabFull):
        slab.reserve(2 * 2**20, TWO, 5.0, NOW)
    held.let_go()
    assert isinstance(pushing.exception(10), LeaseExpired)
    sender.close()
    other = slab.reserve(2 * 2**20, TWO, 5.0, NOW)
    slab.verify(other, push(slab, other).checksum)
    assert slab.stats.quarantined == 0


def test_a_release_in_the_middle_of_a_push_waits_for_it_too(slab: Slab) -> None:
    held = HeldCopy()
    sender = ShmSender(slab.path.parent, clock=lambda: NOW, copy=held)
    landing = slab.reserve(2**20, ONE, 5.0, NOW)
    pushing = start_push(sender, landing)
    assert held.half_done.wait(10)
    slab.release(landing)
    assert slab.stats.quarantined == 1
    held.let_go()
    assert isinstance(pushing.exception(10), LeaseExpired)
    sender.close()
    slab.expire(NOW)
    assert (slab.stats.quarantined, slab.stats.bytes_in_use, slab.stats.lapsed_total) == (0, 0, 0)


def test_an_old_landing_cannot_be_written_once_its_place_is_anothers(slab: Slab) -> None:
    old = slab.reserve(1000, ONE, 5.0, NOW)
    slab.release(old)
    new = slab.reserve(1000, TWO, 5.0, NOW)
    assert (new.offset, new.generation) == (old.offset, old.generation + 1)
    with pytest.raises(LeaseExpired):
        push(slab, old)
    slab.release(old)
    slab.verify(new, push(slab, new).checksum)


def test_a_closed_slab_is_gone_and_refuses_everything(slab: Slab) -> None:
    landing = slab.reserve(1000, ONE, 5.0, NOW)
    view = slab.view(landing)
    slab.close()
    slab.close()
    assert not slab.path.exists()
    assert len(bytes(view)) == 1000
    slab.release(landing)
    assert slab.expire(NOW + 9) == []
    for use in (slab.view, lambda held: slab.verify(held, "0" * 16)):
        with pytest.raises(TransportError):
            use(landing)
    with pytest.raises(TransportError):
        slab.reserve(1, ONE, 5.0, NOW)
