"""What stays behind after many transfers, restarts and deaths over shared memory: nothing."""

import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from shared_runtime.transport.header import HEADER_BYTES
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.slab import Slab
from shared_schema.encode import ShmLanding
from shared_schema.errors import ChecksumMismatch, LeaseExpired, WrongRequest
from tests.shared_runtime.transport.processes import Child, child, pattern

pytestmark = pytest.mark.slow

MIB = 2**20
ONE = "1" * 32


def resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def transfer(slab: Slab, sender: ShmSender, length: int, turn: int) -> None:
    landing = slab.reserve(length, f"{turn:032x}", 30.0, time.time())
    slab.verify(landing, sender.push_bytes(landing, memoryview(bytes(length))).checksum)
    slab.release(landing)


@pytest.mark.steady
def test_10_000_transfers_leave_memory_threads_and_files_as_they_were(folder: Path, slab: Slab) -> None:
    sender = ShmSender(folder)
    for turn in range(500):
        transfer(slab, sender, 1000 + turn, turn)
    before = (resident_kib(), threading.active_count(), open_files())
    for turn in range(10_000):
        transfer(slab, sender, 1000 + turn % 5000, turn)
    grown = resident_kib() - before[0]
    assert (threading.active_count(), open_files()) == before[1:]
    assert grown < 2048, f"{grown} KiB more"
    assert (slab.stats.bytes_in_use, slab.stats.landings, slab.stats.quarantined) == (0, 0, 0)
    sender.close()


def test_an_owner_that_is_started_anew_ten_times_is_written_to_each_time(folder: Path) -> None:  # case 55
    sender = ShmSender(folder)
    files = open_files()
    for turn in range(10):
        slab = Slab.create(folder, 4 * MIB, "diffusion-8000")
        transfer(slab, sender, MIB, turn)
        slab.close()
    sender.forget_removed()
    assert open_files() == files
    assert list(folder.iterdir()) == []
    sender.close()


def test_a_sender_that_is_started_anew_ten_times_leaves_nothing_in_the_slab(folder: Path, slab: Slab) -> None:
    for turn in range(10):  # case 55
        with child("push", folder) as sender:
            assert sender.hear() == "ready"
            landing = slab.reserve(MIB, f"{turn:032x}", 30.0, time.time())
            sender.say(landing.model_dump_json())
            slab.verify(landing, sender.hear().split()[1])
            assert slab.view(landing) == pattern(landing)
            sender.process.send_signal(signal.SIGKILL)
            sender.process.wait(10)
        slab.release(landing)
    assert (slab.stats.bytes_in_use, slab.stats.quarantined) == (0, 0)


def killed_sender(folder: Path, slab: Slab, when: str) -> ShmLanding:
    """A landing whose sender was killed before, during or after its write."""
    landing = slab.reserve(MIB, ONE, 30.0, time.time())
    with child("push", folder, "stop") as sender:
        assert sender.hear() == "ready"
        if when != "before":
            sender.say(landing.model_dump_json())
            assert sender.hear() == "half"
        if when == "after":
            sender.say("")
            assert sender.hear().startswith("pushed")
        sender.process.send_signal(signal.SIGKILL)
        sender.process.wait(10)
    return landing


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_sender_killed_at_any_time_costs_its_landing_and_the_next_one_arrives(
    folder: Path, slab: Slab, when: str
) -> None:  # cases 40, 46
    landing = killed_sender(folder, slab, when)
    if when == "after":  # the bytes are whole; only the word that they are there was lost
        assert slab.view(landing) == pattern(landing)
    with pytest.raises(ChecksumMismatch if when == "after" else WrongRequest):
        slab.verify(landing, "0" * 16)
    assert slab.expire(landing.deadline) == [landing]
    with pytest.raises(LeaseExpired):
        slab.view(landing)
    again = ShmSender(folder)
    transfer(slab, again, 3 * MIB, 7)
    again.close()
    assert (slab.stats.bytes_in_use, slab.stats.quarantined, slab.stats.lapsed_total) == (0, 0, 1)


def restarted_owner(owner: Child, folder: Path) -> Slab:
    """The slab of an owner that was killed and started anew."""
    owner.process.send_signal(signal.SIGKILL)
    owner.process.wait(10)
    slab = Slab.create(folder, 4 * MIB, "next")
    assert slab.stats.swept_total == 1
    return slab


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_an_owner_killed_at_any_time_costs_its_slab_and_nothing_of_the_next(
    folder: Path, when: str
) -> None:  # cases 40, 46
    with child("own", folder, 4 * MIB) as owner, child("push", folder, "stop") as sender:
        old_path, _ = owner.hear(), sender.hear()
        owner.say(str(MIB))
        old = owner.hear()
        if when == "before":
            slab = restarted_owner(owner, folder)
            sender.say(old)
            assert sender.hear().startswith("TransportError")
        else:
            sender.say(old)
            assert sender.hear() == "half"
        if when == "during":
            slab = restarted_owner(owner, folder)
        ours = slab.reserve(MIB, ONE, 30.0, time.time()) if when != "after" else None
        if when != "before":  # an owner that is gone tells nobody: the rest goes where nobody looks any more
            sender.say("")
            assert sender.hear().startswith("pushed")
        if when == "after":
            slab = restarted_owner(owner, folder)
        ours = ours or slab.reserve(MIB, ONE, 30.0, time.time())
        assert not any(slab.path.read_bytes()[ours.offset + HEADER_BYTES :])
        sender.say(ours.model_dump_json())
        if when == "before":
            assert sender.hear() == "half"
            sender.say("")
        slab.verify(ours, sender.hear().split()[1])
        assert slab.view(ours) == pattern(ours)
        slab.release(ours)
        assert old_path not in Path(f"/proc/{sender.pid}/maps").read_text()
    assert (slab.stats.bytes_in_use, slab.stats.quarantined) == (0, 0)
    slab.close()
    assert list(folder.iterdir()) == []
