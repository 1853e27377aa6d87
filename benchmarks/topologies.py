"""The model over several GPUs of one host: forwards, decode, encoder, whole jobs and faults, on made-up weights.

    python -m benchmarks.topologies --json benchmarks/results/topologies.json --budget-s 560
    python -m benchmarks.topologies --json FILE --only dit,decode --budget-s 300
    python -m benchmarks.topologies --json FILE --tiny       gloo ranks on the CPU: only proves that all of this runs

Cells run one after the other, the most telling first, each in processes of its own with a limit of its own: one that
hangs or fails costs only itself. What a cell found is in FILE, and as a table in its .md, after every measurement, also
of earlier calls with the same FILE; everything that is logged is in its .log.
"""

import argparse
import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import topology_cells, topology_pair
from benchmarks.figures import provenance, write_json
from benchmarks.released import write_released
from benchmarks.topology_cells import Plan, Tell
from shared_runtime.gpus import installed_gpus
from shared_runtime.tiny import tiny_checkpoint

Row = dict[str, Any]
CPU_DEVICES = 4
STOP_S = 10.0


@dataclass(frozen=True)
class Cell:
    """Measurements that share processes."""

    work: Callable[[Plan, Tell], Awaitable[None]]
    limit_s: float


CELLS: dict[str, Cell] = {
    "dit": Cell(topology_cells.dit, 260),
    "decode": Cell(topology_cells.decode, 120),
    "pair": Cell(topology_pair.shm, 240),
    "tensor": Cell(topology_cells.tensor, 150),
    "encoder": Cell(topology_cells.encoder, 300),
    "faults": Cell(topology_pair.faults, 300),
    "nixl": Cell(topology_pair.nixl, 180),
    "links": Cell(topology_cells.links, 60),
    "eager": Cell(topology_cells.eager, 90),
}
"""Most telling first."""
SHOWN = ("s", "first_s", "ready_s", "tflops_a_gpu", "communication_share", "errors", "errors_of", "bit_equal")
"""Columns of the Markdown table; the rest is one more."""


class Results:
    """The table, on disk after every change."""

    def __init__(self, file: Path, facts: Row) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._json = file
        kept = json.loads(file.read_text())["rows"] if file.exists() else []
        self._all: Row = {**facts, "rows": kept}
        self.write()

    def add(self, row: Row) -> None:
        """One more measurement; it takes the place of an older one of the same name."""
        same = (row["cell"], row["name"])
        rows = [each for each in self._all["rows"] if (each["cell"], each["name"]) != same]
        self._all["rows"] = [*rows, row]
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        """Both files."""
        write_json(self._json, self._all)
        head = ["cell", "measurement", *SHOWN, "more"]
        lines = [_line(head), _line(["---"] * len(head)), *(_line(_cells(row)) for row in self._all["rows"])]
        self._json.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _cells(row: Row) -> list[str]:
    more = {key: value for key, value in row.items() if key not in ("cell", "name", *SHOWN)}
    return [row["cell"], row["name"], *(_text(row.get(key)) for key in SHOWN), _text(more)]


def _text(value: object) -> str:
    return "" if value is None else json.dumps(value).replace("|", "/").strip('"')


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


class CellProcess:
    """One cell under way. It writes lines of JSON: what it measured, and the processes that it started."""

    def __init__(self, command: list[str], log: Path) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as noise:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=noise, text=True, start_new_session=True, env=environment
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._services: list[int] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def follow(self, limit_s: float, on_row: Callable[[Row], None]) -> str:
        """Hand over what it measures until it ends or has to; how it ended."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._stop()
                return f"stopped after {limit_s:.0f} s"
            if line is None:
                return "ended" if self._process.wait() == 0 else f"failed with exit code {self._process.returncode}"
            message = json.loads(line)
            if "process" in message:
                self._services.append(message["process"])
            else:
                on_row(message)

    def _stop(self) -> None:
        """End it as it would end itself, then whatever is left of it and of its services."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        for group in (*self._services, self._process.pid):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._process.wait()


def run_cells(names: Sequence[str], options: argparse.Namespace, results: Results) -> bool:
    """Every cell that there is time for; whether all of them ended well."""
    ends, well = time.monotonic() + options.budget_s, True
    for name in names:
        left = ends - time.monotonic()
        limit = min(CELLS[name].limit_s, left)
        if limit < options.least_s:
            results.add({"cell": name, "name": "not run", "why": f"{left:.0f} s were left"})
            well = False
            continue
        begun = time.monotonic()
        own = ["--cell", name, *(["--tiny"] if options.tiny else []), *([] if options.long else ["--short"])]
        command = [sys.executable, "-m", "benchmarks.topologies", "--json", str(options.json), *own]
        command += ["--scratch", str(options.scratch), "--devices", str(options.devices)]
        cell = CellProcess(command, options.json.with_suffix(".log"))
        end = cell.follow(limit, lambda row, name=name: results.add({"cell": name, **row}))  # type: ignore[misc]
        results.add({"cell": name, "name": "whole cell", "end": end, "cell_s": round(time.monotonic() - begun, 1)})
        well = well and end == "ended"
    return well


def run_cell(name: str, options: argparse.Namespace) -> None:
    """In the cell's own process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    folder = tiny_checkpoint() if options.tiny else options.scratch / "released"
    plan = Plan(folder, options.scratch, options.devices, options.tiny, options.long)

    def tell(what: str, figures: Row) -> None:
        print(json.dumps({"name": what, **figures}), flush=True)

    asyncio.run(CELLS[name].work(plan, tell))  # type: ignore[arg-type]


def _facts(options: argparse.Namespace) -> Row:
    gpus = [gpu.name for gpu in installed_gpus()]
    told = (
        subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout if gpus else ""
    )
    return {**provenance(sys.argv), "gpus": gpus, "devices": options.devices, "links": told.splitlines()}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The model over several GPUs of one host.")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CELLS), help=f"cells, of {', '.join(CELLS)}")
    parser.add_argument("--budget-s", type=float, default=560.0)
    parser.add_argument("--least-s", type=float, default=40.0, help="no cell is begun with less time than this left")
    parser.add_argument("--devices", type=int, help="how many GPUs; all that there are")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/h3-topologies"))
    parser.add_argument("--tiny", action="store_true", help="CPU ranks and the tiny checkpoint")
    parser.add_argument("--short", dest="long", action="store_false", help="without 362 frames on one GPU")
    parser.add_argument("--cell", choices=list(CELLS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.devices = options.devices or (CPU_DEVICES if options.tiny else len(installed_gpus()))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that were asked for; 1 if one of them did not end well."""
    options = _options(arguments)
    options.scratch.mkdir(parents=True, exist_ok=True)
    if options.cell:
        run_cell(options.cell, options)
        return 0
    if not options.tiny:
        write_released(options.scratch / "released")
    names = options.only.split(",")
    if unknown := set(names) - CELLS.keys():
        raise SystemExit(f"no such cells: {', '.join(sorted(unknown))}")
    return 0 if run_cells(names, options, Results(options.json, _facts(options))) else 1


if __name__ == "__main__":
    sys.exit(main())
