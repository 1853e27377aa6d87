"""Pushes from real second processes: killed, stopped, too late, many at once."""

import random
import signal
import threading
import time
from pathlib import Path

import pytest

from shared_runtime.transport.base import Receiver, Sender
from shared_runtime.transport.codec import checksum
from shared_runtime.transport.header import HEADER_BYTES
from shared_runtime.transport.shm import ShmSender, SlabReader
from shared_runtime.transport.slab import Slab
from shared_schema.encode import ShmLanding
from shared_schema.encoder_output import EncoderOutput
from shared_schema.errors import ChecksumMismatch, H3Error, LeaseExpired, SlabFull, TransportError, WrongRequest
from tests.payloads import GOLDEN_REF2VA, SMALL_REF2VA, payload_of
from tests.shared_runtime.transport.processes import child, pattern, wait_until_stopped

ONE, TWO = "1" * 32, "2" * 32
MIB = 2**20


def test_shared_memory_is_a_transport(folder: Path, slab: Slab) -> None:
    """The annotations are the test: mypy proves them."""
    receiver: Receiver[ShmLanding] = slab
    sender: Sender[ShmLanding] = ShmSender(folder)
    payload = payload_of(SMALL_REF2VA)
    landing = receiver.reserve(payload.manifest.nbytes, ONE, 30.0, time.time())
    known = checksum(payload.data)
    assert sender.push(landing, payload, checksum=known).checksum == known
    receiver.verify(landing, known)
    sender.close()


def test_a_checksum_made_beforehand_finds_bytes_that_changed_since(folder: Path, slab: Slab) -> None:
    sender, data = ShmSender(folder), memoryview(bytearray(1000))
    landing = slab.reserve(1000, ONE, 30.0, time.time())
    known = checksum(data)
    data[7] = 1
    assert sender.push_bytes(landing, data, checksum=known).checksum == known
    with pytest.raises(ChecksumMismatch):
        slab.verify(landing, known)
    sender.close()


def test_payloads_begin_in_the_middle_of_a_page(slab: Slab) -> None:
    """Where memcpy never finds source and target equally far into their pages."""
    for length in (1, 5000, 2**20):
        assert (slab.reserve(length, ONE, 30.0, time.time()).offset + HEADER_BYTES) % 4096 == 2048


def test_a_payload_arrives_bit_for_bit_and_is_read_in_place(folder: Path) -> None:  # case 35
    slab = Slab.create(folder, 64 * MIB, "test")
    sender, reader = ShmSender(folder), SlabReader(folder)
    for layout in (SMALL_REF2VA, GOLDEN_REF2VA):
        payload = payload_of(layout)
        landing = slab.reserve(payload.manifest.nbytes, ONE, 30.0, time.time())
        receipt = sender.push(landing, payload)
        assert (receipt.bytes, receipt.checksum) == (payload.manifest.nbytes, checksum(payload.data))
        slab.verify(landing, receipt.checksum)
        for view in (slab.view(landing), reader.view(landing)):
            arrived = EncoderOutput(manifest=payload.manifest, data=view)
            assert arrived.data == payload.data
            assert arrived.layout == layout
        slab.release(landing)
        with pytest.raises(LeaseExpired):
            reader.view(landing)
    reader.close()
    sender.close()
    slab.close()


def test_another_process_pushes_what_we_verify(folder: Path, slab: Slab) -> None:
    with child("push", folder) as sender:
        assert sender.hear() == "ready"
        for request_id in (ONE, TWO):
            landing = slab.reserve(MIB, request_id, 30.0, time.time())
            sender.say(landing.model_dump_json())
            word, found = sender.hear().split()
            assert word == "pushed"
            slab.verify(landing, found)
            assert slab.view(landing) == pattern(landing)


def test_a_sender_killed_in_the_middle_leaves_nothing_behind(folder: Path, slab: Slab) -> None:  # cases 40, 46
    landing = slab.reserve(3 * MIB, ONE, 30.0, time.time())
    with child("push", folder, "stop") as sender:
        assert sender.hear() == "ready"
        sender.say(landing.model_dump_json())
        assert sender.hear() == "half"
        slab.release(landing)
        assert slab.stats.quarantined == 1
        sender.process.send_signal(signal.SIGKILL)
        sender.process.wait(10)
    slab.expire(time.time())
    assert (slab.stats.quarantined, slab.stats.bytes_in_use) == (0, 0)


