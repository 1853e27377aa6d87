"""The receiving process of the transport's benchmark: owns a slab, says when a payload can be used.

Told what to do in lines of JSON. Its times are of the same clock as the sender's: the kernel's monotonic one.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from benchmarks.nixl_read import Offer, PeerReader
from shared_runtime.transport.codec import checksum
from shared_runtime.transport.nixl_receiver import NixlReceiver
from shared_runtime.transport.slab import Slab
from shared_schema.deploy.model import NixlExtra
from shared_schema.encode import ShmLanding
from shared_schema.encoder_output import EncoderOutput, Manifest

LEASE_S = 60.0


class Owner:
    """A slab and, where NIXL is, its agent."""

    def __init__(self, folder: Path, size: int, *, nixl: bool) -> None:
        self._slab = Slab.create(folder, size, "benchmark")
        self._nixl = NixlReceiver.start(self._slab, "benchmark", NixlExtra()) if nixl else None
        self._reader = PeerReader("benchmark-reader") if nixl else None
        self._landing: ShmLanding | None = None
        self._manifest: Manifest | None = None
        self._turn = 0

    def do(self, order: dict[str, Any]) -> dict[str, object]:
        """One order; what it answers."""
        match order:
            case {"do": "manifest", "manifest": manifest}:
                self._manifest = None if manifest is None else Manifest.model_validate(manifest)
                return {}
            case {"do": "reserve", "way": way, "length": length}:
                return self._reserve(way, length)
            case {"do": "use", "way": way, "checksum": known}:
                return self._use(way, known)
            case {"do": "segment", "name": name, "length": length}:
                return _segment(name, length)
            case {"do": "read", "offer": offer}:
                return self._read(offer)
            case _:
                raise ValueError(f"no such order: {order}")

    def _reserve(self, way: str, length: int) -> dict[str, object]:
        self._turn += 1
        receiver = self._slab if way == "shm" else self._nixl
        assert receiver is not None
        self._landing = receiver.reserve(length, f"{self._turn:032x}", LEASE_S, time.time())
        return {"landing": receiver.for_sender(self._landing).model_dump()}

    def _use(self, way: str, known: str) -> dict[str, object]:
        """Verify a landing and look at it, as the runner does."""
        got = time.perf_counter()
        receiver, landing = (self._slab if way == "shm" else self._nixl), self._landing
        assert receiver is not None
        assert landing is not None
        cold = _seconds(lambda: checksum(receiver.view(landing)))
        begun = time.perf_counter()
        receiver.verify(landing, known)
        view = receiver.view(landing)
        if self._manifest is not None:
            EncoderOutput(manifest=self._manifest, data=view)
        looked = time.perf_counter() - begun
        warm = _seconds(lambda: checksum(view))
        receiver.release(landing)
        return {"got": got, "looking_s": max(looked - warm, 0.0), "checksum_s": cold}

    def _read(self, offer: str) -> dict[str, object]:
        """The peers' receiver over NIXL."""
        got = time.perf_counter()
        assert self._reader is not None
        view = self._reader.read(Offer.from_json(offer))
        usable = time.perf_counter()
        return {"got": got, "usable": usable, "checksum": checksum(view)}

    def close(self) -> None:
        """Give everything back."""
        if self._nixl is not None:
            self._nixl.close()
        self._slab.close()


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _segment(name: str, length: int) -> dict[str, object]:
    """The peers' receiver: attach, copy out, unpack, make each tensor writable."""
    got = time.perf_counter()
    segment = SharedMemory(name)
    body = bytes(segment.buf[:length])
    segment.close()
    segment.unlink()
    tensors = [np.frombuffer(bytearray(each["data"]), np.uint8) for each in msgpack.unpackb(body).values()]
    usable = time.perf_counter()
    return {"got": got, "usable": usable, "bytes": sum(each.nbytes for each in tensors)}


class OwnerProcess:
    """The other end: orders to a second process, and its answers."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self.folder = folder

    def ask(self, **order: object) -> dict[str, Any]:
        """One order; raises if the owner has ended."""
        self.tell(**order)
        return self.answer()

    def tell(self, **order: object) -> None:
        """One order whose answer is fetched later, by `answer`."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What the owner says to the oldest order that it has not answered."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        while line and not line.startswith("{"):  # NIXL logs to stdout
            line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def owner_process(size: int, *, nixl: bool) -> Iterator[OwnerProcess]:
    """A second process that owns a slab of `size` bytes in shared memory."""
    with tempfile.TemporaryDirectory(prefix="h3bench-", dir="/dev/shm") as folder:
        command = [sys.executable, "-m", "benchmarks.transport_owner", folder, str(size), "nixl" if nixl else "shm"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield OwnerProcess(process, Path(folder))
            finally:
                assert process.stdin
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
                process.wait(30)


def main() -> None:
    """Serve orders until the pipe ends."""
    folder, size, ways = sys.argv[1:]
    owner = Owner(Path(folder), int(size), nixl=ways == "nixl")
    try:
        for line in sys.stdin:
            print(json.dumps(owner.do(json.loads(line))), flush=True)
    finally:
        owner.close()


if __name__ == "__main__":
    main()
