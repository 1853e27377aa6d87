"""The slab as a receiver over NIXL: landings that senders on any host write into. Diffusion API process; no torch.

Nobody can take a write back: a sender that was stopped in the middle may go on long after its lease. So a landing
that was told to a sender stays claimed (see claims.py) until its notification is here. A landing that is given up
before that retires the agent: a new one takes over at once, and once the last landing that the old one still serves
is over, its process is killed. Then nothing can reach the slab through it, its claims go, and the memory is free.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

from shared_runtime.transport.claims import drop_claim, try_claim
from shared_runtime.transport.header import HEADER_BYTES
from shared_runtime.transport.nixl_process import AgentProcess, Notice
from shared_runtime.transport.slab import Slab
from shared_schema.deploy.model import NixlExtra
from shared_schema.encode import NixlLanding, ShmLanding
from shared_schema.errors import DeployError, LeaseExpired, ReceiverBusy, TransportError, WrongRequest

_RETRY_S = 2.0
"""Before an agent that did not start is tried again."""
logger = logging.getLogger(__name__)

StartAgent = Callable[[str], AgentProcess]


@dataclass(eq=False)
class _Epoch:
    """One agent, and the landings that were told with it."""

    agent: AgentProcess
    claims: int
    """An open file of the slab of its own: through it this epoch's landings are claimed."""
    open: set[int] = field(default_factory=set)
    """Told, and neither written nor given up."""
    retired: bool = False
    ended: bool = False
    """Its process is gone and `claims` is closed."""

    @property
    def over(self) -> bool:
        """Whether nobody needs it any more: no sender may be writing, or none can."""
        return not (self.open and self.agent.alive)


