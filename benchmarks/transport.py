"""How near a push through shared memory comes to a plain memcpy: both measured side by side, in one run.

    python -m benchmarks.transport [--repeats N] [--mib 3 30 300] [--json FILE]

One process owns the slab, this one sends. Turns alternate: memcpy between two warm buffers of this process, then a
push of the same bytes into a warm landing. Every push has new content and is verified by the owner. `push` is the
whole call with the checksum made beforehand: claim, header, copy, header; `checksum` is that hash. `push+sum` is the
call that makes the checksum itself, beside the copy. `verify` is the owner's check. Medians, and ratios of medians;
`best` is the ratio of the quickest turns, for a machine that is busy with other work. Warm-up turns are left out.
"""

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from shared_runtime.transport.codec import checksum
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.slab import Slab
from shared_schema.encode import ShmLanding

MIB = 2**20
WARM_UP = 2
RATE_GOAL = 0.8
"""Of memcpy's rate, at 30 MiB and more."""
ADDED_GOAL_MS = 0.5
"""On top of memcpy at 3 MiB."""


@dataclass(frozen=True)
class Turn:
    """Milliseconds of one turn."""

    memcpy: float
    push: float
    push_with_checksum: float
    checksum: float
    verify: float


@dataclass(frozen=True)
class Row:
    """Medians for one size."""

    size_mib: int
    turns: int
    memcpy_ms: float
    push_ms: float
    push_with_checksum_ms: float
    checksum_alone_ms: float
    verify_ms: float
    memcpy_gib_per_s: float
    push_rate_of_memcpy: float
    push_rate_of_memcpy_best_turns: float
    push_with_checksum_rate_of_memcpy: float
    push_added_ms: float
    push_with_checksum_added_ms: float


def timed(work: Callable[[], object]) -> float:
    """Milliseconds that `work` takes."""
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1e3


def own(folder: Path, size: int) -> None:
    """The receiver: reserve, verify and release, one landing a line. Runs in the second process."""
    slab = Slab.create(folder, size, "benchmark")
    for turn, line in enumerate(sys.stdin):
        landing = slab.reserve(int(line), f"{turn:032x}", 60.0, time.time())
        print(landing.model_dump_json(), flush=True)
        said = sys.stdin.readline().strip()
        begun = time.perf_counter()
        slab.verify(landing, said)
        print((time.perf_counter() - begun) * 1e3, flush=True)
        slab.release(landing)
    slab.close()


@contextmanager
def owner(size: int) -> Iterator[tuple[Path, Callable[[str], str]]]:
    """A second process that owns a slab; a function that sends it a line and returns its answer."""
    folder = Path(tempfile.mkdtemp(prefix="h3bench-", dir="/dev/shm"))
    command = [sys.executable, "-m", "benchmarks.transport", "--own", str(folder), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        asked, answers = process.stdin, process.stdout

        def ask(line: str) -> str:
            asked.write(line + "\n")
            asked.flush()
            return answers.readline()

        try:
            yield folder, ask
        finally:
            asked.close()
            process.wait(30)
            shutil.rmtree(folder)


def measure(size: int, repeats: int, folder: Path, ask: Callable[[str], str]) -> list[Turn]:
    """Alternate memcpy and both kinds of push of `size` bytes."""
    sender = ShmSender(folder)
    source, target = memoryview(bytearray(os.urandom(MIB) * (size // MIB))), memoryview(bytearray(size))
    to, origin = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (target, source))
    turns = []
    for turn in range(repeats + WARM_UP):
        source[::4096] = bytes([turn % 256]) * (size // 4096)
        memcpy_ms = timed(lambda: ctypes.memmove(to, origin, size))
        known = checksum(source)
        push_ms, verify_ms = pushed(sender, source, ask, known)
        with_checksum_ms, _ = pushed(sender, source, ask, None)
        turns.append(Turn(memcpy_ms, push_ms, with_checksum_ms, timed(lambda: checksum(source)), verify_ms))
    sender.close()
    return turns[WARM_UP:]


def pushed(sender: ShmSender, source: memoryview, ask: Callable[[str], str], known: str | None) -> tuple[float, float]:
    """Milliseconds of a push, and of the owner's verification."""
    landing = ShmLanding.model_validate_json(ask(str(source.nbytes)))
    begun = time.perf_counter()
    receipt = sender.push_bytes(landing, source, checksum=known)
    push_ms = (time.perf_counter() - begun) * 1e3
    return push_ms, float(ask(receipt.checksum))


def summarise(size_mib: int, turns: list[Turn]) -> Row:
    """Medians and ratios."""
    memcpy, push, with_checksum, hashed, verified = (
        statistics.median(getattr(turn, field.name) for turn in turns) for field in fields(Turn)
    )
    return Row(
        size_mib=size_mib,
        turns=len(turns),
        memcpy_ms=memcpy,
        push_ms=push,
        push_with_checksum_ms=with_checksum,
        checksum_alone_ms=hashed,
        verify_ms=verified,
        memcpy_gib_per_s=size_mib / 1024 / memcpy * 1e3,
        push_rate_of_memcpy=memcpy / push,
        push_rate_of_memcpy_best_turns=min(turn.memcpy for turn in turns) / min(turn.push for turn in turns),
        push_with_checksum_rate_of_memcpy=memcpy / with_checksum,
        push_added_ms=push - memcpy,
        push_with_checksum_added_ms=with_checksum - memcpy,
    )


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[3, 30, 300])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--own", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.own:
        own(Path(asked.own[0]), int(asked.own[1]))
        return
    with owner((max(asked.mib) + 1) * MIB) as (folder, ask):
        rows = [summarise(mib, measure(mib * MIB, asked.repeats, folder, ask)) for mib in asked.mib]
    print("                 milliseconds                          rate of memcpy         added ms")
    print("  MiB   memcpy     push push+sum checksum   verify     push  best push+sum     push push+sum")
    for row in rows:
        print(
            f"{row.size_mib:5} {row.memcpy_ms:8.2f} {row.push_ms:8.2f} {row.push_with_checksum_ms:8.2f}"
            f" {row.checksum_alone_ms:8.2f} {row.verify_ms:8.2f} {row.push_rate_of_memcpy:8.2f}"
            f" {row.push_rate_of_memcpy_best_turns:5.2f} {row.push_with_checksum_rate_of_memcpy:8.2f}"
            f" {row.push_added_ms:8.2f} {row.push_with_checksum_added_ms:8.2f}"
        )
    print(
        f"goal: push at {RATE_GOAL} of memcpy's rate or more from 30 MiB on; {ADDED_GOAL_MS} ms added or less at 3 MiB"
    )
    if asked.json:
        facts = {"date": datetime.now(UTC).isoformat(), "machine": platform.machine(), "cores": os.cpu_count()}
        asked.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
