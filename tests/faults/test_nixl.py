"""NIXL with one end killed, stopped or gone at every point of a push: memory stays right, and nothing stays behind.

`UCX_TLS=tcp` makes a write slow enough to be met in the middle, and makes the receiver's agent take part in it.
"""

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_runtime.transport import nixl_sender
from shared_runtime.transport.files import sweep
from shared_runtime.transport.nixl_receiver import NixlReceiver
from shared_runtime.transport.nixl_sender import NixlSender
from shared_runtime.transport.slab import Slab
from shared_schema.deploy.model import NixlExtra
from shared_schema.encode import NixlLanding, ShmLanding
from shared_schema.errors import LeaseExpired, TransportError
from tests.end_to_end.processes import resident_mib
from tests.shared_runtime.transport.over_nixl import LATEST_S, MIB, arrives, receiving, reserved, wait_until
from tests.shared_runtime.transport.processes import Child, child, pattern, wait_until_stopped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LARGE = 256 * MIB
SLAB = LARGE + 16 * MIB
"""Room for one large landing at a time: whoever comes next gets the memory of the one before."""
LEASE_S = 3.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder under /dev/shm, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="h3test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """For agents and children that are started from here on."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def both(folder: Path, slow: None) -> Iterator[tuple[NixlReceiver, Slab]]:
    with receiving(folder, SLAB) as (receiver, slab):
        yield receiver, slab
        assert settled(receiver, slab)


def settled(receiver: NixlReceiver, slab: Slab) -> bool:
    """Nothing is reserved or in quarantine any more, and an agent is there."""
    wait_until(lambda: not receiver.expire(time.time()) and slab.stats.bytes_in_use == 0)
    wait_until(lambda: receiver.agent_pid is not None)
    wait_until(lambda: threads("nixl-agents") == threads("nixl-notices") == 1)
    return True


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def dirty(receiver: NixlReceiver, landing: ShmLanding) -> bool:
    """Whether the write has begun: its first byte is there (no pattern begins with zero)."""
    return receiver.view(landing)[0] != 0


def told(receiver: NixlReceiver, sender: Child, lease_s: float = 60.0) -> ShmLanding:
    """A large landing, cleared, whose pattern the sender begins to write."""
    landing = reserved(receiver, LARGE, lease_s=lease_s)
    receiver.view(landing)[:1] = b"\0"
    sender.say(receiver.for_sender(landing).model_dump_json())
    assert sender.hear() == "begins"
    return landing


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_sender_killed_before_during_or_after_its_write(  # cases 40, 46
    moment: str, both: tuple[NixlReceiver, Slab]
) -> None:
    receiver, slab = both
    with child("push-nixl", "-") as sender:
        assert sender.hear() == "ready"
        landing = told(receiver, sender)
        if moment == "after":
            said = sender.hear().split()
            assert said[0] == "pushed"
        elif moment == "during":
            wait_until(lambda: dirty(receiver, landing))
        sender.process.kill()
        sender.process.wait(10)
    if moment == "after":
        receiver.verify(landing, said[1])
        assert receiver.view(landing) == pattern(landing)
    receiver.release(landing)
    assert settled(receiver, slab)
    with child("push-nixl", "-") as sender:
        assert sender.hear() == "ready"
        assert completes(receiver, sender)


def completes(receiver: NixlReceiver, sender: Child) -> bool:
    """Whether a large push by this sender arrives."""
    landing = told(receiver, sender)
    word, said = sender.hear().split(maxsplit=1)
    assert word == "pushed", said
    receiver.verify(landing, said)
    same = receiver.view(landing) == pattern(landing)
    receiver.release(landing)
    return same


