"""Pushes over NIXL between real agents: bits, bytes on the wire, wrong landings, leases, and ten thousand of them."""

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from encoder_service.outbox import on_device
from shared_runtime.transport.base import Receiver, Sender
from shared_runtime.transport.codec import checksum
from shared_runtime.transport.header import read_header
from shared_runtime.transport.nixl import DeviceBytes
from shared_runtime.transport.nixl_process import Notice
from shared_runtime.transport.nixl_receiver import NixlReceiver
from shared_runtime.transport.nixl_sender import NixlSender
from shared_runtime.transport.shm import ShmSender, SlabReader
from shared_runtime.transport.slab import Slab
from shared_schema.deploy.model import NixlExtra
from shared_schema.encode import NixlLanding, PushRequest, ShmLanding
from shared_schema.encoder_output import EncoderOutput
from shared_schema.errors import ChecksumMismatch, DeployError, LeaseExpired, ReceiverBusy, TransportError, WrongRequest
from tests.end_to_end.processes import resident_mib
from tests.payloads import GOLDEN_REF2VA, SMALL_REF2VA, payload_of
from tests.shared_runtime.transport.over_nixl import MIB, ONE, TWO, arrives, receiving, reserved, wait_until

pytestmark = pytest.mark.timeout(400)
SLAB = 64 * MIB


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NixlReceiver, Slab]]:
    with receiving(tmp_path_factory.mktemp("slabs"), SLAB) as (receiver, slab):
        yield receiver, slab


@pytest.fixture
def receiver(both: tuple[NixlReceiver, Slab]) -> NixlReceiver:
    return both[0]


@pytest.fixture
def slab(both: tuple[NixlReceiver, Slab]) -> Iterator[Slab]:
    """The slab behind the receiver; no test may leave anything in it."""
    yield both[1]
    wait_until(lambda: not both[0].expire(time.time()) and both[1].stats.bytes_in_use == 0)


@pytest.fixture(scope="module")
def sender() -> Iterator[NixlSender]:
    made = NixlSender.start(NixlExtra())
    yield made
    made.close()


def test_nixl_is_a_transport(receiver: NixlReceiver, slab: Slab, sender: NixlSender) -> None:
    """The annotations are the test: mypy proves them."""
    theirs: Receiver[ShmLanding] = receiver
    ours: Sender[NixlLanding] = sender
    payload = payload_of(SMALL_REF2VA)
    landing = theirs.reserve(payload.manifest.nbytes, ONE, 30.0, time.time())
    told = theirs.for_sender(landing)
    assert isinstance(told, NixlLanding)
    known = checksum(payload.data)
    assert ours.push(told, payload, checksum=known).checksum == known
    theirs.verify(landing, known)
    theirs.release(landing)


def test_a_payload_arrives_bit_for_bit_and_is_read_in_place(
    receiver: NixlReceiver, slab: Slab, sender: NixlSender
) -> None:  # case 35
    reader = SlabReader(slab.path.parent)
    for layout in (SMALL_REF2VA, GOLDEN_REF2VA):
        payload = payload_of(layout)
        landing = reserved(receiver, payload.manifest.nbytes)
        receiver.verify(landing, sender.push(receiver.for_sender(landing), payload).checksum)
        for view in (receiver.view(landing), reader.view(landing)):
            arrived = EncoderOutput(manifest=payload.manifest, data=view)
            assert arrived.data == payload.data
            assert arrived.layout == layout
        receiver.release(landing)
    reader.close()


