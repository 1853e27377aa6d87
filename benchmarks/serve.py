"""Measures the pair as a client sees it, beside the same work in one process without services.

    python -m benchmarks.serve --json benchmarks/results/serve.json        the tiny checkpoint, both sides, in turn
    python -m benchmarks.serve --url http://host:8000 --jobs 20 --concurrency 2 --size 1344x768 --steps 50
    python -m benchmarks.serve --mode clients      1,000 clients that poll and 200 that listen, beside ten that poll
    python -m benchmarks.serve --mode stored       10,000 kept jobs beside ten
    python -m benchmarks.serve --mode load         clips a minute and waiting with more and more callers
    python -m benchmarks.serve --mode progress     how straight progress runs over wall time

Every time of a job runs from sending the POST until the whole MP4 is here. Loading and warm-up jobs are left out.
"""

import argparse
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import httpx

from benchmarks import clients, progress, stored
from benchmarks import load as callers
from benchmarks.figures import provenance, spread, stage_medians, write_json
from benchmarks.one_process import OneProcess, one_process
from benchmarks.served import ServedRun, run_job, take
from shared_runtime.tiny import tiny_checkpoint
from tests.end_to_end.clips import Clip, Medium
from video_client.pair import Pair, PairSettings, free_ports
from video_client.samples import make_samples

Task = Literal["t2va", "fl2va", "ref2va"]
READY_S = 300.0
PICTURE, VIDEO, VOICE = "picture.png", "video.mp4", "voice.wav"
MEDIA: dict[Task, tuple[Medium, ...]] = {
    "t2va": (),
    "fl2va": (Medium(PICTURE, role="first"),),
    "ref2va": (Medium(PICTURE), Medium(VIDEO, "video"), Medium(VOICE, "audio")),
}
SMALLEST = Clip("smallest", "t2va", "a red ball", height=32, width=32, num_frames=107, num_inference_steps=2)


@dataclass
class Sides:
    """Runs of one clip: through the services, and in one process where that was asked for."""

    served: list[ServedRun] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)

    def figures(self, clip: Clip) -> dict[str, object]:
        """Everything that was measured, units in the names."""
        totals = [run.total_s for run in self.served]
        found: dict[str, object] = {
            "request": clip.as_json(),
            "forwards": self.served[0].forwards,
            "file_bytes": self.served[0].file_bytes,
            "served": {
                "post_to_file": spread(totals),
                "post_to_answer": spread([run.accepted_s for run in self.served]),
                "stages": stage_medians([run.stages_s for run in self.served]),
                "residual": spread([run.residual_s for run in self.served]),
                "peak_memory_mb": max((run.peak_memory_mb or 0 for run in self.served), default=0),
            },
        }
        if self.alone_s:
            alone, served = spread(self.alone_s), spread(totals)
            found["one_process"] = {"media_to_file": alone}
            found["ratio"] = round(_median(served) / _median(alone), 4)
            found["overhead_s"] = round(_median(served) - _median(alone), 4)
        return found


@contextmanager
def own_pair(model: str, deploy: str, folder: Path) -> Iterator[Pair]:
    """Both services as children, ready."""
    encoder_port, diffusion_port = free_ports(2)
    settings = PairSettings(model, deploy, encoder_port, diffusion_port, folder / "state", log_dir=folder / "logs")
    with Pair(settings) as pair:
        try:
            pair.wait_ready(READY_S)
            yield pair
        except Exception:
            print(pair.tails(), file=sys.stderr)
            raise


def measure(client: httpx.Client, alone: OneProcess, clip: Clip, media: Path, repeat: int) -> Sides:
    """Warm both sides, then take turns, so that whatever else the machine does falls on both."""
    sides = Sides()
    for n in range(repeat + 1):
        each = take(clip, n)
        run = run_job(client, each.fields(), each.parts(media), media / "served.mp4")
        alone.start(each)
        seconds = alone.answer()["seconds"]
        if n == 0:
            continue
        sides.served.append(run)
        sides.alone_s.append(seconds)
        print(f"  {clip.name} {n}/{repeat}: served {run.total_s:.2f} s, one process {seconds:.2f} s", flush=True)
    return sides


def load(client: httpx.Client, clip: Clip, media: Path, jobs: int, concurrency: int) -> Sides:
    """Many jobs, some at once: what a caller waits under load. The first one is not counted."""
    # Of a pair that runs on: what an earlier run has left in its cache is another run's.
    clip = replace(clip, prompt=f"{clip.prompt}, run {uuid.uuid4().hex}")

    def one(number: int) -> ServedRun:
        each = take(clip, number)
        return run_job(client, each.fields(), each.parts(media), media / f"load{number}.mp4")

    one(0)
    with ThreadPoolExecutor(concurrency) as pool:
        return Sides(served=list(pool.map(one, range(1, jobs + 1))))


