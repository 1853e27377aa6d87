"""What an API process, the makers of its ranks and the ranks say to each other, and the private pipe they say it over.

Messages are frozen dataclasses, pickled: both ends are one program, and the pipe is a socket pair that only a parent
and its child ever hold. On a Ray cluster the pipe's bytes travel on over Ray's own channel, between the members of that
cluster. Nothing that comes from a listening socket of ours passes here.
"""

import pickle
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Literal

from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.tracing import Errand
from shared_schema.deploy.model import LoadFormat
from shared_schema.errors import H3Error
from shared_schema.trace import Span

Lane = Literal["work", "side"]
"""`work` orders run one after the other on the rank's main thread; `side` orders (a push, a count) need not wait."""

LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Order:
    """Do `command`, a frozen dataclass of the service's `commands.py`."""

    task: int
    lane: Lane
    command: object
    errand: Errand | None = None
    """What it is for; None: nothing that a caller asked for."""


@dataclass(frozen=True)
class Cancel:
    """Stop working on a task at the next step; a rest is worked on to its end."""

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
    weight_bytes: int
    """Of the parameters and buffers that this rank holds on its device, at most, measured once they are loaded."""
    load_format: LoadFormat
    offloaded_bytes: int = field(default=0, kw_only=True)
    """Of weights that wait in this rank's host memory for their turn."""


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
class Resting:
    """The rank's main thread is done with a task and takes the next; the rest of it ends in another thread."""

    task: int


@dataclass(frozen=True)
class Done:
    """A task ended well."""

    task: int
    result: object
    spans: tuple[Span, ...] = ()
    """What took time, if the order's errand asks."""


@dataclass(frozen=True)
class Failed:
    """A task raised. `fatal` means the group cannot go on."""

    task: int
    error: H3Error
    fatal: bool
    spans: tuple[Span, ...] = ()


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


FromRank = Ready | Beat | Report | Resting | Done | Failed | Unfit | Hosting


@dataclass(frozen=True)
class Place:
    """Find a place for every rank of a group, the leader's on this host. Answered by `Placed` or `Unplaced`."""

    specs: tuple[RankSpec, ...]
    wait_s: float
    """How long others may take to make room."""


@dataclass(frozen=True)
class MakeRank:
    """Make one rank. Its end of the rank pipe travels beside this as a file descriptor."""

    spec: RankSpec
    settings: object
    """A frozen dataclass of the service: what its ranks need to know."""


@dataclass(frozen=True)
class KillRank:
    """End a rank, whatever it is doing. `Exited` says when it is gone."""

    rank: int


ToMaker = Place | MakeRank | KillRank


@dataclass(frozen=True)
class Imported:
    """The maker is ready to make ranks."""


@dataclass(frozen=True)
class Placed:
    """Every rank has a place."""

    specs: tuple[RankSpec, ...]
    """As asked for, with devices and addresses as they are in these places."""
    nodes: tuple[str, ...]
    """By rank: the address of its host."""


@dataclass(frozen=True)
class Unplaced:
    """There is no place for the group."""

    reason: str
    """What is needed, and what was found."""


@dataclass(frozen=True)
class Made:
    """A rank lives. `pid` is its number on its own host."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """A rank is gone; negative codes are signals."""

    rank: int
    code: int


FromMaker = Imported | Placed | Unplaced | Made | Exited


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
