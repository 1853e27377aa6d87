"""Clips a minute, and what a caller waits, while so many callers each want one clip after another."""

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from benchmarks.figures import spread
from benchmarks.served import POLL_S, ServedRun, run_job, take
from tests.end_to_end.clips import Clip


def measure(client: httpx.Client, clip: Clip, folder: Path, levels: Sequence[int], jobs: int) -> dict[str, object]:
    """Every number of callers in turn, `jobs` clips each and at least three a caller.

    Together all callers ask as often as one would alone: the
    pair is measured, not what polling costs it.
    """
    run_job(client, clip.fields(), [], folder / "warm.mp4")
    numbers = itertools.count()
    rows = []
    for callers in levels:
        count = max(jobs, 3 * callers)

        def one(number: int, poll_s: float = POLL_S * callers) -> ServedRun:
            return run_job(client, take(clip, number).fields(), [], folder / f"load{number}.mp4", poll_s)

        begun = time.perf_counter()
        with ThreadPoolExecutor(callers) as pool:
            runs = list(pool.map(one, itertools.islice(numbers, count)))
        wall = time.perf_counter() - begun
        rows.append(
            {
                "callers": callers,
                "jobs": count,
                "wall_s": round(wall, 3),
                "jobs_per_minute": round(60 * count / wall, 2),
                "post_to_file": spread([run.total_s for run in runs]),
            }
        )
        print(f"  {callers} callers: {rows[-1]['jobs_per_minute']} clips a minute", flush=True)
    return {"request": clip.as_json(), "rows": rows}