class NixlReceiver:
    """A slab whose landings are told to senders over NIXL. Thread-safe. Build it with `start`, end it with `close`."""

    def __init__(self, slab: Slab, owner: str, start: StartAgent, first: AgentProcess) -> None:
        self._slab = slab
        self._owner = owner
        self._start = start
        self._changed = threading.Condition()
        self._told: dict[int, _Epoch] = {}
        self._old: list[_Epoch] = []
        self._current: _Epoch | None = None
        self._closed = False
        self._trouble: str | None = None
        self._begin(first)
        self._keeper = threading.Thread(target=self._keep, name="nixl-agents", daemon=True)
        self._keeper.start()

    @classmethod
    def start(cls, slab: Slab, owner: str, options: NixlExtra) -> Self:
        """Start the agent over a slab of ours. `owner` is to be the same after a restart of this service.

        Raises:
            DeployError: NIXL cannot be used; one line that says what to change.
        """

        def start(name: str) -> AgentProcess:
            return AgentProcess.start(name, slab.path, poll_s=options.poll_interval_s)

        return cls(slab, owner, start, start(_new_name()))

    def reserve(self, length: int, request_id: str, lease_s: float, now: float) -> ShmLanding:
        """As `Slab.reserve`.

        Raises:
            ReceiverBusy: an agent is being replaced: there is another one in a moment.
        """
        with self._changed:
            if self._current is None:
                raise ReceiverBusy(self._trouble or "the NIXL agent of this service is being replaced")
        return self._slab.reserve(length, request_id, lease_s, now)

    def for_sender(self, landing: ShmLanding) -> NixlLanding:
        """What the sender is told. From here on it may write, until it notifies us or its agent is gone.

        Raises:
            TransportError: there is no agent now.
        """
        with self._changed:
            epoch = self._current
            if epoch is None:
                raise TransportError(self._trouble or "the NIXL agent of this service is being replaced")
            if not try_claim(epoch.claims, landing.generation):
                raise TransportError(f"landing {landing.generation} is being written by another sender")
            epoch.open.add(landing.generation)
            self._told[landing.generation] = epoch
        epoch.agent.expect(landing.generation)
        return NixlLanding(
            owner=self._owner,
            agent=epoch.agent.name,
            metadata=epoch.agent.metadata,
            address=epoch.agent.address + landing.offset + HEADER_BYTES,
            length=landing.length,
            generation=landing.generation,
            request_id=landing.request_id,
            seconds_left=max(landing.deadline - time.time(), 1e-3),
        )

    @property
    def kind(self) -> Literal["nixl"]:
        """Senders reach it through an agent."""
        return "nixl"

    @property
    def agent_pid(self) -> int | None:
        """Process id of the agent that is told of now; None while it is being replaced."""
        with self._changed:
            return None if self._current is None else self._current.agent.pid

    @property
    def trouble(self) -> str | None:
        """Why no agent could be started, while none is there."""
        return self._trouble

    def verify(self, landing: ShmLanding, checksum: str) -> None:
        """As `Slab.verify`, once the notification is here; waits for it until the landing's deadline.

        Raises:
            LeaseExpired: it is not here by then, or the landing was given up.
            TransportError: the agent ended before.
            WrongRequest, ChecksumMismatch: it is not that landing's, or the bytes are not those that were sent.
        """
        with self._changed:
            epoch = self._told.get(landing.generation)
        if epoch is not None:
            try:
                notice = epoch.agent.notice(landing.generation, max(landing.deadline - time.time(), 0))
            except TimeoutError:
                raise LeaseExpired(f"no notification of landing {landing.generation} before its deadline") from None
            self._written(landing, notice)
        self._slab.verify(landing, checksum)

    def _written(self, landing: ShmLanding, notice: Notice) -> None:
        if (notice.request_id, notice.bytes) != (landing.request_id, landing.length):
            raise WrongRequest(f"the notification of landing {landing.generation} is of another request or length")
        self._slab.written(landing, notice.checksum)
        with self._changed:
            epoch = self._told.pop(landing.generation, None)
            if epoch is None:
                raise LeaseExpired(f"landing {landing.generation} was given up")
            if not epoch.ended:
                drop_claim(epoch.claims, landing.generation)
            self._close_landing(epoch, landing.generation)

    def view(self, landing: ShmLanding) -> memoryview:
        """As `Slab.view`."""
        return self._slab.view(landing)

    def release(self, landing: ShmLanding) -> None:
        """As `Slab.release`; where a sender may still write, the agent is replaced before the memory is used again."""
        self._slab.release(landing)
        self._give_up([landing])

    def expire(self, now: float) -> list[ShmLanding]:
        """As `Slab.expire`; agents of landings that lapsed are replaced."""
        lapsed = self._slab.expire(now)
        self._give_up(lapsed)
        return lapsed

    def _give_up(self, landings: list[ShmLanding]) -> None:
        with self._changed:
            for landing in landings:
                epoch = self._told.pop(landing.generation, None)
                if epoch is not None:
                    logger.info("landing %d was given up: its NIXL agent is replaced", landing.generation)
                    self._retire(epoch)
                    self._close_landing(epoch, landing.generation)

    def _close_landing(self, epoch: _Epoch, generation: int) -> None:
        epoch.open.discard(generation)
        epoch.agent.forget(generation)
        self._changed.notify_all()

    def _retire(self, epoch: _Epoch) -> None:
        if not epoch.retired:
            epoch.retired = True
            self._old.append(epoch)
        if self._current is epoch:
            self._current = None
        self._changed.notify_all()

    def _gone(self, agent: AgentProcess) -> None:
        """An agent's process has ended, by our hand or not."""
        with self._changed:
            if self._current is not None and self._current.agent is agent:
                logger.warning("the NIXL agent of this service ended: another one is started")
                self._retire(self._current)
            self._changed.notify_all()

    def _begin(self, agent: AgentProcess) -> None:
        epoch = _Epoch(agent, os.open(self._slab.path, os.O_RDWR | os.O_CLOEXEC))
        with self._changed:
            self._current = epoch
            self._trouble = None
        agent.watch(self._gone)

    def _keep(self) -> None:
        """The keeper's thread: always one agent to tell of, and an end to every old one that nobody needs."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closed:
                    return
                done, missing = [epoch for epoch in self._old if epoch.over], self._current is None
            for epoch in done:
                self._end(epoch)
            if missing:
                self._replace()

    def _has_work(self) -> bool:
        return self._closed or self._current is None or any(epoch.over for epoch in self._old)

    def _replace(self) -> None:
        try:
            agent = self._start(_new_name())
        except DeployError as error:
            logger.error("%s", error.message)
            with self._changed:
                self._trouble = error.message
                self._changed.wait_for(lambda: self._closed, _RETRY_S)
            return
        self._begin(agent)

    def _end(self, epoch: _Epoch) -> None:
        """Kill an old agent; its claims go once it is proved to be gone, and the slab may use the memory again."""
        if not epoch.agent.end():
            logger.error("the NIXL agent with process id %d does not end: its landings stay closed", epoch.agent.pid)
            return
        with self._changed:
            self._old.remove(epoch)
            epoch.ended = True
            os.close(epoch.claims)

    def close(self) -> None:
        """End every agent, then the slab. Harmless when repeated."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._keeper.join()
        with self._changed:
            if self._current is not None:
                self._retire(self._current)
        for epoch in list(self._old):
            self._end(epoch)
        self._slab.close()


def _new_name() -> str:
    return f"h3-{uuid.uuid4().hex}"
