"""Second processes for the transport's tests: they run a function of this file, say lines, and can be killed."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from shared_runtime.transport.codec import checksum, copy
from shared_runtime.transport.nixl_receiver import NixlReceiver
from shared_runtime.transport.nixl_sender import NixlSender
from shared_runtime.transport.shm import ShmSender, SlabReader
from shared_runtime.transport.slab import Slab
from shared_schema.deploy.model import NixlExtra
from shared_schema.encode import NixlLanding, ShmLanding
from shared_schema.errors import H3Error

ROOT = Path(__file__).parents[3]


class Child:
    """One running second process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def say(self, line: str) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """The next line it says; empty when it has ended. UCX has its warnings among them, `[seconds] ...`."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()).startswith("["):
            pass
        return line.strip()

    def end(self) -> str:
        """Wait for its end; what it wrote to stderr."""
        _, noise = self.process.communicate(timeout=30)
        return noise


@contextmanager
def child(role: str, *arguments: object) -> Iterator[Child]:
    """Run `role` in a second interpreter; it is killed at the end of the block if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.shared_runtime.transport.processes", role, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Child(process)
        finally:
            process.kill()


def _tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _own(folder: Path, size: int, user: int) -> None:
    """Own a slab until told to end; every length that comes in gets a landing.

    The user changes late: another user may not even read this interpreter.
    """
    os.seteuid(user)
    try:
        slab = Slab.create(folder, size, "child")
    except H3Error as error:
        _tell(type(error).__name__, error)
        return
    _tell(slab.path)
    while length := sys.stdin.readline().strip():
        _tell(slab.reserve(int(length), "3" * 32, 30.0, time.time()).model_dump_json())
    slab.close()


class _StopOnce:
    """A copy that says when half of its first piece is done, and goes on after a line."""

    def __init__(self) -> None:
        self._stopped = False

    def __call__(self, target: memoryview, source: memoryview) -> None:
        half = source.nbytes // 2
        copy(target[:half], source[:half])
        if not self._stopped:
            self._stopped = True
            _tell("half")
            sys.stdin.readline()
        copy(target[half:], source[half:])


def _push(folder: Path, stop: str) -> None:
    """Push a pattern into every landing that comes in; with `stop`, wait for a line in the middle of the first."""
    sender = ShmSender(folder, copy=_StopOnce()) if stop == "stop" else ShmSender(folder)
    _tell("ready")
    for line in sys.stdin:
        landing = ShmLanding.model_validate_json(line)
        try:
            receipt = sender.push_bytes(landing, memoryview(pattern(landing)))
        except H3Error as error:
            _tell(type(error).__name__, error)
        else:
            _tell("pushed", receipt.checksum)


def _push_over_nixl() -> None:
    """Push a pattern into every landing that comes in, and say how the write went."""
    sender = NixlSender.start(NixlExtra())
    _tell("ready")
    for line in sys.stdin:
        landing = NixlLanding.model_validate_json(line)
        data = memoryview(pattern(landing))
        _tell("begins")
        try:
            receipt = sender.push_bytes(landing, data, checksum=checksum(data))
        except H3Error as error:
            _tell(type(error).__name__, error)
        else:
            _tell("pushed", receipt.checksum)


def _own_over_nixl(folder: Path, size: int) -> None:
    """Own a slab behind an agent; tell a landing of every length that comes in, and verify it with the next line."""
    slab = Slab.create(folder, size, "child")
    with closing(NixlReceiver.start(slab, "the child", NixlExtra())) as receiver:
        _tell(slab.path)
        for line in sys.stdin:
            landing = receiver.reserve(int(line), "3" * 32, 30.0, time.time())
            _tell(receiver.for_sender(landing).model_dump_json())
            said = sys.stdin.readline().strip()
            receiver.verify(landing, said)
            _tell(receiver.view(landing) == pattern(landing))
            receiver.release(landing)


def _read(folder: Path) -> None:
    """Map one landing, print whether it holds the pattern, and stay."""
    landing = ShmLanding.model_validate_json(sys.stdin.readline())
    _tell(bytes(SlabReader(folder).view(landing)) == pattern(landing))
    sys.stdin.readline()


def pattern(landing: ShmLanding | NixlLanding) -> bytes:
    """Bytes that tell every generation from every other."""
    unit = landing.generation.to_bytes(8, "little") + bytes.fromhex(landing.request_id)
    return (unit * (landing.length // len(unit) + 1))[: landing.length]


def wait_until_stopped(pid: int) -> None:
    """Return once the kernel has stopped the process."""
    for _ in range(12_000):
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
            return
        time.sleep(0.005)
    raise TimeoutError(f"process {pid} does not stop")


if __name__ == "__main__":
    os.umask(0o077)
    role, where, *rest = sys.argv[1:]
    match role:
        case "own":
            _own(Path(where), int(rest[0]), int(rest[1]) if len(rest) > 1 else os.geteuid())
        case "push":
            _push(Path(where), rest[0] if rest else "")
        case "push-nixl":
            _push_over_nixl()
        case "own-nixl":
            _own_over_nixl(Path(where), int(rest[0]))
        case "read":
            _read(Path(where))
