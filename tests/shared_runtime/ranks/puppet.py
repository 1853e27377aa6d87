"""A rank service that does what a test tells it: in real rank processes, without weights."""

import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import RankFacts
from shared_runtime.ranks.worker import Beater, Rest, TaskHandle, rank_main
from shared_schema.errors import DeployError, InvalidRequest


@dataclass(frozen=True)
class Puppet:
    """How the service starts."""

    unfit: str | None = None
    bug: bool = False
    dies: bool = False
    load_s: float = 0.0
    marker: Path | None = None
    """`bug` and `dies` begin once this file is there."""


@dataclass(frozen=True)
class Say:
    """Answer with the rank's name and pid."""


@dataclass(frozen=True)
class Listens:
    """Answer with the address at which the leader met the others."""


@dataclass(frozen=True)
class Steps:
    """Pass `count` steps of `seconds` each, reporting every one."""

    count: int
    seconds: float


@dataclass(frozen=True)
class Sleep:
    """Pass no step for `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Raise:
    """Raise on one rank."""

    rank: int
    kind: str


@dataclass(frozen=True)
class Die:
    """Kill one rank."""

    rank: int


@dataclass(frozen=True)
class Fall:
    """Kill one rank after `seconds`; the others raise at once, as a collective does that lost a peer."""

    rank: int
    seconds: float


@dataclass(frozen=True)
class Leave:
    """The leader leaves `seconds` of it to the rest, which then raises, or answers with the name of its thread."""

    seconds: float
    kind: str | None = None


class PuppetRank:
    """Does the commands above."""

    facts = RankFacts(device="cpu", weight_bytes=7, load_format="dummy")

    def __init__(self, comm: RankComm) -> None:
        self._comm = comm
        self._spec = comm.spec

    def handle(self, command: object, task: TaskHandle) -> object:
        match command:
            case Say():
                return self._spec.name, os.getpid()
            case Listens():
                return self._spec.host
            case Steps(count, seconds):
                for number in range(count):
                    time.sleep(seconds)
                    task.report(number)
                    task.go_on()
                return count
            case Sleep(seconds):
                time.sleep(seconds)
            case Raise(rank, kind) if rank == self._spec.rank:
                raise _ERRORS[kind]
            case Die(rank) if rank == self._spec.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fall(rank, seconds):
                if rank != self._spec.rank:
                    raise RuntimeError("connection closed by peer")
                time.sleep(seconds)
                os.kill(os.getpid(), signal.SIGKILL)
            case Leave(seconds, kind) if self._spec.is_leader:
                return Rest(partial(_end, seconds, kind))
        return None


def _end(seconds: float, kind: str | None) -> str:
    time.sleep(seconds)
    if kind is not None:
        raise _ERRORS[kind]
    return threading.current_thread().name


_ERRORS = {
    "input": InvalidRequest("a bad file", param="input_references[1]"),
    "memory": MemoryError("too much"),
    "bug": ZeroDivisionError("a bug"),
}


def build(comm: RankComm, settings: object, _beater: Beater) -> PuppetRank:
    assert isinstance(settings, Puppet)
    time.sleep(settings.load_s)
    if settings.unfit is not None:
        raise DeployError(settings.unfit)
    if settings.marker is not None and not settings.marker.exists():
        return PuppetRank(comm)
    if settings.dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if settings.bug:
        raise MemoryError("no room for the weights")
    return PuppetRank(comm)


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    rank_main(build, spec, settings, end)
