"""Whether NIXL can write straight from a GPU into a landing, and how fast beside staging in host memory.

    python -m benchmarks.nixl_cuda --json out.json

One sender with a GPU, the receiver's agent in a process of its own, as the services have them. Ways of one size:

    shm          the shared-memory connector: GPU to landing, checksum beside it
    nixl staged  over NIXL as the encoder does it: to host memory, checksum, one WRITE out of there
    nixl pinned  the same with page-locked host memory that is kept
    nixl direct  one WRITE out of GPU memory (`gpu_direct`), its checksum not in it

Every way is checked for equal bytes. A UCX that does not know CUDA may end the process in `nixl direct`, so that comes
last, and every line is printed as soon as it is known.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.figures import provenance, write_json
from encoder_service.outbox import on_device
from shared_runtime.device_memory import TensorSource, cuda_locker, flat_bytes
from shared_runtime.transport.codec import checksum
from shared_runtime.transport.nixl_process import keep_on_loopback
from shared_runtime.transport.nixl_receiver import NixlReceiver
from shared_runtime.transport.nixl_sender import NixlSender
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.slab import Slab
from shared_schema.deploy.model import NixlExtra
from shared_schema.encode import NixlLanding, ShmLanding
from shared_schema.errors import H3Error

MIB = 2**20
REQUEST = "1" * 32
ON_GPU = torch.cuda.is_available()
Row = dict[str, object]
Push = Callable[[ShmLanding], str]
"""Fills a landing; the checksum of what was written."""


class Landings:
    """A receiver whose landings are filled one at a time."""

    def __init__(self, receiver: NixlReceiver) -> None:
        self.receiver = receiver

    def filled_by(self, push: Push, tensor: torch.Tensor, *, over_nixl: bool) -> tuple[float, bool]:
        """Seconds of one push until the receiver may read, its check left out; whether the bytes are the tensor's."""
        landing = self.receiver.reserve(tensor.numel(), REQUEST, 60.0, time.time())
        _wait()
        begun = time.perf_counter()
        known = push(landing)
        taken = time.perf_counter() - begun
        if over_nixl:
            self.receiver.verify(landing, known)
        arrived = torch.frombuffer(bytearray(self.receiver.view(landing)), dtype=torch.uint8)
        self.receiver.release(landing)
        return taken, torch.equal(arrived, tensor.cpu())


class Ways:
    """The senders."""

    def __init__(self, landings: Landings, slab: Slab) -> None:
        self._landings = landings
        self._locker = cuda_locker() if ON_GPU else None
        self._shm = ShmSender(slab.path.parent, on_map=self._locker.lock if self._locker else None)
        self._nixl = NixlSender.start(NixlExtra(gpu_direct=ON_GPU))

    def measure(self, mib: int, repeats: int) -> list[Row]:
        """All ways of one size."""
        tensor = torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, device="cuda" if ON_GPU else "cpu")
        kept = torch.empty(tensor.numel(), dtype=torch.uint8, pin_memory=ON_GPU)
        known = checksum(tensor.cpu().numpy().data)

        def through_memory(landing: ShmLanding) -> str:
            return self._shm.push_source(landing, TensorSource(flat_bytes(tensor), self._locker)).checksum

        def staged(landing: ShmLanding) -> str:
            return self._nixl.push_bytes(self._told(landing), tensor.cpu().numpy().data).checksum

        def pinned(landing: ShmLanding) -> str:
            kept.copy_(tensor, non_blocking=True)
            _wait()
            return self._nixl.push_bytes(self._told(landing), kept.numpy().data).checksum

        def direct(landing: ShmLanding) -> str:
            return self._nixl.push_bytes(self._told(landing), on_device(tensor), checksum=known).checksum

        ways: list[tuple[str, Push]] = [("shm", through_memory), ("nixl staged", staged), ("nixl pinned", pinned)]
        if ON_GPU:
            ways.append(("nixl direct", direct))
        return [self._row(name, push, tensor, repeats) for name, push in ways]

    def _row(self, name: str, push: Push, tensor: torch.Tensor, repeats: int) -> Row:
        try:
            over_nixl = name != "shm"
            runs = [self._landings.filled_by(push, tensor, over_nixl=over_nixl) for _ in range(repeats + 1)]
        except (RuntimeError, TimeoutError, H3Error) as error:  # what a UCX that may not know CUDA says is the finding
            row: Row = {"way": name, "mib": tensor.numel() // MIB, "failed": f"{type(error).__name__}: {error}"[:300]}
        else:
            taken = statistics.median(seconds for seconds, _ in runs[1:])
            row = {
                "way": name,
                "mib": tensor.numel() // MIB,
                "ms": round(taken * 1e3, 3),
                "gb_per_s": round(tensor.numel() / taken / 1e9, 2),
                "bit_equal": all(same for _, same in runs),
            }
        print(json.dumps(row), flush=True)
        return row

    def _told(self, landing: ShmLanding) -> NixlLanding:
        return self._landings.receiver.for_sender(landing)


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def loaded(pattern: str) -> list[str]:
    """Libraries of this process whose path matches."""
    return sorted(set(re.findall(rf"/\S*{pattern}\S*", Path("/proc/self/maps").read_text())))


def main() -> None:
    """Measure everything, print it, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[3, 30, 300])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    keep_on_loopback(os.environ)
    gpu = torch.cuda.get_device_name(0) if ON_GPU else "none: only to see that this runs"
    kept = torch.zeros(1, device="cuda" if ON_GPU else "cpu")  # the encoder's CUDA context is older than its agent
    figures: Row = {**provenance(sys.argv), "gpu": gpu, "torch": str(torch.__version__)}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="h3bench-", dir="/dev/shm") as folder:
        slab = Slab.create(Path(folder), 2 * max(asked.mib) * MIB + 64 * MIB, "benchmark")
        receiver = NixlReceiver.start(slab, "benchmark", NixlExtra())
        ways = Ways(Landings(receiver), slab)
        figures["ucx_cuda"] = loaded("libuct_cuda")
        print(json.dumps(figures), flush=True)
        for mib in asked.mib:
            rows += ways.measure(mib, asked.repeats)
            if asked.json:
                write_json(asked.json, {**figures, "rows": rows})
        receiver.close()
    del kept


if __name__ == "__main__":
    main()