def test_half_a_push_is_never_verified(folder: Path, slab: Slab) -> None:
    landing = slab.reserve(3 * MIB, ONE, 30.0, time.time())
    with child("push", folder, "stop") as sender:
        assert sender.hear() == "ready"
        sender.say(landing.model_dump_json())
        assert sender.hear() == "half"
        with pytest.raises(WrongRequest):
            slab.verify(landing, checksum(memoryview(pattern(landing))))


def test_a_stopped_sender_that_wakes_after_its_lease_touches_no_other_landing(folder: Path, slab: Slab) -> None:
    """Case 34: the lease lapses while the sender sleeps in the middle; room is given away around it, never under it."""
    late = slab.reserve(2 * MIB, ONE, 30.0, time.time())
    with child("push", folder, "stop") as sender:
        assert sender.hear() == "ready"
        sender.say(late.model_dump_json())
        assert sender.hear() == "half"
        sender.process.send_signal(signal.SIGSTOP)
        wait_until_stopped(sender.pid)
        assert slab.expire(late.deadline) == [late]
        ours = slab.reserve(MIB, TWO, 30.0, time.time())
        with pytest.raises(SlabFull):
            slab.reserve(2 * MIB, TWO, 30.0, time.time())
        local = ShmSender(folder)
        receipt = local.push_bytes(ours, memoryview(pattern(ours)))
        sender.process.send_signal(signal.SIGCONT)
        sender.say("")
        assert sender.hear().startswith("LeaseExpired")
        slab.verify(ours, receipt.checksum)
        slab.expire(time.time())
        again = slab.reserve(2 * MIB, TWO, 30.0, time.time())
        slab.verify(again, local.push_bytes(again, memoryview(pattern(again))).checksum)
        local.close()


def test_200_leases_racing_their_pushes_are_right_or_lapsed(folder: Path, slab: Slab) -> None:  # cases 34, 46
    """A lapsed landing is filled with 0xAA by its next user: whoever verifies may never see a byte of that."""
    draw, outcomes = random.Random(34), {"right": 0, "lapsed": 0}
    with child("push", folder) as sender:
        assert sender.hear() == "ready"
        for turn in range(200):
            lease = 30.0 if turn % 4 == 0 else draw.uniform(0.0002, 0.004)
            landing = slab.reserve(MIB, f"{turn:032x}", lease, time.time())
            stop = threading.Event()
            hurry = threading.Thread(target=keep_expiring_and_filling, args=(slab, stop))
            hurry.start()
            sender.say(landing.model_dump_json())
            word, found = sender.hear().split(maxsplit=1)
            try:
                if word != "pushed":
                    assert word == "LeaseExpired", found
                    raise LeaseExpired(found)
                slab.verify(landing, found)
            except LeaseExpired:
                outcomes["lapsed"] += 1
            else:
                assert slab.view(landing) == pattern(landing)
                outcomes["right"] += 1
            finally:
                stop.set()
                hurry.join()
                slab.release(landing)
    slab.expire(time.time() + 60)
    assert (slab.stats.bytes_in_use, slab.stats.reserved_total >= 200) == (0, True)
    assert min(outcomes.values()) > 0, outcomes


def keep_expiring_and_filling(slab: Slab, stop: threading.Event) -> None:
    filled: list[ShmLanding] = []
    while not stop.wait(0.0002):
        slab.expire(time.time())
        try:
            landing = slab.reserve(MIB, "a" * 32, 30.0, time.time())
        except SlabFull:
            continue
        slab.view(landing)[:] = b"\xaa" * MIB
        filled.append(landing)
    for landing in filled:
        slab.release(landing)


