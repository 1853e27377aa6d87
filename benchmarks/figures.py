"""Numbers for people and for files: percentiles, medians by stage, and where they were measured."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks; `share` from 0 to 1."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: Sequence[float]) -> dict[str, object]:
    """A series of durations: median, percentiles, extremes, and every value in order."""
    return {
        "median_s": round(statistics.median(seconds), 4),
        "p90_s": round(percentile(seconds, 0.9), 4),
        "p99_s": round(percentile(seconds, 0.99), 4),
        "min_s": round(min(seconds), 4),
        "max_s": round(max(seconds), 4),
        "all_s": [round(value, 4) for value in seconds],
    }


def stage_medians(stages: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Median seconds of every stage that any run reports."""
    runs = list(stages)
    names = dict.fromkeys(name for run in runs for name in run)
    return {f"{name}_s": round(statistics.median(run[name] for run in runs if name in run), 4) for name in names}


def provenance(arguments: Sequence[str]) -> dict[str, object]:
    """When, where, from which commit and by which command a figure came."""
    command = ["git", "rev-parse", "--verify", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or "unknown",
        "command": " ".join(["python -m", f"benchmarks.{Path(arguments[0]).stem}", *arguments[1:]]),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
    }


def write_json(path: Path, figures: Mapping[str, object]) -> None:
    """One file, readable."""
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
