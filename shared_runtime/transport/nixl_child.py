"""The child process itself: the receiving agent over the mapped slab. Runs as `-m ... FD NAME [SLAB] [POLL]`. No torch.

It looks for notifications only while some are awaited, and sleeps in the kernel otherwise, with one look a second so
that connections which peers close are closed here too. It ends with its parent, also when it is stopped.
"""

import logging
import os
import select
import signal
import socket
import sys
from pathlib import Path

from pydantic import ValidationError

from shared_runtime.logs import set_up_logging
from shared_runtime.ranks.forker import die_with_parent
from shared_runtime.transport.files import MappedSlab
from shared_runtime.transport.nixl import POLL_S, PROOF_BYTES, Agent
from shared_runtime.transport.nixl_process import MAX_MESSAGE, Arrived, Expect, Failed, Notice, Started, two_ucx
from shared_schema.errors import H3Error

_IDLE_S = 1.0
logger = logging.getLogger(__name__)


def main(descriptor: int, name: str, slab: str, poll_s: float) -> None:
    """Start the agent, say so, then tell of notices until the parent is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent ends us, after it has drained
    die_with_parent()
    Path("/proc/self/comm").write_text("nixl-agent")
    set_up_logging("info", "nixl-agent")
    pipe = socket.socket(fileno=descriptor)
    try:
        agent = Agent(name)
        agent.prove()
        view = MappedSlab(Path(slab)).view if slab else memoryview(bytearray(PROOF_BYTES))
        address = agent.register(view)
    except H3Error as error:
        pipe.send(Failed(message=error.message).model_dump_json().encode())
        return
    if doubled := two_ucx(os.getpid()):
        logger.warning("two UCX are loaded: %s", ", ".join(doubled))
    pipe.send(Started(metadata=agent.metadata, address=address).model_dump_json().encode())
    Receiving(agent, pipe, poll_s).run()


class Receiving:
    """The loop of the child."""

    def __init__(self, agent: Agent, pipe: socket.socket, poll_s: float) -> None:
        self._agent = agent
        self._pipe = pipe
        self._poll_s = poll_s
        self._awaited: set[int] = set()

    def run(self) -> None:
        """Until the parent closes its end."""
        while True:
            readable, _, _ = select.select([self._pipe], [], [], self._poll_s if self._awaited else _IDLE_S)
            if readable:
                data = self._pipe.recv(MAX_MESSAGE)
                if not data:
                    return
                self._awaited.add(Expect.model_validate_json(data).generation)
            for note in self._agent.notes():
                self._tell(note)

    def _tell(self, note: bytes) -> None:
        try:
            notice = Notice.model_validate_json(note)
        except ValidationError:
            logger.warning("a notification of %d bytes is not ours", len(note))
            return
        if notice.generation in self._awaited:
            self._awaited.discard(notice.generation)
            self._pipe.send(Arrived(notice=notice).model_dump_json().encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]) if len(sys.argv) > 4 else POLL_S)
