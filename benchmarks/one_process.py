"""The same work without services: media, diffusers' pipeline and the MP4 in one process, clip after clip when told to.

    python -m benchmarks.one_process CHECKPOINT MEDIA_FOLDER OUT.mp4 < orders

An order is a line of JSON, the fields of a `Clip`; the answer is a line with the seconds that it took.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from diffusion_service.mux import ClipWriter
from tests.end_to_end.clips import Clip, clip_from_json
from tests.end_to_end.reference import load_pipeline, make_clip


def work(pipeline: Any, clip: Clip, folder: Path, out: Path) -> float:
    """Make one clip into `out`; seconds from opening the media to a file that can be read."""
    begun = time.perf_counter()
    made = make_clip(pipeline, clip, folder)
    with ClipWriter(out, clip.height, clip.width, clip.num_frames) as writer:
        writer.write_frames(made.frames)
        writer.write_sound(made.sound)
        writer.finish()
    return time.perf_counter() - begun


def main(checkpoint: Path, folder: Path, out: Path) -> None:
    """Answer orders until the input ends."""
    pipeline = load_pipeline(checkpoint)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": work(pipeline, clip_from_json(json.loads(line)), folder, out)}), flush=True)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
