"""Host memory of encoding one and three reference videos: resident set over that of a rank that waits, as a table.

    python -m benchmarks.references --json references.json

Random tiny weights on a CPU, where the video VAE's own tensors are in the host's memory too: `whole` encodes text and
pictures, `text alone` what an encoder of the text-only split does. There frames leave the host as they do on a GPU.
Every cell is a process of its own. `--edge` is the canvas' short edge, `--seconds` the length of each video.
"""

import argparse
import gc
import json
import multiprocessing
import shutil
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.figures import provenance, write_json
from encoder_service.pipeline import EncoderPipeline
from shared_runtime.conditioning.latents import MediaEncoder
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_processor, load_text_encoder, load_tokenizer
from shared_schema.deploy.load import load_deployment
from shared_schema.encode import EncodeRequest, ReferenceInput
from shared_schema.tasks import FPS, Task, align_frames
from tests.cases.videos import Recipe, constant, write_video

WAYS: Final = ("whole", "text alone")
COUNTS: Final = (1, 3)
INDEX = "modular_model_index.json"


def checkpoint_of(edge: int, scratch: Path) -> Path:
    """The tiny checkpoint, with a larger canvas."""
    folder = scratch / "model"
    shutil.copytree(tiny_checkpoint(), folder)
    index = json.loads((folder / INDEX).read_text())
    sizes = {"canvas_short_edge": edge, "canvas_max_pixels": edge * edge * 7 // 4, "reference_image_short_edge": edge}
    (folder / INDEX).write_text(json.dumps({**index, **sizes}))
    return folder


def cell(folder: Path, video: Path, way: str, count: int, frames: int, results: Any) -> None:
    """What a process of its own does: one encoding that does not count, then the one that does."""
    cpu = torch.device("cpu")
    comm = RankComm(RankSpec("bench", 0, Mesh(), "cpu"), cpu)
    components = {
        "text_encoder": load_text_encoder(folder, cpu),
        "tokenizer": load_tokenizer(folder),
        "processor": load_processor(folder),
    }
    media = None
    if way == "whole":
        media = MediaEncoder.load(folder, comm, "patch", _nothing, load_deployment("tiny").encoder)
    pipeline = EncoderPipeline(folder, components, media, comm)

    def encode(task: Task, references: int) -> None:
        request = EncodeRequest(
            request_id=uuid.uuid4().hex,
            task=task,
            prompt="a lighthouse",
            height=64,
            width=64,
            num_frames=frames,
            references=(ReferenceInput(kind="video"),) * references,
        )
        pipeline.encode(request, (video,) * references, _nothing, _nothing, lambda _: None)

    encode(Task.T2VA, 0)
    gc.collect()
    waiting = _resident("VmRSS")
    # The kernel begins a new high-water mark.
    Path("/proc/self/clear_refs").write_text("5")
    encode(Task.REF2VA, count)
    results.put({"waiting_mib": waiting, "peak_mib": _resident("VmHWM")})


def _resident(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return round(int(line.split()[1]) / 1024, 1)
    raise LookupError(name)


def _nothing() -> None:
    pass


def measure(edge: int, seconds: float, ways: tuple[str, ...]) -> dict[str, Any]:
    """All cells, one after the other."""
    found: dict[str, Any] = {}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="h3-references-") as name:
        scratch = Path(name)
        video, folder = scratch / "video.mp4", checkpoint_of(edge, scratch)
        write_video(video, Recipe(constant(FPS, seconds), width=448, height=256))
        frames = align_frames(round(seconds * FPS))
        for way in ways:
            for count in COUNTS:
                results = spawn.Queue()
                process = spawn.Process(target=cell, args=(folder, video, way, count, frames, results))
                process.start()
                figures = results.get()
                process.join()
                figures["added_mib"] = round(figures["peak_mib"] - figures["waiting_mib"], 1)
                found[f"{way}, {count}"] = figures
    return found


def table(found: dict[str, Any]) -> str:
    """As Markdown."""
    lines = ["| Encoding, reference videos | peak over waiting, MiB |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {name} | {figures['added_mib']} |" for name, figures in found.items())])


def main(given: list[str] | None = None) -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.references", description="Host memory of reference videos.")
    parser.add_argument("--edge", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--way", action="append", choices=WAYS, help="may be given more than once; both if not")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    found = measure(arguments.edge, arguments.seconds, tuple(arguments.way or WAYS))
    print(table(found))
    if arguments.json is not None:
        write_json(arguments.json, {**provenance(sys.argv), **found})


if __name__ == "__main__":
    main()
