"""The same work without services: a pipeline in a process of its own, clip after clip when told to. Both ends of it.

    python -m benchmarks.one_process CHECKPOINT MEDIA_FOLDER OUT.mp4 < orders

An order is a line of JSON, the fields of a `Clip`. The first answer says that all is loaded; then one follows for every
clip, with the seconds from opening the media to a file that can be read, and those of its parts.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusion_service.mux import ClipWriter
from tests.end_to_end.clips import Clip, clip_from_json
from tests.end_to_end.reference import load_pipeline, make_clip


class OneProcess:
    """Whoever gives orders: `start` asks for a clip and `answer` waits for it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, clip: Clip) -> None:
        """Ask."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(clip.as_json()) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        """Wait."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the one process ended with {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer


@contextmanager
def one_process(program: str, *arguments: Path, gpu: str | None = None) -> Iterator[OneProcess]:
    """`benchmarks.<program>` with these arguments, which loads meanwhile; ends with the context."""
    environment = {**os.environ, "TQDM_DISABLE": "1", **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
    command = [sys.executable, "-m", f"benchmarks.{program}", *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield OneProcess(process)
        finally:
            process.kill()


def take_orders(pipeline: Any, media: Path, out: Path) -> None:
    """Answer orders until the input ends."""
    print(json.dumps({"ready": 1}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_make(pipeline, clip_from_json(json.loads(line)), media, out)), flush=True)


def _make(pipeline: Any, clip: Clip, media: Path, out: Path) -> dict[str, float]:
    begun = time.perf_counter()
    made = make_clip(pipeline, clip, media)
    pixels = time.perf_counter()
    with ClipWriter(out, clip.height, clip.width, clip.num_frames) as writer:
        writer.write_frames(made.frames)
        writer.write_sound(made.sound)
        writer.finish()
    done = time.perf_counter()
    return {"seconds": done - begun, "to_pixels_s": pixels - begun, "mp4_s": done - pixels}


if __name__ == "__main__":
    checkpoint, media, out = map(Path, sys.argv[1:])
    take_orders(load_pipeline(checkpoint), media, out)