def test_readers_that_end_or_are_killed_leave_the_slab_to_the_others(folder: Path, slab: Slab) -> None:  # case 49
    landing = slab.reserve(MIB, ONE, 30.0, time.time())
    sender = ShmSender(folder)
    slab.verify(landing, sender.push_bytes(landing, memoryview(pattern(landing))).checksum)
    for how in (None, signal.SIGKILL):
        with child("read", folder) as reader:
            reader.say(landing.model_dump_json())
            assert reader.hear() == "True"
            if how is None:
                reader.say("")
                assert reader.end() == ""
            else:
                reader.process.send_signal(how)
                reader.process.wait(10)
    again = SlabReader(folder)
    assert again.view(landing) == pattern(landing) == slab.view(landing)
    again.close()
    sender.close()


def test_a_landing_that_is_not_what_it_says_is_refused(folder: Path, slab: Slab) -> None:
    sender = ShmSender(folder)
    landing = slab.reserve(1000, ONE, 30.0, time.time())
    wrong: dict[type[H3Error], list[dict[str, object]]] = {
        WrongRequest: [{"request_id": TWO}, {"generation": 9}],
        TransportError: [{"offset": 4096}, {"offset": slab.size - 64}, {"offset": 2**62}, {"path": "/etc/passwd"}],
    }
    for kind, changes in wrong.items():
        for change in changes:
            with pytest.raises(kind):
                sender.push_bytes(landing.model_copy(update=change), memoryview(bytes(1000)))
    with pytest.raises(TransportError, match="1000 bytes"):
        sender.push_bytes(landing, memoryview(bytes(999)))
    with pytest.raises(WrongRequest):
        sender.push_bytes(landing.model_copy(update={"length": 900}), memoryview(bytes(900)))
    slab.verify(landing, sender.push_bytes(landing, memoryview(bytes(1000))).checksum)
    with pytest.raises(TransportError, match="already"):
        sender.push_bytes(landing, memoryview(bytes(1000)))
    sender.close()


def test_two_senders_never_write_one_landing_together(folder: Path, slab: Slab) -> None:
    landing = slab.reserve(MIB, ONE, 30.0, time.time())
    local = ShmSender(folder)
    with child("push", folder, "stop") as sender:
        assert sender.hear() == "ready"
        sender.say(landing.model_dump_json())
        assert sender.hear() == "half"
        with pytest.raises(TransportError, match="another sender"):
            local.push_bytes(landing, memoryview(bytes(MIB)))
        slab.release(landing)
        with pytest.raises(LeaseExpired):
            local.push_bytes(landing, memoryview(bytes(MIB)))
    local.close()


def test_a_lease_that_ends_by_the_senders_own_clock_is_not_written(folder: Path, slab: Slab) -> None:
    landing = slab.reserve(1000, ONE, 5.0, 1000.0)
    sender = ShmSender(folder, clock=lambda: 1005.0)
    with pytest.raises(LeaseExpired):
        sender.push_bytes(landing, memoryview(b"\xaa" * 1000))
    assert bytes(slab.view(landing)) == bytes(1000)
    sender.close()


def test_a_lease_that_ends_during_the_copy_is_not_reported_as_pushed(folder: Path, slab: Slab) -> None:
    landing = slab.reserve(1000, ONE, 5.0, 1000.0)
    times = iter([1004.0, 1004.0, 1006.0, 1006.0])
    sender = ShmSender(folder, clock=lambda: next(times))
    with pytest.raises(LeaseExpired):
        sender.push_bytes(landing, memoryview(bytes(1000)))
    sender.close()


def test_a_push_into_a_slab_whose_owner_has_gone_is_refused(folder: Path) -> None:  # case 40
    slab = Slab.create(folder, MIB, "test")
    sender = ShmSender(folder)
    landing = slab.reserve(1000, ONE, 30.0, time.time())
    sender.push_bytes(landing, memoryview(bytes(1000)))
    slab.close()
    with pytest.raises(TransportError, match="not on this host"):
        sender.push_bytes(landing, memoryview(bytes(1000)))
    sender.close()


def test_an_unwritten_landing_is_not_readable(folder: Path, slab: Slab) -> None:
    reader = SlabReader(folder)
    landing = slab.reserve(1000, ONE, 30.0, time.time())
    with pytest.raises(WrongRequest):
        reader.view(landing)
    assert len(reader.whole(landing.path)) == slab.size
    reader.close()
