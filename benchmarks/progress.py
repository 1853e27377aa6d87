"""How straight a job's progress is: its correlation with wall time, from its start to its end.

The limit of the project: Pearson's r of more than `CORRELATION` for REQ-T and REQ-R.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import correlation, median

import httpx

from benchmarks.served import take
from shared_schema.videos import FINAL
from tests.end_to_end.clips import Clip, Medium, form

CORRELATION = 0.95
POLL_S = 0.01
WARM_UP = 3
"""Jobs before the first that counts: weights of the stages adapt to what was measured."""
REQ_T = Clip("REQ-T", "t2va", "a red ball rolls over grass", seed=1)
REQ_R = replace(
    REQ_T,
    name="REQ-R",
    task="ref2va",
    prompt="<Picture 1> and <Video 1> with <Audio 1>",
    media=(Medium("picture.png"), Medium("video.mp4", "video"), Medium("voice.wav", "audio")),
)


def watch(client: httpx.Client, clip: Clip, media: Path) -> list[tuple[float, float]]:
    """Seconds since the job began and its progress, as often as a client can see it.

    Raises:
        RuntimeError: the job did not complete, or its progress fell.
    """
    answer = client.post("/v1/videos", files=form(clip.fields(), clip.parts(media))).raise_for_status()
    job, points, begun = answer.json()["id"], list[tuple[float, float]](), 0.0
    while True:
        video = client.get(f"/v1/videos/{job}").raise_for_status().json()
        if video["status"] != "queued":
            begun = begun or time.perf_counter()
            points.append((time.perf_counter() - begun, video["progress"]))
        if video["status"] in FINAL:
            break
        time.sleep(POLL_S)
    if video["status"] != "completed":
        raise RuntimeError(f"{clip.name} ended as {video['status']}: {video['error']}")
    if any(later < earlier for (_, earlier), (_, later) in pairwise(points)):
        raise RuntimeError(f"progress of {clip.name} fell: {points}")
    return points


def straightness(points: Sequence[tuple[float, float]]) -> float:
    """Pearson's r, and 0 where progress never moved."""
    times, progress = zip(*points, strict=True)
    if len(set(progress)) < 2:
        return 0.0
    found = correlation(times, progress)
    return 0.0 if math.isnan(found) else found


def changes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Only the points at which progress had moved."""
    moved = [points[0]]
    for time_s, progress in points:
        if progress != moved[-1][1]:
            moved.append((round(time_s, 3), progress))
    return moved


def measure(client: httpx.Client, media: Path, repeat: int, steps: int | None = None) -> dict[str, object]:
    """REQ-T and REQ-R, each after its warm-up; `steps` sigma points in place of the requests' own four."""
    figures: dict[str, object] = {"limit": CORRELATION}
    medians = []
    for request in (REQ_T, REQ_R):
        clip = request if steps is None else replace(request, num_inference_steps=steps)
        runs = [watch(client, take(clip, number), media) for number in range(WARM_UP + repeat)][WARM_UP:]
        found = [straightness(points) for points in runs]
        medians.append(median(found))
        figures[clip.name] = {
            "correlation_median": round(median(found), 4),
            "correlation_min": round(min(found), 4),
            "correlation_all": [round(value, 4) for value in found],
            "job_s": round(median(points[-1][0] for points in runs), 3),
            "curve_of_the_worst_s_percent": changes(min(runs, key=straightness)),
            "values_seen": round(median(len({progress for _, progress in points}) for points in runs)),
        }
        print(f"  {clip.name}: r {medians[-1]:.3f} (least {min(found):.3f})", flush=True)
    return {**figures, "within_limits": min(medians) > CORRELATION}
