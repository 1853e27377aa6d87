"""The benchmarks of memory run from their command line to their figures; what they measure needs a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.room import GIB, RESOLUTION, smallest
from tests.command import ROOT


def figures(benchmark: str, mode: str, file: Path, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--tiny", "--device", "cpu", "--layers", "2"]
    arguments = ["--size", "64x96", "--frames", "107", "--mode", mode, "--json", str(file), *more]
    subprocess.run([*command, *arguments], cwd=ROOT, check=True, capture_output=True)
    found: dict[str, Any] = json.loads(file.read_text())["modes"]
    return found


@pytest.mark.slow
def test_group_offloading_makes_what_stock_makes(tmp_path: Path) -> None:
    found = figures("memory", "stock, groups", tmp_path / "memory.json", "--repeats", "1")
    assert found["stock, groups"]["error_to_stock"] == [0, 0]
    assert found["stock, groups"]["begin_s"] >= 0


@pytest.mark.slow
def test_module_offload_makes_the_resident_clip(tmp_path: Path) -> None:
    resident, parked = (figures("room", mode, tmp_path / "room.json")[mode] for mode in ("fp8", "fp8, module"))
    assert parked["clip"] == resident["clip"]
    assert parked["offloaded_gib"] >= resident["offloaded_gib"]


@pytest.mark.parametrize("needed_gib", [20.1, 24.6, 31.9])
def test_the_smallest_cap_is_found_to_half_a_gib_in_five_jobs_or_less(needed_gib: float) -> None:
    tried: list[int] = []

    def fits(cap: int) -> bool:
        tried.append(cap)
        return cap >= needed_gib * GIB

    found = smallest(int(19.5 * GIB), 32 * GIB + RESOLUTION, fits)
    assert 0 <= found - needed_gib * GIB <= RESOLUTION
    assert len(tried) <= 5