NANS = torch.arange(0x7F81, 0x7FFF, dtype=torch.int16)
TENSORS = {
    "bf16": torch.randn(17, 40).to(torch.bfloat16),
    "fp16": torch.randn(17, 40).to(torch.float16),
    "fp32": torch.randn(17, 40),
    "fp8": torch.randn(17, 40).to(torch.float8_e4m3fn),
    "int64": torch.randint(-(2**62), 2**62, (33,)),
    "bool": torch.rand(1001) > 0.5,
    "no rows": torch.zeros(0, 96),
    "no dimensions": torch.tensor(1.5),
    "not contiguous": torch.randn(40, 60).t()[::2],
    "every bf16 nan": torch.cat([NANS, NANS | -0x8000]).view(torch.bfloat16),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor_arrives_with_its_bits(  # case 35
    name: str, receiver: NixlReceiver, slab: Slab, sender: NixlSender
) -> None:
    raw = TENSORS[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert arrives(receiver, sender, raw)


def test_what_crosses_is_the_tensors_and_little_else(receiver: NixlReceiver, slab: Slab, sender: NixlSender) -> None:
    payload = payload_of(GOLDEN_REF2VA)
    tensors = sum(spec.nbytes for spec in payload.manifest.slots)
    landing = reserved(receiver, payload.manifest.nbytes)
    told = receiver.for_sender(landing)
    receipt = sender.push(told, payload)
    notice = Notice(generation=1, request_id=ONE, bytes=receipt.bytes, checksum=receipt.checksum)
    beside = (PushRequest(landing=told), receipt, notice)
    assert receipt.bytes + sum(len(each.model_dump_json()) for each in beside) <= 1.01 * tensors + 4096
    receiver.verify(landing, receipt.checksum)
    receiver.release(landing)


def test_nothing_but_the_payloads_range_of_the_slab_changes(
    receiver: NixlReceiver, slab: Slab, sender: NixlSender
) -> None:
    before, ours, after = (reserved(receiver, 10_000) for _ in range(3))
    for canary in (before, after):
        receiver.view(canary)[:] = b"\xaa" * 10_000
    receiver.verify(ours, sender.push_bytes(receiver.for_sender(ours), memoryview(os.urandom(10_000))).checksum)
    for canary in (before, after):
        assert receiver.view(canary) == b"\xaa" * 10_000
        assert read_header(slab._view, canary.offset).belongs_to(canary)
    for landing in (before, ours, after):
        receiver.release(landing)


def test_a_checksum_made_beforehand_finds_bytes_that_changed_since(
    receiver: NixlReceiver, slab: Slab, sender: NixlSender
) -> None:
    data = memoryview(bytearray(1000))
    landing = reserved(receiver, 1000)
    known = checksum(data)
    data[7] = 1
    sender.push_bytes(receiver.for_sender(landing), data, checksum=known)
    with pytest.raises(ChecksumMismatch):
        receiver.verify(landing, known)
    receiver.release(landing)


def test_a_payload_of_this_process_needs_no_agent(receiver: NixlReceiver, slab: Slab) -> None:
    """A client's own `encoder_output` is copied in by the service itself."""
    own = ShmSender(slab.path.parent)
    landing = reserved(receiver, 1000)
    receiver.verify(landing, own.push_bytes(landing, memoryview(bytes(1000))).checksum)
    receiver.release(landing)
    own.close()
    assert (slab.stats.quarantined, slab.stats.bytes_in_use) == (0, 0)


def test_a_landing_that_is_not_what_it_says_is_refused(receiver: NixlReceiver, slab: Slab, sender: NixlSender) -> None:
    landing = reserved(receiver, 1000)
    told = receiver.for_sender(landing)
    for change in ({"address": told.address + SLAB}, {"address": 4096}, {"metadata": "AAAA"}, {"metadata": "no"}):
        owner = "somebody else" if "metadata" in change else told.owner
        with pytest.raises(TransportError):
            sender.push_bytes(told.model_copy(update={**change, "owner": owner}), memoryview(bytes(1000)))
    with pytest.raises(TransportError, match="1000 bytes"):
        sender.push_bytes(told, memoryview(bytes(999)))
    with pytest.raises(TransportError, match="is of agent"):
        sender.push_bytes(told.model_copy(update={"owner": "x", "agent": "another"}), memoryview(bytes(1000)))
    receiver.verify(landing, sender.push_bytes(told, memoryview(bytes(1000))).checksum)
    receiver.release(landing)


def test_a_notification_of_another_request_verifies_nothing(
    receiver: NixlReceiver, slab: Slab, sender: NixlSender
) -> None:
    landing = reserved(receiver, 1000)
    told = receiver.for_sender(landing).model_copy(update={"request_id": TWO})
    said = sender.push_bytes(told, memoryview(bytes(1000))).checksum
    with pytest.raises(WrongRequest):
        receiver.verify(landing, said)
    receiver.release(landing)


def test_a_landing_whose_lease_is_over_is_not_written(receiver: NixlReceiver, slab: Slab, sender: NixlSender) -> None:
    landing = reserved(receiver, 1000, lease_s=0.001)
    told = receiver.for_sender(landing).model_copy(update={"seconds_left": 1e-9})
    with pytest.raises(LeaseExpired):
        sender.push_bytes(told, memoryview(bytes(1000)))
    with pytest.raises(LeaseExpired):
        receiver.verify(landing, "0" * 16)
    receiver.release(landing)


def test_a_landing_given_up_is_closed_until_its_agent_is_gone(
    receiver: NixlReceiver, slab: Slab, sender: NixlSender
) -> None:
    landing = reserved(receiver, 1000)
    told = receiver.for_sender(landing)
    receiver.release(landing)
    assert slab.stats.quarantined == 1
    with pytest.raises(ReceiverBusy):
        receiver.reserve(1000, ONE, 30.0, time.time())
    wait_until(lambda: not receiver.expire(time.time()) and slab.stats.quarantined == 0)
    with pytest.raises(TransportError):
        sender.push_bytes(told, memoryview(bytes(1000)))
    assert arrives(receiver, sender, b"next")
    assert sender.stuck == 0


def test_an_agent_stays_until_its_other_landings_are_over(
    receiver: NixlReceiver, slab: Slab, sender: NixlSender
) -> None:
    lost, kept = reserved(receiver, 1000), reserved(receiver, 1000)
    receiver.for_sender(lost)
    told = receiver.for_sender(kept)
    receiver.release(lost)
    later = reserved(receiver, 1000)
    assert receiver.for_sender(later).agent != told.agent
    assert slab.stats.quarantined == 1
    receiver.verify(kept, sender.push_bytes(told, memoryview(bytes(1000))).checksum)
    wait_until(lambda: not receiver.expire(time.time()) and slab.stats.quarantined == 0)
    receiver.release(kept)
    receiver.release(later)


@pytest.mark.slow
def test_200_leases_racing_their_pushes_are_right_or_lapsed(  # cases 34, 46
    receiver: NixlReceiver, slab: Slab, sender: NixlSender
) -> None:
    """Whoever verifies may never see a byte of what the next user of a lapsed landing writes there."""
    draw, outcomes = np.random.default_rng(34), {"right": 0, "lapsed": 0}
    data = [memoryview(os.urandom(MIB)) for _ in range(4)]
    stop = threading.Event()
    hurry = threading.Thread(target=keep_expiring_and_filling, args=(receiver, slab, stop))
    hurry.start()
    try:
        for turn in range(200):
            lease = float(draw.uniform(0.0005, 0.01)) if turn % 20 == 0 else 30.0
            landing = reserved(receiver, MIB, f"{turn:032x}", lease)
            try:
                receipt = sender.push_bytes(receiver.for_sender(landing), data[turn % 4])
                time.sleep(lease + 0.01 if turn % 40 == 20 else 0)
                receiver.verify(landing, receipt.checksum)
            except (LeaseExpired, TransportError):
                outcomes["lapsed"] += 1
            else:
                assert receiver.view(landing) == data[turn % 4]
                outcomes["right"] += 1
            finally:
                receiver.release(landing)
    finally:
        stop.set()
        hurry.join()
    assert min(outcomes.values()) > 0, outcomes


def keep_expiring_and_filling(receiver: NixlReceiver, slab: Slab, stop: threading.Event) -> None:
    own = ShmSender(slab.path.parent)
    while not stop.wait(0.0005):
        receiver.expire(time.time())
        landing = slab.reserve(MIB, "a" * 32, 30.0, time.time())
        own.push_bytes(landing, memoryview(b"\xaa" * MIB))
        slab.release(landing)
    own.close()


def counts(pid: int) -> tuple[int, int]:
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.slow
@pytest.mark.steady
def test_10_000_transfers_leave_memory_threads_and_files_as_they_were(
    receiver: NixlReceiver, slab: Slab, sender: NixlSender
) -> None:
    data = memoryview(os.urandom(64 * 1024))

    def push(times: int) -> None:
        for _ in range(times):
            landing = receiver.reserve(data.nbytes, ONE, 30.0, time.time())
            receiver.verify(landing, sender.push_bytes(receiver.for_sender(landing), data).checksum)
            receiver.release(landing)

    push(1000)
    child = receiver.agent_pid
    assert child is not None
    before = {pid: (resident_mib(pid), counts(pid)) for pid in (os.getpid(), child)}
    push(9000)
    assert receiver.agent_pid == child
    for pid, (mib, held) in before.items():
        assert counts(pid) == held
        assert resident_mib(pid) - mib < 8, pid


class _Agent:
    """Takes note of what it is to write, and says that it is written."""

    def __init__(self) -> None:
        self.written: list[object] = []

    def add_peer(self, _metadata: str) -> str:
        return "theirs"

    def write(self, _peer: str, _address: int, data: object, _note: bytes) -> object:
        self.written.append(data)
        return type("Write", (), {"state": "done"})()


def test_bytes_on_a_gpu_are_written_from_where_they_are() -> None:
    agent = _Agent()
    landing = NixlLanding(
        owner="o",
        generation=1,
        length=64,
        request_id=ONE,
        seconds_left=9,
        agent="theirs",
        address=4096,
        metadata="bQ==",
    )
    source = DeviceBytes(address=1 << 40, nbytes=64, device=3, owner=None)
    receipt = NixlSender(agent).push_bytes(landing, source, checksum="ab" * 8)  # type: ignore[arg-type]
    assert (agent.written, receipt.bytes, receipt.checksum) == ([source], 64, "ab" * 8)


def test_a_gpu_is_read_only_by_a_ucx_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_runtime.transport.nixl_sender.ucx_knows_cuda", lambda: False)
    with pytest.raises(DeployError, match="gpu_direct needs a UCX with CUDA"):
        NixlSender.start(NixlExtra(gpu_direct=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
def test_bytes_of_a_gpu_arrive(receiver: NixlReceiver, slab: Slab) -> None:
    tensor = torch.arange(MIB, device="cuda").view(torch.uint8)
    direct = NixlSender.start(NixlExtra(gpu_direct=True))
    landing = reserved(receiver, tensor.numel())
    known = checksum(tensor.cpu().numpy().data)
    receiver.verify(
        landing, direct.push_bytes(receiver.for_sender(landing), on_device(tensor), checksum=known).checksum
    )
    receiver.release(landing)
    direct.close()
