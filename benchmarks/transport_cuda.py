"""Tensors between a GPU and a slab: how near both copies come to the limit of the bus.

    python -m benchmarks.transport_cuda [--repeats N] [--mib 3 30 300] [--slab-mib 2048] [--json FILE]

`limit` is the driver's own copy between the GPU and page-locked memory of its own, 1 GiB: what the bus gives. Every
other figure is a median, in GB/s (10^9 bytes) and as a share of that limit, once with the slab page-locked and once
not: `push` from the GPU into a landing with the checksum beside the copy, as the encoder's leader does it; `read` from
the landing onto the GPU, as a diffusion rank does it; `through` is both and the receiver's checksum between them;
`through_copies` is the two copies alone. `by_host_buffers` is how it was before: to the host, memcpy, checksum, off the
slab, to the GPU. All memory is warm. With two GPUs: every rank reads, against one that reads and broadcasts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.figures import provenance, write_json
from shared_runtime.device_memory import LOCK_CHUNK, TensorSource, cuda_locker, from_bytes, pieces
from shared_runtime.transport.codec import checksum
from shared_runtime.transport.shm import ShmSender, SlabReader
from shared_runtime.transport.slab import Slab
from shared_schema.encode import ShmLanding

MIB = 2**20
WARM_UP = 2
REQUEST = "1" * 32
CUDA = torch.device("cuda", 0)
GENERATIONS = {"1": 0.25, "2": 0.5, "3": 0.985, "4": 1.969, "5": 3.938, "6": 7.563}
"""GB/s of one PCIe lane, by generation."""


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` turns after the warm-up; the device is idle before and after each."""
    taken = []
    for _ in range(repeats + WARM_UP):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[WARM_UP:])


def bus() -> dict[str, object]:
    """What the link says of itself, and what the driver reaches on it."""
    query = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"
    answer = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    generation, _, width = answer.stdout.partition("\n")[0].partition(", ")
    known = generation in GENERATIONS and width.isdecimal()
    size = 1024 * MIB
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(size, dtype=torch.uint8, device=CUDA)
    down = size / seconds(lambda: host.copy_(device, non_blocking=True), 7) / 1e9
    up = size / seconds(lambda: device.copy_(host, non_blocking=True), 7) / 1e9
    return {
        "gpu": torch.cuda.get_device_name(CUDA),
        "pcie": f"generation {generation} x{width}",
        "nominal_gb_per_s": round(GENERATIONS[generation] * int(width), 1) if known else None,
        "device_to_host_limit_gb_per_s": round(down, 2),
        "host_to_device_limit_gb_per_s": round(up, 2),
    }


@contextmanager
def slab_of(mib: int) -> Iterator[Slab]:
    """A slab in shared memory."""
    with tempfile.TemporaryDirectory(prefix="h3bench-", dir="/dev/shm") as folder:
        slab = Slab.create(Path(folder), mib * MIB, "benchmark")
        try:
            yield slab
        finally:
            slab.close()


def locking(slab: Slab) -> dict[str, object]:
    """Seconds that page-locking the whole slab takes, in chunks and in one call, and what a failure says."""
    figures: dict[str, object] = {"slab_mib": slab.size // MIB}
    reader = SlabReader(slab.path.parent)
    begun = time.perf_counter()
    view = reader.whole(str(slab.path))
    figures["map_s"] = round(time.perf_counter() - begun, 4)
    for name, chunk in (("chunks", LOCK_CHUNK), ("one_call", slab.size)):
        locker = cuda_locker(chunk)
        begun = time.perf_counter()
        undo = locker.lock(view)
        figures[f"lock_in_{name}_s"] = round(time.perf_counter() - begun, 4)
        figures[f"locked_in_{name}_mib"] = locker.locked_bytes // MIB
        begun = time.perf_counter()
        undo()
        figures[f"unlock_of_{name}_s"] = round(time.perf_counter() - begun, 4)
    figures["copy_across_chunks"] = _across(view)
    reader.close()
    return figures


def _across(view: memoryview) -> str:
    """What CUDA says to one copy over the border of two locked ranges: the reason for `PageLocker.cuts`."""
    undo = cuda_locker(MIB).lock(view[: 2 * MIB])
    target = torch.frombuffer(view[: 2 * MIB], dtype=torch.uint8)
    try:
        target.copy_(torch.ones(2 * MIB, dtype=torch.uint8, device=CUDA), non_blocking=True)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        undo()
    return "works"


class Way:
    """A slab seen by an encoder's leader and a diffusion rank, both with the same GPU; page-locked or not."""

    def __init__(self, slab: Slab, *, locked: bool) -> None:
        self._slab = slab
        self._out = cuda_locker() if locked else None
        self._in = cuda_locker() if locked else None
        self._sender = ShmSender(slab.path.parent, on_map=self._out.lock if self._out else None)
        self._reader = SlabReader(slab.path.parent, self._in.lock if self._in else None)
        self._held: ShmLanding | None = None

    def push(self, tensor: torch.Tensor) -> memoryview:
        """GPU to landing, checksum beside it; the landing as the reader sees it."""
        landing = self._fresh(tensor.numel())
        self._receipt = self._sender.push_source(landing, TensorSource(tensor, self._out))
        return self._reader.view(landing)

    def _fresh(self, nbytes: int) -> ShmLanding:
        if self._held is not None:
            self._slab.release(self._held)
        self._held = self._slab.reserve(nbytes, REQUEST, 600.0, time.time())
        return self._held

    def read(self, view: memoryview) -> torch.Tensor:
        """Landing to GPU."""
        return from_bytes(view, torch.uint8, (view.nbytes,), CUDA, self._in)

    def through(self, tensor: torch.Tensor) -> torch.Tensor:
        """GPU to GPU with every check."""
        view = self.push(tensor)
        assert self._held is not None
        self._slab.verify(self._held, self._receipt.checksum)
        return self.read(view)

    def copies(self, tensor: torch.Tensor, view: memoryview) -> None:
        """The two copies alone."""
        target = torch.frombuffer(view, dtype=torch.uint8)
        for start, end in pieces(view, self._in):
            target[start:end].copy_(tensor[start:end], non_blocking=True)
        self.read(view)

    def by_host_buffers(self, tensor: torch.Tensor) -> torch.Tensor:
        """The way without any of this."""
        data = tensor.cpu().numpy().data
        known = checksum(data)
        landing = self._fresh(tensor.numel())
        self._slab.verify(landing, self._sender.push_bytes(landing, data, checksum=known).checksum)
        return torch.frombuffer(bytearray(self._reader.view(landing)), dtype=torch.uint8).to(CUDA)

    def close(self) -> None:
        """Let go of everything but the slab."""
        if self._held is not None:
            self._slab.release(self._held)
        self._reader.close()
        self._sender.close()


def figures_of(way: Way, mib: int, repeats: int, limits: dict[str, object], *, locked: bool) -> dict[str, object]:
    """Rates of one size."""
    tensor = torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, device=CUDA)
    assert torch.equal(way.through(tensor), tensor), "what came out is not what went in"
    down, up = (float(str(limits[f"{name}_limit_gb_per_s"])) for name in ("device_to_host", "host_to_device"))
    both = 1 / (1 / down + 1 / up)
    rows: dict[str, object] = {"size_mib": mib, "page_locked": locked}
    view = way.push(tensor)
    ways: list[tuple[str, Callable[[], object], float]] = [
        ("read", lambda: way.read(view), up),
        ("through_copies", lambda: way.copies(tensor, view), both),
        ("push", lambda: way.push(tensor), down),
        ("through", lambda: way.through(tensor), both),
    ]
    if not locked:
        ways.append(("by_host_buffers", lambda: way.by_host_buffers(tensor), both))
    for name, work, limit in ways:
        taken = seconds(work, repeats)
        rate = mib * MIB / taken / 1e9
        rows |= {f"{name}_ms": round(taken * 1e3, 3), f"{name}_gb_per_s": round(rate, 2)}
        rows[f"{name}_share_of_limit"] = round(rate / limit, 3)
    return rows


