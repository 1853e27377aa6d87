"""What the peers do over NIXL: register and introduce for every request, connect, READ, tear down. For comparison only.

The sending side packs a payload into a buffer of this one request and registers it; the receiving side makes a buffer,
registers it, adds the sender's agent, reads, and takes all of it back. Buffers are fresh memory for every request, as
the peers' are; agents live as long as their process.
"""

import base64
import json
import mmap
import time
from dataclasses import dataclass
from typing import Any

import nixl
import numpy as np

from shared_runtime.transport.nixl import POLL_S, address_of


@dataclass(frozen=True)
class Offer:
    """Where a payload can be read, as it goes to the receiver."""

    metadata: str
    address: int
    length: int

    def to_json(self) -> str:
        """One line."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, line: str) -> "Offer":
        """The reverse of `to_json`."""
        return cls(**json.loads(line))


def make_agent(name: str) -> Any:
    """An agent as the peers make it, once a process; without the progress thread, which would take a core."""
    return nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False))


class PeerSource:
    """The sending side: offers one payload at a time and withdraws it."""

    def __init__(self, name: str) -> None:
        self._agent = make_agent(name)
        self._registered: Any = None
        self._packed = memoryview(b"")

    def offer(self, data: memoryview, *, pack: bool = True) -> Offer:
        """Pack and register the payload, and say where it is. Without `pack` it is registered where it lies."""
        self._packed = memoryview(mmap.mmap(-1, data.nbytes)) if pack else data
        if pack:
            self._packed[:] = data
        address = address_of(self._packed)
        self._registered = self._agent.register_memory([(address, data.nbytes, 0, "")], "DRAM")
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return Offer(metadata, address, data.nbytes)

    def help(self) -> None:
        """Move the connection on while the other side reads: call it again and again."""
        self._agent.get_new_notifs()

    def withdraw(self) -> None:
        """After the read: take the registration back."""
        self._agent.deregister_memory(self._registered)
        self._packed = memoryview(b"")


class PeerReader:
    """The receiving side."""

    def __init__(self, name: str) -> None:
        self._agent = make_agent(name)

    def read(self, offer: Offer) -> memoryview:
        """Everything that one request needs; returns the payload in fresh memory."""
        buffer = np.frombuffer(mmap.mmap(-1, offer.length), np.uint8)
        registered = self._agent.register_memory([(buffer.ctypes.data, offer.length, 0, "")], "DRAM")
        name = self._agent.add_remote_agent(base64.b64decode(offer.metadata))
        local = self._agent.get_xfer_descs([(buffer.ctypes.data, offer.length, 0)], "DRAM")
        remote = self._agent.get_xfer_descs([(offer.address, offer.length, 0)], "DRAM")
        handle = self._agent.initialize_xfer("READ", local, remote, name, b"")
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"the READ ended as {state}")
        self._agent.release_xfer_handle(handle)
        self._agent.remove_remote_agent(name)
        self._agent.deregister_memory(registered)
        return buffer.data
