"""The child process that holds the receiving NIXL agent, as its parent sees it: messages, start, watch, end. No NIXL.

The parent is the diffusion service's API process. What belongs to the agent dies with the child: connections,
registrations, and every way for a late writer into the slab. That is why the agent has a process of its own.
"""

import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from shared_schema.encode import Wire
from shared_schema.errors import DeployError, TransportError

START_S = 20.0
"""For a child to import NIXL and to prove its agent: two UCX in one process may hang."""
END_S = 10.0
MAX_MESSAGE = 2**17
_CHILD = "shared_runtime.transport.nixl_child"


class Notice(Wire):
    """What a sender's notification says, as JSON: the payload of this landing is written."""

    generation: int = Field(ge=1)
    request_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    bytes: int = Field(ge=0)
    checksum: str = Field(pattern=r"^[0-9a-f]{16}$")


class Expect(Wire):
    """To the child: a sender was told of this landing. Look out for its notice."""

    generation: int


class Started(Wire):
    """From the child: the agent works and has registered the slab."""

    kind: Literal["started"] = "started"
    metadata: str
    address: int
    """Of the slab's first byte, in the child."""


class Failed(Wire):
    """From the child: the agent cannot work."""

    kind: Literal["failed"] = "failed"
    message: str


class Arrived(Wire):
    """From the child: a notice came."""

    kind: Literal["arrived"] = "arrived"
    notice: Notice


FromChild = Annotated[Started | Failed | Arrived, Field(discriminator="kind")]
_FROM_CHILD: TypeAdapter[Started | Failed | Arrived] = TypeAdapter(FromChild)


class AgentProcess:
    """One running child with its agent. Thread-safe. Made by `start`, ended by `end`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], pipe: socket.socket, started: Started) -> None:
        self.name = name
        self.metadata = started.metadata
        self.address = started.address
        self.pid = process.pid
        self._process = process
        self._pipe = pipe
        self._lock = threading.Lock()
        self._expected: dict[int, Future[Notice]] = {}
        self._gone = False

    @classmethod
    def start(cls, name: str, slab: Path, *, poll_s: float | None = None) -> "AgentProcess":
        """Run a child whose agent is called `name` and registers the slab; at most 20 s.

        Raises:
            DeployError: it cannot; one line that says which step failed and what to change.
        """
        process, pipe = _run(name, str(slab), poll_s, noise=None)
        return cls(name, process, pipe, _wait_started(process, pipe, None))

    def watch(self, gone: Callable[["AgentProcess"], None]) -> None:
        """Begin to listen to the child, in a thread of its own; `gone` is called once, when it has ended."""
        threading.Thread(target=self._listen, args=(gone,), name="nixl-notices", daemon=True).start()

    def _listen(self, gone: Callable[["AgentProcess"], None]) -> None:
        while (data := _receive(self._pipe)) is not None:
            with suppress(ValidationError):
                message = _FROM_CHILD.validate_json(data)
                if isinstance(message, Arrived):
                    self._arrived(message.notice)
        with self._lock:
            self._gone = True
            lost = list(self._expected.values())
        for future in lost:
            if not future.done():
                future.set_exception(TransportError("the NIXL agent of this service ended during the transfer"))
        self._pipe.close()
        gone(self)

    def _arrived(self, notice: Notice) -> None:
        with self._lock:
            future = self._expected.get(notice.generation)
        if future is not None and not future.done():
            future.set_result(notice)

    def expect(self, generation: int) -> None:
        """A sender is about to be told of this landing.

        Raises:
            TransportError: the child is gone.
        """
        with self._lock:
            if self._gone:
                raise TransportError("the NIXL agent of this service is gone")
            self._expected[generation] = Future()
            try:
                self._pipe.send(Expect(generation=generation).model_dump_json().encode())
            except OSError as error:
                raise TransportError("the NIXL agent of this service is gone") from error

    def notice(self, generation: int, limit_s: float) -> Notice:
        """Wait until the notice of a landing is here.

        Raises:
            TransportError: the child ended, or the landing is not expected.
            TimeoutError: it is not here after `limit_s` seconds.
        """
        with self._lock:
            future = self._expected.get(generation)
        if future is None:
            raise TransportError(f"no notification of landing {generation} is expected")
        return future.result(limit_s)

    def forget(self, generation: int) -> None:
        """The landing is over: written or given up."""
        with self._lock:
            self._expected.pop(generation, None)

    @property
    def alive(self) -> bool:
        """Whether the child runs; False is a proof that nothing reaches the slab through its agent any more."""
        return self._process.poll() is None

    def end(self) -> bool:
        """Kill the child, whatever it does, and wait until it is gone; False if it is still there after 10 s."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        return not self.alive