def show(name: str, figures: dict[str, object]) -> None:
    """The same numbers for people."""
    served = figures["served"]
    assert isinstance(served, dict)
    print(f"\n{name}: {figures['forwards']} forwards, {figures['file_bytes']} bytes")
    _row("POST to file", served["post_to_file"])
    _row("POST to answer", served["post_to_answer"])
    for stage, seconds in served["stages"].items():
        print(f"  {stage.removesuffix('_s'):24} {seconds:9.3f} s")
    _row("residual (signed)", served["residual"])
    if "ratio" in figures:
        alone = figures["one_process"]
        assert isinstance(alone, dict)
        _row("one process", alone["media_to_file"])
        print(f"  {'served / one process':24} {figures['ratio']:9.3f}")
        print(f"  {'overhead':24} {figures['overhead_s']:9.3f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the file that was asked for."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="h3-benchmark-") as name:
        folder = Path(name)
        make_samples(folder)
        figures = _measured(options, folder)
    figures = {**provenance(sys.argv), **figures}
    if options.json:
        write_json(options.json, figures)
    return 0


def _measured(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    match options.mode:
        case "clients":
            return _clients(options, folder)
        case "load":
            clip = replace(SMALLEST, num_inference_steps=options.load_steps)
            with own_pair(options.model, options.deploy_config, folder) as pair, _client(pair) as client:
                return callers.measure(client, clip, folder, options.callers, options.jobs)
        case "stored":
            return _shown(stored.measure(folder, few=10, many=options.stored, repeat=options.polls))
        case "progress":
            with own_pair(options.model, options.deploy_config, folder) as pair, _client(pair) as client:
                return _shown(progress.measure(client, folder, options.repeat, options.progress_steps))
    clip = _clip(options)
    return _beside(options, clip, folder) if options.url is None else _under_load(options, clip, folder)


def _clip(options: argparse.Namespace) -> Clip:
    width, height = (int(side) for side in options.size.split("x"))
    clip = Clip("main", options.task, "a lighthouse at dusk", MEDIA[options.task], height=height, width=width)
    return replace(clip, num_frames=options.frames, num_inference_steps=options.steps)


def _clients(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    clip = replace(_clip(options), task="t2va", media=())
    with own_pair(options.model, options.deploy_config, folder) as pair, _client(pair) as client:
        run_job(client, clip.fields(), [], folder / "warm.mp4")
        found = clients.measure(
            client, pair.pid("diffusion_service"), clip, options.repeat, options.clients, options.streams
        )
    return _shown({"request": clip.as_json(), **found})


def _client(pair: Pair) -> httpx.Client:
    return httpx.Client(base_url=pair.settings.diffusion_url, timeout=600)


def _shown(figures: dict[str, object]) -> dict[str, object]:
    print(json.dumps(figures, indent=2))
    return figures


def _beside(options: argparse.Namespace, clip: Clip, folder: Path) -> dict[str, object]:
    checkpoint = tiny_checkpoint() if options.model == "tiny" else Path(options.model)
    found: dict[str, object] = {}
    with (
        own_pair(str(checkpoint), options.deploy_config, folder) as pair,
        _client(pair) as client,
        one_process("one_process", checkpoint, folder, folder / "alone.mp4") as alone,
    ):
        alone.answer()
        for each in (clip, SMALLEST):
            found[each.name] = measure(client, alone, each, folder, options.repeat).figures(each)
            show(each.name, found[each.name])  # type: ignore[arg-type]
    return found


def _under_load(options: argparse.Namespace, clip: Clip, folder: Path) -> dict[str, object]:
    with httpx.Client(base_url=options.url, timeout=3600) as client:
        figures = load(client, clip, folder, options.jobs, options.concurrency).figures(clip)
    show(clip.name, figures)
    return {"main": figures, "jobs": options.jobs, "concurrency": options.concurrency}


def _median(figures: dict[str, object]) -> float:
    value = figures["median_s"]
    assert isinstance(value, float)
    return value


def _row(name: str, figures: dict[str, float]) -> None:
    rest = ", ".join(f"{key.removesuffix('_s')} {figures[key]:.3f}" for key in ("p90_s", "p99_s", "min_s", "max_s"))
    print(f"  {name:24} {figures['median_s']:9.3f} s   ({rest})")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.serve", description="Measure the pair through its public API.")
    parser.add_argument("--mode", choices=["pair", "clients", "load", "stored", "progress"], default="pair")
    parser.add_argument("--url", help="a pair that runs; default: start one here and measure one process beside it")
    parser.add_argument("--model", default="tiny", help="`tiny` or a checkpoint's folder")
    parser.add_argument("--deploy-config", default="tiny")
    parser.add_argument("--task", choices=sorted(MEDIA), default="ref2va")
    parser.add_argument("--size", default="64x64")
    parser.add_argument("--frames", type=int, default=345)
    parser.add_argument("--steps", type=int, default=200, help="sigma points")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=10, help="with --url, and at least of each level of --mode load")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="with --mode load")
    parser.add_argument("--load-steps", type=int, default=20, help="sigma points, with --mode load")
    parser.add_argument("--concurrency", type=int, default=1, help="with --url")
    parser.add_argument("--clients", type=int, default=1000, help="with --mode clients")
    parser.add_argument("--streams", type=int, default=200, help="with --mode clients")
    parser.add_argument("--stored", type=int, default=10_000, help="jobs, with --mode stored")
    parser.add_argument("--polls", type=int, default=300, help="answers of each kind and side, with --mode stored")
    parser.add_argument("--progress-steps", type=int, help="sigma points in place of four, with --mode progress")
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
