"""How fast a payload gets from one process to another: our ways beside a plain memcpy and beside what peers do.

    python -m benchmarks.transport [--repeats N] [--mib 3 30 300] [--json FILE]

All ways are measured in one run, in turns, each payload with new content; medians, and `best` the quickest turn, for a
machine that is busy with other work. `move` is from the first byte written to the receiver's usable view; messages
and checksums are columns of their own. `+sums` is `move` with the sender's checksum made beside the copy and the
receiver's after it. `reused` and `fresh` say in what memory the bytes arrive: a fresh page has to be found and cleared
first. The peers' ways use fresh memory by design, which is why ours does not; ratios across that line say so.
`runner`: the whole push as the diffusion service's runner sees it, through a real encoder service and its leader.
`ranks`: two ranks that both read a landing, against one that reads and broadcasts.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.figures import provenance, write_json
from benchmarks.transport_load import MIB, Load, loads
from benchmarks.transport_owner import OwnerProcess, owner_process
from benchmarks.transport_runner import measure_ranks, measure_runner
from benchmarks.transport_ways import FreshSegment, Memcpy, Memory, Ours, PeersRead, Turn, Way

WARM_UP = 2
LARGE = 30 * MIB


@dataclass(frozen=True)
class Row:
    """One way of one payload: medians."""

    load: str
    mib: float
    way: str
    memory: Memory
    turns: int
    move_ms: float
    move_best_ms: float
    control_ms: float
    sender_checksum_ms: float
    receiver_checksum_ms: float
    with_checksum_ms: float
    with_checksum_best_ms: float
    move_gb_per_s: float


@dataclass(frozen=True)
class Ratio:
    """A goal, and what was found; `best` is from the quickest turns."""

    load: str
    what: str
    found: float
    best: float
    goal: float
    unit: str

    @property
    def holds(self) -> bool:
        """Whether the median meets the goal: at most so many ms, or at least so many times."""
        return self.found <= self.goal if self.unit == "ms" else self.found >= self.goal


def measure(load: Load, ways: list[Way], repeats: int) -> list[Row]:
    """Every way in turns."""
    turns: dict[str, list[Turn]] = {f"{way.name} {way.memory}": [] for way in ways}
    for number in range(repeats + WARM_UP):
        known = load.renew(number)
        for way in ways:
            turns[f"{way.name} {way.memory}"].append(way.turn(load, known))
    return [_row(load, way, turns[f"{way.name} {way.memory}"][WARM_UP:]) for way in ways]


def _row(load: Load, way: Way, turns: list[Turn]) -> Row:
    middle = {field.name: statistics.median(getattr(turn, field.name) for turn in turns) for field in fields(Turn)}
    return Row(
        load=load.name,
        mib=round(load.nbytes / MIB, 1),
        way=way.name,
        memory=way.memory,
        turns=len(turns),
        move_ms=round(middle["move"], 3),
        move_best_ms=round(min(turn.move for turn in turns), 3),
        control_ms=round(middle["control"], 3),
        sender_checksum_ms=round(middle["sender_checksum"], 3),
        receiver_checksum_ms=round(middle["receiver_checksum"], 3),
        with_checksum_ms=round(middle["with_checksum"], 3),
        with_checksum_best_ms=round(min(turn.with_checksum for turn in turns), 3),
        move_gb_per_s=round(load.nbytes / middle["move"] / 1e6, 2),
    )


def ratios(rows: list[Row]) -> Iterator[Ratio]:
    """What has to hold, for one payload."""
    by = {(row.way, row.memory): row for row in rows}
    copy, shm = by["memcpy", "reused"], by["ours over shm", "reused"]
    load, small = shm.load, shm.mib * MIB < LARGE
    if small:
        added = (shm.move_ms - copy.move_ms, shm.move_best_ms - copy.move_best_ms)
        yield Ratio(load, "shm on top of memcpy", round(added[0], 3), round(added[1], 3), 0.5, "ms")
    else:
        yield _times(load, "shm, of memcpy's rate", copy, shm, 0.8)
        found, best = copy.move_ms / shm.with_checksum_ms, copy.move_best_ms / shm.with_checksum_best_ms
        yield Ratio(load, "shm with both checksums, of memcpy's rate", round(found, 2), round(best, 2), 0.4, "times")
    segment = by["fresh segment, msgpack", "fresh"]
    yield _times(load, "shm (reused memory) beside msgpack in a fresh segment", segment, shm, 5 if small else 10)
    nixl, read = by.get(("ours over nixl", "reused")), by.get(("NIXL READ, registered per request", "fresh"))
    if nixl is not None and read is not None:
        yield _times(load, "NIXL beside a READ with per-request registration", read, nixl, 5 if small else 3)


def _times(load: str, what: str, slow: Row, quick: Row, goal: float) -> Ratio:
    best = slow.move_best_ms / quick.move_best_ms
    return Ratio(load, what, round(slow.move_ms / quick.move_ms, 2), round(best, 2), goal, "times")


def ways_of(owner: OwnerProcess, *, nixl: bool) -> list[Way]:
    """Every way that this machine has."""
    ways: list[Way] = [Memcpy("reused"), Memcpy("fresh"), Ours(owner, "shm"), FreshSegment(owner)]
    return [*ways, Ours(owner, "nixl"), PeersRead(owner)] if nixl else ways


def run(mib: list[int], repeats: int, *, nixl: bool) -> tuple[list[Row], list[Ratio]]:
    """All payloads on all ways."""
    rows: list[Row] = []
    goals: list[Ratio] = []
    with owner_process((max([*mib, 200]) + 1) * MIB, nixl=nixl) as owner:
        ways = ways_of(owner, nixl=nixl)
        for load in loads(mib):
            owner.ask(do="manifest", manifest=load.manifest.model_dump() if load.manifest else None)
            found = measure(load, ways, repeats)
            rows += found
            goals += ratios(found)
        for way in ways:
            way.close()
    return rows, goals


def show(rows: list[Row], goals: list[Ratio], runner: list[dict[str, object]], ranks: list[dict[str, object]]) -> None:
    """For people."""
    heads = ("move ms", "best", "control", "sum(s)", "sum(r)", "+sums", "GB/s")
    print(f"{'payload':17} {'way':34} {'memory':6}", *(f"{head:>8}" for head in heads))
    for row in rows:
        numbers = (
            row.move_ms,
            row.move_best_ms,
            row.control_ms,
            row.sender_checksum_ms,
            row.receiver_checksum_ms,
            row.with_checksum_ms,
            row.move_gb_per_s,
        )
        print(f"{row.load:17} {row.way:34} {row.memory:6}", *(f"{number:8.2f}" for number in numbers))
    for each in (*runner, *ranks):
        print(", ".join(f"{name} {value}" for name, value in each.items()))
    for goal in goals:
        bound = f"{'at most' if goal.unit == 'ms' else 'at least'} {goal.goal}"
        verdict = "holds" if goal.holds else "DOES NOT HOLD"
        print(f"{goal.load:17} {goal.what}: {goal.found} {goal.unit} (best turns {goal.best}), {bound}: {verdict}")


def main() -> None:
    """Measure, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[3, 30, 300])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--without-nixl", action="store_true", help="for a machine that has none")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows, goals = run(asked.mib, asked.repeats, nixl=not asked.without_nixl)
    runner = measure_runner(asked.mib, asked.repeats)
    ranks = measure_ranks(asked.mib, asked.repeats)
    show(rows, goals, runner, ranks)
    if asked.json:
        figures = {
            **provenance(["benchmarks/transport.py", "--repeats", str(asked.repeats)]),
            "rows": [asdict(row) for row in rows],
            "goals": [{**asdict(goal), "holds": goal.holds} for goal in goals],
            "runner": runner,
            "ranks": ranks,
        }
        write_json(asked.json, figures)


if __name__ == "__main__":
    main()
