"""NIXL, the side that sends: one WRITE with a notification into a landing on any host. Encoder's leader; no torch."""

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from shared_runtime.transport.codec import checksum as checksum_of
from shared_runtime.transport.nixl import POLL_S, Agent, DeviceBytes, Write, ucx_knows_cuda
from shared_runtime.transport.nixl_process import Notice
from shared_schema.deploy.model import NixlExtra
from shared_schema.encode import NixlLanding, PushReceipt
from shared_schema.encoder_output import EncoderOutput
from shared_schema.errors import DeployError, LeaseExpired, TransportError

IDLE_PEER_S = 600.0
"""A receiver that nothing was sent to for this long is forgotten; the next push connects anew."""
_MAX_POLL_S = 0.002
_STALL_S = 10.0
_SLOWEST = 50e6
"""A write may take ten seconds, and one more for every so many bytes: one receiver that does not move is not to keep
the encoder from all others for a whole lease."""


@dataclass
class _Peer:
    """A receiver's agent that we have a connection to."""

    agent: str
    used_at: float


@dataclass(frozen=True)
class _Stuck:
    """A write past its deadline that has not ended: NIXL cannot take it back, so the memory that it reads stays."""

    agent: str
    write: Write
    data: memoryview | DeviceBytes


class NixlSender:
    """Writes payloads into landings of any receiver. Thread-safe: one push at a time."""

    def __init__(
        self,
        agent: Agent,
        *,
        limit_s: float | None = None,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit_s` is the most that one write may take within its lease, `poll_s` is between two looks at it."""
        self._agent = agent
        self._limit_s = limit_s
        self._poll_s = poll_s
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._stuck: list[_Stuck] = []
        self._leaving: set[str] = set()
        """Agents to be forgotten once no late write to them is left."""
        self._lock = threading.Lock()

    @classmethod
    def start(cls, options: NixlExtra) -> Self:
        """Start an agent that has proved itself.

        Raises:
            DeployError: NIXL cannot be used; one line that says what to change.
        """
        agent = Agent(f"h3-{uuid.uuid4().hex}", num_threads=options.num_threads or 0)
        agent.prove()
        if options.gpu_direct and not ucx_knows_cuda():
            raise DeployError("NixlConnector: gpu_direct needs a UCX with CUDA, and none was loaded here: leave it out")
        return cls(agent, limit_s=options.transfer_timeout_s, poll_s=options.poll_interval_s or POLL_S)

    @property
    def stuck(self) -> int:
        """Writes past their deadline that have not ended yet."""
        return len(self._stuck)

    def push(self, landing: NixlLanding, payload: EncoderOutput, *, checksum: str | None = None) -> PushReceipt:
        """Write the payload's bytes into its landing. `checksum` is the payload's where it has been made already.

        Raises:
            LeaseExpired: the lease or the write's own limit ended before the last byte was there: nothing is used.
            TransportError: the receiver cannot be reached or has gone, or the landing is no landing of this payload.
        """
        return self.push_bytes(landing, payload.data[: payload.manifest.nbytes], checksum=checksum)

    def push_bytes(
        self, landing: NixlLanding, data: memoryview | DeviceBytes, *, checksum: str | None = None
    ) -> PushReceipt:
        """Write any bytes into a landing of just their length, a GPU's with their checksum. Errors as `push`."""
        deadline = self._clock() + min(landing.seconds_left, self._limit_s or _STALL_S + landing.length / _SLOWEST)
        if data.nbytes != landing.length:
            raise TransportError(f"a landing of {landing.length} bytes was given for {data.nbytes} bytes")
        if checksum is None:
            assert isinstance(data, memoryview)
            checksum = checksum_of(data)
        notice = Notice(
            generation=landing.generation, request_id=landing.request_id, bytes=landing.length, checksum=checksum
        )
        with self._lock:
            self._settle()
            self._connect(landing)
            if self._clock() >= deadline:
                raise LeaseExpired(f"the lease of landing {landing.generation} has ended")
            begun = time.perf_counter()
            self._write(landing, data.cast("B") if isinstance(data, memoryview) else data, notice, deadline)
            return PushReceipt(bytes=landing.length, checksum=checksum, seconds=time.perf_counter() - begun)

    def _write(self, landing: NixlLanding, data: memoryview | DeviceBytes, notice: Notice, deadline: float) -> None:
        try:
            write = self._agent.write(landing.agent, landing.address, data, notice.model_dump_json().encode())
        except TransportError:
            self._forget(landing.owner)
            raise
        pause = self._poll_s
        while write.state == "under way":
            if self._clock() >= deadline:
                self._stuck.append(_Stuck(landing.agent, write, data))
                raise LeaseExpired(f"the write into landing {landing.generation} did not end in time")
            time.sleep(pause)
            pause = min(pause * 1.5, max(_MAX_POLL_S, self._poll_s))
        if write.state == "broken":
            self._forget(landing.owner)
            raise TransportError(f"the receiver of landing {landing.generation} went away during the write")

    def _connect(self, landing: NixlLanding) -> None:
        """Know the landing's agent; an owner that was started anew replaces its old agent at once."""
        peer = self._peers.get(landing.owner)
        if peer is not None and peer.agent != landing.agent:
            self._forget(landing.owner)
            peer = None
        if peer is None:
            name = self._agent.add_peer(landing.metadata)
            if name != landing.agent:
                self._agent.forget_peer(name)
                raise TransportError(f"the metadata of landing {landing.generation} is of agent {name[:64]}")
            peer = self._peers[landing.owner] = _Peer(name, 0.0)
        peer.used_at = self._clock()

    def _forget(self, owner: str) -> None:
        self._leaving.add(self._peers.pop(owner).agent)
        self._settle()

    def _settle(self) -> None:
        """Let go of late writes that have ended, and of the agents that nothing is left for."""
        self._stuck = [each for each in self._stuck if each.write.state == "under way"]
        for agent in self._leaving - {each.agent for each in self._stuck}:
            self._agent.forget_peer(agent)
            self._leaving.discard(agent)

    def forget_removed(self) -> None:
        """Let go of late writes that have ended and of receivers that nothing was sent to for ten minutes."""
        with self._lock:
            self._settle()
            for owner in [o for o, peer in self._peers.items() if self._clock() - peer.used_at > IDLE_PEER_S]:
                self._forget(owner)
            self._agent.move_on()

    def close(self) -> None:
        """Forget every receiver; late writes keep theirs, and end with the process."""
        with self._lock:
            for owner in list(self._peers):
                self._forget(owner)
