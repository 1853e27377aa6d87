"""A slab behind a NIXL agent, as the tests of this folder use it: one push, and waiting for the agent's successor."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared_runtime.transport.nixl_receiver import NixlReceiver
from shared_runtime.transport.nixl_sender import NixlSender
from shared_runtime.transport.slab import Slab
from shared_schema.deploy.model import NixlExtra
from shared_schema.encode import ShmLanding
from shared_schema.errors import SlabFull

ONE, TWO = "1" * 32, "2" * 32
MIB = 2**20
LATEST_S = 60.0
"""For an agent to be replaced, on a busy machine."""


@contextmanager
def receiving(folder: Path, size: int) -> Iterator[tuple[NixlReceiver, Slab]]:
    """A receiver over a slab of `size` bytes."""
    slab = Slab.create(folder, size, "test")
    receiver = NixlReceiver.start(slab, "the test", NixlExtra())
    try:
        yield receiver, slab
    finally:
        receiver.close()


def wait_until(done: Callable[[], bool]) -> None:
    """Return once `done`; TimeoutError after a minute."""
    limit = time.monotonic() + LATEST_S
    while not done():
        if time.monotonic() > limit:
            raise TimeoutError("it does not happen")
        time.sleep(0.005)


def reserved(receiver: NixlReceiver, length: int, request_id: str = ONE, lease_s: float = 30.0) -> ShmLanding:
    """A landing, waiting as a push does while an agent is replaced or memory is in quarantine."""
    limit = time.monotonic() + LATEST_S
    while True:
        try:
            return receiver.reserve(length, request_id, lease_s, time.time())
        except SlabFull:
            receiver.expire(time.time())
            if time.monotonic() > limit:
                raise
            time.sleep(0.005)


def arrives(receiver: NixlReceiver, sender: NixlSender, data: bytes) -> bool:
    """Whether these bytes reach a fresh landing; it is given back."""
    landing = reserved(receiver, len(data))
    receipt = sender.push_bytes(receiver.for_sender(landing), memoryview(data))
    receiver.verify(landing, receipt.checksum)
    same = receiver.view(landing) == data
    receiver.release(landing)
    return same