def keep_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Have UCX open its ports on loopback alone, for two services of one host; `UCX_NET_DEVICES` says otherwise."""
    environment.setdefault("UCX_NET_DEVICES", "lo")


def probe_nixl() -> None:
    """Make an agent in a child, register memory, write to ourselves, and end it: before anything else starts.

    Raises:
        DeployError: one line that says which step failed and what to change.
    """
    with tempfile.TemporaryFile() as noise:
        process, pipe = _run("probe", "", None, noise=noise)
        try:
            _wait_started(process, pipe, noise)
        finally:
            pipe.close()
            process.kill()
            process.wait(END_S)


def _run(
    name: str, slab: str, poll_s: float | None, *, noise: IO[bytes] | None
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", _CHILD, str(theirs.fileno()), name, slab, *([str(poll_s)] if poll_s else [])]
        said = 2 if noise is None else noise  # UCX prints to stdout, which is nobody's log
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=[theirs.fileno()]
        )
    return process, ours


def _wait_started(process: "subprocess.Popen[bytes]", pipe: socket.socket, noise: IO[bytes] | None) -> Started:
    pipe.settimeout(START_S)
    try:
        data = _receive(pipe)
    except TimeoutError:
        raise _ended(process, pipe, f"NIXL did not start within {START_S:g} s") from None
    pipe.settimeout(None)
    if data is None:
        raise _ended(process, pipe, "the process with the NIXL agent ended while it started")
    match _FROM_CHILD.validate_json(data):
        case Started() as started:
            return started
        case Failed(message=message):
            raise _ended(process, pipe, message + _last_error(noise))
        case Arrived():
            raise _ended(process, pipe, "the process with the NIXL agent speaks out of turn")


def _ended(process: "subprocess.Popen[bytes]", pipe: socket.socket, message: str) -> DeployError:
    """End a child that did not start; the error that says so, with the UCX libraries where there are several."""
    doubled = two_ucx(process.pid)
    process.kill()
    code = process.wait(END_S)
    pipe.close()
    if code < 0 and code != -signal.SIGKILL:
        message += f" (signal {-code})"
    if doubled:
        message += f"; two UCX are loaded, keep one of them out of LD_PRELOAD and LD_LIBRARY_PATH: {', '.join(doubled)}"
    return DeployError(message)


def _receive(pipe: socket.socket) -> bytes | None:
    try:
        return pipe.recv(MAX_MESSAGE) or None
    except ConnectionResetError:
        return None


def two_ucx(pid: int) -> list[str]:
    """The libucs files that a process has loaded, if there are several; else none."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = sorted({match[0] for match in re.finditer(r"/\S*/libucs[-.][^/\s]*", maps)})
    return found if len(found) > 1 else []


def _last_error(noise: IO[bytes] | None) -> str:
    """UCX prints what the exception does not say."""
    if noise is None:
        return ""
    noise.seek(0)
    lines = noise.read().decode(errors="replace").splitlines()
    said = [line.split("ERROR", 1)[1].strip() for line in lines if " UCX  ERROR" in line]
    return f" [UCX: {said[-1]}]" if said else ""
