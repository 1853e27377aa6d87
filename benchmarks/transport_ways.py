"""The ways of a payload from one process to another, measured in turns. Times in milliseconds."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Literal, Protocol

import msgpack
import numpy as np
from pydantic import TypeAdapter

from benchmarks.nixl_read import PeerSource
from benchmarks.transport_load import Load
from benchmarks.transport_owner import OwnerProcess
from shared_runtime.transport.codec import checksum
from shared_runtime.transport.nixl import POLL_S
from shared_runtime.transport.nixl_sender import NixlSender
from shared_runtime.transport.shm import ShmSender
from shared_schema.deploy.model import NixlExtra
from shared_schema.encode import NixlLanding, PushReceipt, ShmLanding

Memory = Literal["reused", "fresh"]
_LANDING: TypeAdapter[ShmLanding | NixlLanding] = TypeAdapter(ShmLanding | NixlLanding)


@dataclass(frozen=True)
class Turn:
    """One payload on one way."""

    move: float
    """From the first byte written to the receiver's usable view, without messages and checksums."""
    control: float = 0.0
    """Messages between the two: room asked for and given, and the word that the payload is there."""
    sender_checksum: float = 0.0
    """Of the sender's bytes, alone."""
    receiver_checksum: float = 0.0
    with_checksum: float = 0.0
    """`move` with the sender's checksum made beside the copy and the receiver's after it; 0 where there is none."""


class Way(Protocol):
    """One of them."""

    name: str
    memory: Memory
    """Whether the bytes arrive in memory that was touched before, or in pages that the kernel has to find and clear."""

    def turn(self, load: Load, known: str) -> Turn:
        """Send it once; `known` is its checksum."""

    def close(self) -> None:
        """Let go of everything."""


def timed(work: Callable[[], object]) -> float:
    """Milliseconds that `work` takes."""
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1e3


class Memcpy:
    """Within this process, no message and no second look: the yardstick."""

    def __init__(self, memory: Memory) -> None:
        self.memory: Memory = memory
        self.name = "memcpy"
        self._target = np.empty(0, np.uint8)

    def turn(self, load: Load, known: str) -> Turn:
        """One numpy copy."""
        source = np.frombuffer(load.data, np.uint8)
        if self.memory == "fresh":
            return Turn(timed(lambda: source.copy()))
        if self._target.nbytes != load.nbytes:
            self._target = np.ones(load.nbytes, np.uint8)
        return Turn(timed(lambda: np.copyto(self._target, source)))

    def close(self) -> None:
        """Nothing."""


class Ours:
    """A push into a landing that the owner reserved, verified by the owner."""

    memory: Memory = "reused"

    def __init__(self, owner: OwnerProcess, way: Literal["shm", "nixl"]) -> None:
        self.name = f"ours over {way}"
        self._owner = owner
        self._way = way
        self._shm = ShmSender(owner.folder) if way == "shm" else None
        self._nixl = NixlSender.start(NixlExtra()) if way == "nixl" else None

    def turn(self, load: Load, known: str) -> Turn:
        """Once with the checksum made beforehand, as a payload that waits has it, and once with it made on the way."""
        plain = self._send(load, known)
        hashed = self._send(load, None)
        return Turn(
            move=plain.move,
            control=plain.control,
            sender_checksum=timed(lambda: checksum(load.data)),
            receiver_checksum=plain.receiver_checksum,
            with_checksum=hashed.move + hashed.receiver_checksum,
        )

    def _send(self, load: Load, known: str | None) -> Turn:
        asked = time.perf_counter()
        landing = _LANDING.validate_python(self._owner.ask(do="reserve", way=self._way, length=load.nbytes)["landing"])
        begun = time.perf_counter()
        receipt = self._push(landing, load.data, known)
        sent = time.perf_counter()
        used = self._owner.ask(do="use", way=self._way, checksum=receipt.checksum)
        return Turn(
            move=(sent - begun + used["looking_s"]) * 1e3,
            control=(begun - asked + used["got"] - sent) * 1e3,
            receiver_checksum=used["checksum_s"] * 1e3,
        )

    def _push(self, landing: ShmLanding | NixlLanding, data: memoryview, known: str | None) -> PushReceipt:
        match landing:
            case ShmLanding():
                assert self._shm is not None
                return self._shm.push_bytes(landing, data, checksum=known)
            case NixlLanding():
                assert self._nixl is not None
                return self._nixl.push_bytes(landing, data, checksum=known)

    def close(self) -> None:
        """End the sender."""
        for sender in (self._shm, self._nixl):
            if sender is not None:
                sender.close()


class FreshSegment:
    """What peers do: tensor bytes into msgpack, msgpack into a new shared memory segment, and back."""

    memory: Memory = "fresh"
    name = "fresh segment, msgpack"

    def __init__(self, owner: OwnerProcess) -> None:
        self._owner = owner

    def turn(self, load: Load, known: str) -> Turn:
        """One payload; the segment is made here and removed by the receiver."""
        whole = np.frombuffer(load.data, np.uint8)
        begun = time.perf_counter()
        body = msgpack.packb({name: {"data": whole[at : at + size].tobytes()} for name, at, size in load.tensors})
        segment = SharedMemory(create=True, size=len(body))
        segment.buf[: len(body)] = body
        sent = time.perf_counter()
        used = self._owner.ask(do="segment", name=segment.name, length=len(body))
        resource_tracker.unregister(f"/{segment.name}", "shared_memory")
        segment.close()
        assert used["bytes"] == sum(size for _, _, size in load.tensors)
        return Turn(move=(sent - begun + used["usable"] - used["got"]) * 1e3, control=(used["got"] - sent) * 1e3)

    def close(self) -> None:
        """Nothing."""


class PeersRead:
    """What peers do over NIXL: register, introduce, READ and tear down for every request."""

    memory: Memory = "fresh"
    name = "NIXL READ, registered per request"

    def __init__(self, owner: OwnerProcess) -> None:
        self._owner = owner
        self._source = PeerSource("benchmark-source")

    def turn(self, load: Load, known: str) -> Turn:
        """One payload, read by the receiver while this side keeps the connection moving."""
        begun = time.perf_counter()
        offer = self._source.offer(load.data)
        offered = time.perf_counter()
        self._owner.tell(do="read", offer=offer.to_json())
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(self._owner.answer)
            while not reading.done():
                self._source.help()
                time.sleep(POLL_S)
            used = reading.result()
        ended = time.perf_counter()
        self._source.withdraw()
        torn_down = time.perf_counter() - ended
        assert used["checksum"] == known
        moved = offered - begun + used["usable"] - used["got"] + torn_down
        return Turn(move=moved * 1e3, control=(used["got"] - offered) * 1e3)

    def close(self) -> None:
        """The agent ends with the process."""
