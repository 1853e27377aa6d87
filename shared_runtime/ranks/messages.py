"""What an API process and its ranks say to each other, and the private pipe they say it over.

Messages are frozen dataclasses, pickled: both ends are one program, and the pipe is a socket pair that only a parent
and its child ever hold. Nothing that comes from a listening socket passes here.
"""

import pickle
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Literal

from shared_runtime.ranks.mesh import RankSpec
from shared_schema.errors import H3Error

Lane = Literal["work", "side"]
"""`work` orders run one after the other on the rank's main thread; `side` orders (a push, a count) need not wait."""

LENGTH = struct.Struct("<I")
LEADER_HOST = "127.0.0.1"
"""Where ranks of one host meet."""


@dataclass(frozen=True)
class Order:
    """Do `command`, a frozen dataclass of the service's `commands.py`."""

    task: int
    lane: Lane
    command: object


@dataclass(frozen=True)
class Cancel:
    """Stop working on a task at the next step."""

    task: int


@dataclass(frozen=True)
class Leave:
    """Finish and exit."""


@dataclass(frozen=True)
class Meet:
    """Where the leader's rendezvous is."""

    host: str
    port: int


ToRank = Order | Cancel | Leave | Meet


@dataclass(frozen=True)
class RankFacts:
    """What a ready rank says of itself; a service's `commands.py` may add to it."""

    device: str
    torch: str
    weight_bytes: int
    """Of the parameters and buffers that this rank holds, measured once they are loaded."""


@dataclass(frozen=True)
class Ready:
    """The rank has loaded and warmed up."""

    facts: RankFacts | None


@dataclass(frozen=True)
class Beat:
    """The rank's main thread came past a point of progress, or is idle and well."""


@dataclass(frozen=True)
class Report:
    """Something happened on the way."""

    task: int
    event: object


@dataclass(frozen=True)
class Done:
    """A task ended well."""

    task: int
    result: object


@dataclass(frozen=True)
class Failed:
    """A task raised. `fatal` means the group cannot go on."""

    task: int
    error: H3Error
    fatal: bool


@dataclass(frozen=True)
class Unfit:
    """The rank could not start."""

    message: str
    lasting: bool
    """It would not the next time either: wrong files, wrong settings."""


@dataclass(frozen=True)
class Hosting:
    """The leader's rendezvous is open, at this port of its host."""

    port: int


FromRank = Ready | Beat | Report | Done | Failed | Unfit | Hosting


@dataclass(frozen=True)
class ForkRequest:
    """Fork one rank. Its end of the rank pipe travels beside this as a file descriptor."""

    spec: RankSpec
    settings: object
    """A frozen dataclass of the service: what its ranks need to know."""


@dataclass(frozen=True)
class Imported:
    """The forker is ready to fork."""


@dataclass(frozen=True)
class Forked:
    """A rank lives."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """A rank is gone; negative codes are signals."""

    pid: int
    code: int


ForkerNews = Imported | Forked | Exited


def pack(message: object) -> bytes:
    """A message as it goes over the pipe: length, then pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


class RankPipe:
    """The rank's end: blocking, safe to send from several threads."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = end.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: FromRank) -> None:
        """Write one message whole.

        Raises:
            OSError: the parent is gone.
        """
        data = pack(message)
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> ToRank | None:
        """The next message, or None once the parent is gone."""
        head = self._reader.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        body = self._reader.read(length)
        if len(body) < length:
            return None
        message: ToRank = pickle.loads(body)
        return message
