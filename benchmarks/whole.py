"""A whole clip on one GPU, prompt to file: the pair through `/v1/videos`, beside stock diffusers in one process.

    python -m benchmarks.whole --stock-gpu 1 --json benchmarks/results/whole.json
    python -m benchmarks.whole --tiny                   only to see that all of this runs, on a CPU

Weights are made up at the released sizes. With a second GPU both sides work at the same time, one clip each; without,
stock comes when the services have ended. Stock is diffusers' pipeline with every default of its own, the text encoder
cut to the layers that are run (64 do not fit beside the rest), and the writer of MP4s that the services use.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.figures import provenance, spread, stage_medians, write_json
from benchmarks.one_process import one_process
from benchmarks.released import checkpoint
from benchmarks.serve import own_pair
from benchmarks.served import ServedRun, run_job, take
from tests.end_to_end.clips import Clip, form

POLL_S = 0.05
CLIP = Clip("whole", "t2va", "a lighthouse at dusk, waves below", height=768, width=1344, num_frames=124)
TINY = replace(CLIP, height=64, width=64, num_frames=107)


@dataclass(frozen=True)
class Busy:
    """How much of a time a GPU was at work."""

    samples: list[float]
    """Percent, one every tenth of a second, each over the time since the one before."""

    def figures(self) -> dict[str, Any]:
        """Means, in percent."""
        if not self.samples:
            return {}
        return {"idle_percent": round(100 - sum(self.samples) / len(self.samples), 2), "samples": len(self.samples)}


@contextmanager
def watched(gpu: str | None) -> Iterator[list[tuple[float, float]]]:
    """Times and percents of a GPU's work, as `nvidia-smi` tells them, while the context lasts."""
    seen: list[tuple[float, float]] = []
    if gpu is None:
        yield seen
        return
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout

        def read() -> None:
            for line in lines:
                seen.append((time.monotonic(), float(line)))

        threading.Thread(target=read, daemon=True).start()
        try:
            yield seen
        finally:
            process.terminate()


def queue_of(client: httpx.Client, clip: Clip, jobs: int, gpu: str | None) -> dict[str, Any]:
    """Several jobs at once: seconds in all, and how idle the GPU was from the first forward to the last decode."""
    begun = time.perf_counter()
    with watched(gpu) as seen:
        ids = []
        for number in range(jobs):
            job = replace(clip, prompt=f"{clip.prompt}, number {number}")
            answer = client.post("/v1/videos", files=form(job.fields(), []))
            ids.append(answer.raise_for_status().json()["id"])
        first = _until(client, ids[0], ("denoising", "decoding", "muxing"))
        last = _until(client, ids[-1], ("muxing",))
        ends = [_until(client, each, ()) for each in ids]
    if not all(end["status"] == "completed" for end in ends):
        raise RuntimeError(f"jobs of the queue failed: {[end['error'] for end in ends]}")
    within = [percent for at, percent in seen if first["at"] <= at <= last["at"]]
    return {"jobs": jobs, "seconds": round(time.perf_counter() - begun, 3), **Busy(within).figures()}


def _until(client: httpx.Client, job: str, phases: tuple[str, ...]) -> dict[str, Any]:
    while True:
        video: dict[str, Any] = client.get(f"/v1/videos/{job}").json()
        if video["phase"] in phases or video["status"] not in ("queued", "in_progress"):
            return {**video, "at": time.monotonic()}
        time.sleep(POLL_S)


def deploy_file(folder: Path, device: str) -> Path:
    """Both services on one device, weights made up."""
    both = {"devices": device, "share_devices": True, "load_format": "dummy"}
    degrees = {"tensor_parallel_size": 1, "ulysses_degree": 1, "vae_patch_parallel_size": 1}
    stages = [{"stage_id": 0, "tensor_parallel_size": 1, **both}, {"stage_id": 1, "parallel_config": degrees, **both}]
    file = folder / "one.yaml"
    file.write_text(yaml.safe_dump({"base_config": "minimax_h3_disaggregated", "stages": stages}))
    return file


def served(client: httpx.Client, clip: Clip, folder: Path, repeat: int, uncounted: int = 1) -> dict[str, Any]:
    """Runs of one clip, after some that are not counted."""
    runs: list[ServedRun] = []
    for number in range(uncounted + repeat):
        fresh = take(clip, f"{number} of {clip.num_inference_steps} points")
        run = run_job(client, fresh.fields(), [], folder / "served.mp4")
        print(f"  served {run.total_s:.2f} s: {run.stages_s}", flush=True)
        runs += [run] if number >= uncounted else []
    return {
        "forwards": runs[0].forwards,
        "post_to_file": spread([run.total_s for run in runs]),
        "stages": stage_medians([run.stages_s for run in runs]),
        "residual": spread([run.residual_s for run in runs]),
        "peak_memory_mb": max(run.peak_memory_mb or 0 for run in runs),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything."""
    model = checkpoint(folder / "model", tiny=options.tiny)
    clip = replace(TINY if options.tiny else CLIP, num_inference_steps=options.steps)
    device = "cpu" if options.tiny else options.gpu
    found: dict[str, Any] = {"request": clip.as_json()}
    beside = options.tiny or options.stock_gpu is not None
    begun = time.perf_counter()
    out = folder / "stock.mp4"
    with one_process("stock", model, out, gpu=options.stock_gpu) if beside else nullcontext() as other:
        with own_pair(str(model), str(deploy_file(folder, device)), folder) as pair:
            found["start_s"] = round(time.perf_counter() - begun, 1)
            with httpx.Client(base_url=pair.settings.diffusion_url, timeout=900) as client:
                if other is not None:
                    other.answer()
                    other.start(clip)
                found["served"] = served(client, clip, folder, options.repeat)
                found["queue"] = queue_of(client, clip, options.queue, None if options.tiny else options.gpu)
                if options.long_steps:
                    found["long"] = served(client, replace(clip, num_inference_steps=options.long_steps), folder, 1, 0)
        if other is not None:
            found["stock"] = other.answer()
    if not beside and not options.no_stock:
        with one_process("stock", model, out, gpu=options.gpu) as other:
            other.answer()
            other.start(clip)
            found["stock"] = other.answer()
    if "stock" in found:
        found["ratio"] = round(found["served"]["post_to_file"]["median_s"] / found["stock"]["seconds"], 4)
    return found


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.whole", description="A whole clip on one GPU, beside stock.")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--stock-gpu", help="where stock works at the same time; default: afterwards, on the same")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--steps", type=int, default=5, help="sigma points")
    parser.add_argument(
        "--long-steps", type=int, help="sigma points of one more clip, made at the end: 50 for 49 forwards"
    )
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--queue", type=int, default=4, help="jobs")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="h3-whole-") as name:
        figures = {**provenance(sys.argv), **measure(options, Path(name))}
    print(json.dumps(figures, indent=1))
    if options.json:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
