"""The smallest GPU memory in which a job completes, for every mode that saves memory, found with a memory cap.

    python -m benchmarks.room --size 768x1344 --frames 124 --json benchmarks/results/room.json

Every mode is a diffusion rank in a process of its own, with made-up weights at the released sizes. The cap is that of
torch's allocator: what the driver and libraries take beside it (about 1 GiB) is not in it. `start` is what loading and
warming up reserve at most, `job` the smallest cap, to half a GiB, under which a text job of two sigma points completes:
its peak is that of any number of steps. `clip` tells the frames and the sound of that job: a mode that offloads makes
the resident one's, bit for bit. `--tiny --device cpu` proves on a CPU that the benchmark runs.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.figures import write_json
from benchmarks.modes import COMBINED, Silent, parser_of, rank_settings, run
from diffusion_service.commands import Generate, OutputTarget
from diffusion_service.worker import DiffusionRank
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.ranks.worker import Rest, TaskHandle, as_h3_error
from shared_runtime.stored import read_json
from shared_runtime.transport.codec import checksum, gather
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.slab import Slab
from shared_schema.encoder_output import AUDIO, ROLES, TEXT, VISUAL
from shared_schema.errors import JobFailed
from shared_schema.layout import Layout
from shared_schema.tasks import Task

TOKENS = 300
GIB = 2**30
RESOLUTION = GIB // 2


class Nowhere:
    """A pipe that nobody reads."""

    def send(self, _message: object) -> None:
        """Not sent."""


class Room:
    """One rank in this process, and the job that it makes again and again."""

    def __init__(self, arguments: argparse.Namespace, mode: str, folder: Path, scratch: Path) -> None:
        self._on_gpu = arguments.device == "cuda"
        device = torch.device("cuda", 0) if self._on_gpu else torch.device("cpu")
        comm = RankComm(RankSpec("room", 0, Mesh(), "0" if self._on_gpu else "cpu"), device)
        height, width = map(int, arguments.size.split("x"))
        layout = Layout(Task.T2VA, height, width, arguments.frames)
        self.slab = Slab.create(scratch, 64 * 2**20, "room")
        self._command = text_job(layout, folder, scratch, self.slab, points=2)
        settings = rank_settings(arguments, mode, folder, self.slab.path)
        begun = time.perf_counter()
        self._rank = DiffusionRank(comm, settings, Silent())
        self._task = TaskHandle(1, "work", Nowhere(), Silent(), comm)  # type: ignore[arg-type]
        facts = self._rank.facts
        self._weight_bytes = facts.weight_bytes
        self.figures: dict[str, Any] = {
            "start_s": round(time.perf_counter() - begun, 1),
            "start_gib": self._peak(),
            "resident_gib": round(facts.weight_bytes / GIB, 2),
            "offloaded_gib": round(facts.offloaded_bytes / GIB, 2),
        }

    def _peak(self) -> float:
        if not self._on_gpu:
            return 0.0
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return round(peak / GIB, 2)

    def find(self) -> None:
        """Uncapped first, then by halves between the weights that are there at once and that job's peak."""
        generated = self._timed()
        (made,) = generated.outputs
        self.figures |= {
            "timings": generated.timings,
            "uncapped_job_gib": generated.peak_memory_mb and round(generated.peak_memory_mb / 1024, 2),
            "clip": made.frames_sha256[:8] + made.audio_sha256[:8],
        }
        if not self._on_gpu:
            return
        peak = int(self.figures["uncapped_job_gib"] * GIB)
        self.figures["job_gib"] = round(smallest(self._weight_bytes, peak + RESOLUTION, self._completes) / GIB, 2)

    def _completes(self, cap: int) -> bool:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
        try:
            self._timed()
        except (RuntimeError, JobFailed) as error:
            if as_h3_error(error).code != "out_of_memory":
                raise
            print(f"{cap / GIB:.2f} GiB: does not", flush=True)
            return False
        print(f"{cap / GIB:.2f} GiB: completes", flush=True)
        return True

    def _timed(self) -> Any:
        """A job; what stays in the figures is the time of the last one that completed, which is the tightest."""
        begun = time.perf_counter()
        rest = self._rank.handle(self._command, self._task)
        assert isinstance(rest, Rest)
        generated = rest.end()
        self.figures["job_s"] = round(time.perf_counter() - begun, 2)
        return generated


def smallest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """By halves, and to `RESOLUTION`, the smallest number of bytes that fits; `low` does not, and `high` does."""
    while high - low > RESOLUTION:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def text_job(layout: Layout, checkpoint: Path, scratch: Path, slab: Slab, points: int) -> Generate:
    """A job of so many sigma points whose text, made up, lies in the slab."""
    random = np.random.default_rng(0)
    text_dim = read_json(checkpoint / "transformer" / "config.json").get("text_dim", 5120)
    text = torch.from_numpy(random.standard_normal((TOKENS, text_dim))).bfloat16().view(torch.uint16).numpy()
    empty = np.zeros((0, 96), np.float32), np.zeros((0, 32), np.float32)
    payload = gather({TEXT: text, ROLES: np.ones(TOKENS, np.int64), VISUAL: empty[0], AUDIO: empty[1]}, layout)
    landing = slab.reserve(payload.manifest.nbytes, "1" * 32, 36_000.0, time.time())
    sender = ShmSender(scratch)
    sender.push(landing, payload, checksum=checksum(payload.data))
    sender.close()
    return Generate(
        landing=landing,
        manifest=payload.manifest,
        task=layout.task,
        height=layout.height,
        width=layout.width,
        num_frames=layout.num_frames,
        num_inference_steps=points,
        flow_shift=12.0,
        audio_flow_shift=3.0,
        outputs=(OutputTarget(1, scratch / "clip.mp4"),),
    )


def run_one(arguments: argparse.Namespace, mode: str, folder: Path, out: Path) -> None:
    """What a child does; figures are kept also when the search breaks off."""
    room, file = Room(arguments, mode, folder, out), out / "figures.json"
    write_json(file, room.figures)
    try:
        room.find()
    finally:
        write_json(file, room.figures)
        room.slab.close()


def table(modes: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [
        "| Mode | weights on GPU GiB | on host GiB | start GiB | smallest for a job GiB | s of that job | clip |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    keys = ("resident_gib", "offloaded_gib", "start_gib", "job_gib", "job_s", "clip")
    for mode, found in modes.items():
        cells = [str(found.get(key, "failed" if "failed" in found else "-")) for key in keys]
        lines.append(f"| {mode} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(parser_of("The smallest GPU memory for a job, by mode.", (COMBINED,)), run_one, table)