@pytest.mark.parametrize("way", ["tcp", "all"])
def test_a_sender_stopped_in_the_middle_that_wakes_after_its_lease_touches_nobodys_memory(
    way: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases 34, 54: `tcp`, and with `all` the kernel's copy between processes, which needs nothing of the receiver."""
    monkeypatch.setenv("UCX_TLS", way)
    with receiving(folder, SLAB) as (receiver, slab), child("push-nixl", "-") as sender:
        assert sender.hear() == "ready"
        late = told(receiver, sender, lease_s=20.0)
        wait_until(lambda: dirty(receiver, late))
        sender.process.send_signal(signal.SIGSTOP)
        wait_until_stopped(sender.pid)
        assert receiver.expire(late.deadline) == [late]
        ours = reserved(receiver, LARGE)  # waits for the quarantine: there is no other room
        canary = receiver.view(ours)
        canary[:] = b"\xaa" * LARGE
        sender.process.send_signal(signal.SIGCONT)
        word = sender.hear().split(maxsplit=1)[0]
        assert word in ("TransportError", "LeaseExpired", "pushed")  # what the kernel was doing at once may be whole
        time.sleep(0.5)
        assert canary == b"\xaa" * LARGE
        receiver.release(ours)
        assert completes(receiver, sender)
        assert settled(receiver, slab)


def test_a_receiver_that_is_stopped_in_the_middle_costs_one_lease(both: tuple[NixlReceiver, Slab]) -> None:
    # case 54
    receiver, slab = both
    with child("push-nixl", "-") as sender:
        assert sender.hear() == "ready"
        assert completes(receiver, sender)
        for _ in range(3):
            landing = told(receiver, sender, lease_s=LEASE_S)
            begun = time.time()
            pid = receiver.agent_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            if (word := sender.hear().split(maxsplit=1))[0] == "pushed":  # it was quicker than the signal
                os.kill(pid, signal.SIGCONT)
                receiver.verify(landing, word[1])
                receiver.release(landing)
                continue
            assert word[0] == "LeaseExpired"
            assert time.time() - begun < 2 * LEASE_S
            with pytest.raises(LeaseExpired):
                receiver.verify(landing, "0" * 16)
            receiver.release(landing)
            assert settled(receiver, slab)
            assert not Path(f"/proc/{pid}").exists()
        assert completes(receiver, sender)


def test_a_receiver_that_does_not_move_keeps_the_sender_from_others_for_seconds_and_no_lease(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_sender, "_STALL_S", 1.0)
    sender = NixlSender.start(NixlExtra())
    with receiving(folder, MIB) as (receiver, slab):
        assert receiver.agent_pid is not None
        os.kill(receiver.agent_pid, signal.SIGSTOP)
        landing = reserved(receiver, 1000, lease_s=600.0)
        begun = time.monotonic()
        with pytest.raises(LeaseExpired, match="did not end in time"):
            sender.push_bytes(receiver.for_sender(landing), memoryview(bytes(1000)))
        assert time.monotonic() - begun < 30
        receiver.release(landing)
        assert settled(receiver, slab)
        assert arrives(receiver, sender, b"next")
    sender.close()


@pytest.mark.steady
def test_ten_agents_later_threads_files_and_memory_are_as_before(folder: Path) -> None:  # case 54
    sender, held = NixlSender.start(NixlExtra()), []
    with receiving(folder, MIB) as (receiver, slab):
        for _ in range(10):
            assert arrives(receiver, sender, b"first")
            lost = reserved(receiver, 1000)
            receiver.for_sender(lost)
            receiver.release(lost)
            assert settled(receiver, slab)
            held.append((len(os.listdir("/proc/self/fd")), threading.active_count(), resident_mib(os.getpid())))
        assert sender.stuck == 0
    files, running, mib = zip(*held, strict=True)
    assert max(files[4:]) <= max(files[:4]), files
    assert max(running) == min(running), running
    assert mib[-1] - mib[3] < 8, mib
    sender.close()


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_receivers_agent_that_is_killed_is_replaced_at_once(moment: str, both: tuple[NixlReceiver, Slab]) -> None:
    receiver, _ = both
    with child("push-nixl", "-") as sender:
        assert sender.hear() == "ready"
        assert completes(receiver, sender)
        pid = receiver.agent_pid
        assert pid is not None
        if moment == "during":
            landing = told(receiver, sender)
            wait_until(lambda: dirty(receiver, landing))
            os.kill(pid, signal.SIGKILL)
            assert sender.hear().split(maxsplit=1)[0] == "TransportError"
            with pytest.raises(TransportError, match="ended during the transfer"):
                receiver.verify(landing, "0" * 16)
            receiver.release(landing)
        else:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: receiver.agent_pid not in (pid, None))
        assert completes(receiver, sender)