def rates(slab: Slab, mib: list[int], repeats: int, limits: dict[str, object]) -> list[dict[str, object]]:
    """Every size, page-locked and not."""
    rows = []
    for locked in (True, False):
        way = Way(slab, locked=locked)
        rows += [figures_of(way, size, repeats, limits, locked=locked) for size in mib]
        way.close()
    return rows


def rank(number: int, world: int, path: str, landing: str, sizes: list[int], repeats: int, out: str) -> None:
    """One of several ranks: all read the landing, or rank 0 reads and broadcasts. Medians of the slowest rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", rank=number, world_size=world)
    device, locker = torch.device("cuda", number), cuda_locker()
    reader = SlabReader(Path(path), locker.lock)
    view = reader.view(ShmLanding.model_validate_json(landing))
    rows = []
    for size in sizes:

        def read(size: int = size) -> None:
            from_bytes(view[:size], torch.uint8, (size,), device, locker)
            dist.barrier()

        def broadcast(size: int = size) -> None:
            raw = torch.empty(size, dtype=torch.uint8, device=device)
            if number == 0:
                raw = from_bytes(view[:size], torch.uint8, (size,), device, locker)
            dist.broadcast(raw, 0)
            dist.barrier()

        rows.append(
            {
                "size_mib": size // MIB,
                "ranks": world,
                "every_rank_reads_ms": round(seconds(read, repeats) * 1e3, 3),
                "one_reads_and_broadcasts_ms": round(seconds(broadcast, repeats) * 1e3, 3),
            }
        )
    if number == 0:
        write_json(Path(out), {"rows": rows})
    dist.destroy_process_group()
    reader.close()


def ranks(slab: Slab, mib: list[int], repeats: int) -> list[object]:
    """Reading against broadcasting, on every GPU that there is."""
    world = torch.cuda.device_count()
    if world < 2:
        return []
    largest = max(mib) * MIB
    sender, landing = ShmSender(slab.path.parent), slab.reserve(largest, REQUEST, 600.0, time.time())
    slab.verify(landing, sender.push_bytes(landing, memoryview(bytearray(largest))).checksum)
    with tempfile.NamedTemporaryFile() as out:
        arguments = (world, str(slab.path.parent), landing.model_dump_json(), [m * MIB for m in mib], repeats, out.name)
        mp.spawn(rank, arguments, nprocs=world)
        rows: list[object] = json.loads(Path(out.name).read_text())["rows"]
    sender.close()
    slab.release(landing)
    return rows


def main() -> None:
    """Measure everything, print it, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[3, 30, 300])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--slab-mib", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    limits = bus()
    figures: dict[str, object] = {
        **provenance(sys.argv),
        "torch": str(torch.__version__),
        "bus": limits,
    }
    with slab_of(asked.slab_mib) as slab:
        figures["locking"] = locking(slab)
        rows, reading = rates(slab, asked.mib, asked.repeats, limits), ranks(slab, asked.mib, asked.repeats)
    figures |= {"rows": rows, "ranks": reading}
    for each in (limits, figures["locking"], *rows, *reading):
        print(each)
    if asked.json:
        write_json(asked.json, figures)


if __name__ == "__main__":
    main()