@pytest.mark.steady
def test_a_receiver_restarted_ten_times_is_written_to_at_once(folder: Path) -> None:  # case 55
    """One sender meets ten receivers of one name, each killed with a landing told: nothing of them stays anywhere."""
    sender = NixlSender.start(NixlExtra())
    held: list[tuple[int, int]] = []
    for _ in range(10):
        with child("own-nixl", folder, 16 * MIB) as owner:
            slab = Path(owner.hear())
            owner.say(str(MIB))
            landing = NixlLanding.model_validate_json(owner.hear())
            owner.say(sender.push_bytes(landing, memoryview(pattern(landing))).checksum)
            assert owner.hear() == "True"
            owner.say(str(MIB))
            lost = NixlLanding.model_validate_json(owner.hear())
            agents = agents_of(owner.pid)
            owner.process.kill()
            owner.process.wait(10)
        wait_until(lambda gone=agents: not any(Path(f"/proc/{pid}").exists() for pid in gone))  # type: ignore[misc]
        with pytest.raises(TransportError):
            sender.push_bytes(lost, memoryview(pattern(lost)))
        assert sweep(folder) == [slab]
        held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert not list(folder.iterdir())
    for counts in zip(*held, strict=True):
        assert max(counts[2:]) <= counts[1], held
    sender.close()


def agents_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert children
    return [int(each) for each in children]


@pytest.mark.steady
def test_a_sender_restarted_ten_times_meets_the_same_receiver(folder: Path) -> None:  # case 55
    with receiving(folder, 16 * MIB) as (receiver, slab):
        pid, held = receiver.agent_pid, []
        for _ in range(10):
            with child("push-nixl", "-") as sender:
                assert sender.hear() == "ready"
                landing = reserved(receiver, MIB)
                sender.say(receiver.for_sender(landing).model_dump_json())
                assert sender.hear() == "begins"
                word, said = sender.hear().split(maxsplit=1)
                assert word == "pushed", said
                receiver.verify(landing, said)
                assert receiver.view(landing) == pattern(landing)
                receiver.release(landing)
                held.append(len(os.listdir(f"/proc/{pid}/fd")))
                sender.process.kill()
        assert receiver.agent_pid == pid
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= held[0])  # once a second it looks who is gone
        assert settled(receiver, slab)


def test_a_late_write_gives_its_memory_back_once_the_receiver_is_gone(both: tuple[NixlReceiver, Slab]) -> None:
    """Case 55: what the sender holds for a receiver that does not move goes with that receiver."""
    receiver, slab = both
    sender = NixlSender.start(NixlExtra())
    assert arrives(receiver, sender, b"first")
    pid = receiver.agent_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)
    landing = reserved(receiver, LARGE, lease_s=1.0)
    with pytest.raises(LeaseExpired):
        sender.push_bytes(receiver.for_sender(landing), memoryview(bytearray(LARGE)))
    assert sender.stuck == 1
    receiver.expire(landing.deadline)
    limit = time.monotonic() + LATEST_S
    while sender.stuck and time.monotonic() < limit:
        sender.forget_removed()
        time.sleep(0.01)
    assert sender.stuck == 0
    assert arrives(receiver, sender, b"next")
    sender.close()
    assert settled(receiver, slab)
