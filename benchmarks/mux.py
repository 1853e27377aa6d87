"""What is left to encode when a clip's last frames are decoded, by `x264` of stage 1 in the deploy file.

    python -m benchmarks.mux --json benchmarks/results/mux.json
    python -m benchmarks.mux --set '{"lookahead": 5}' --set '{"lookahead": 5, "sliced_threads": true}'

Frames come as a decoder of that speed makes them, chunk by chunk. `tail` is from the last chunk to the finished file.
Half of the frames' pixels are noise, the slowest to encode; `--noise 1` makes all of them so, as random weights do.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import provenance, write_json
from diffusion_service.mux import ClipWriter, samples_for_frames
from shared_schema.deploy.model import X264
from shared_schema.tasks import FRAMES_PER_CHUNK
from video_client.samples import landscape

SETTINGS: tuple[dict[str, object], ...] = (
    {},
    {"lookahead": 5},
    {"lookahead": 0},
    {"sliced_threads": True},
    {"lookahead": 5, "sliced_threads": True},
    {"lookahead": 5, "sliced_threads": True, "threads": 16},
    {"preset": "superfast", "lookahead": 5},
)


def chunks(frames: int, height: int, width: int, noise: float) -> Iterator[NDArray[np.uint8]]:
    """All frames, as many at a time as the decoder makes: a landscape whose left part, so much of it, is noise."""
    random = np.random.default_rng(0)
    picture = landscape(width, height, sun=0.5)
    for first in range(0, frames, FRAMES_PER_CHUNK):
        count = min(FRAMES_PER_CHUNK, frames - first)
        chunk = np.repeat(picture[None], count, axis=0)
        noisy = chunk[:, :, : round(width * noise)]
        noisy[...] = random.integers(0, 256, noisy.shape, dtype=np.uint8)
        yield chunk


def tail(path: Path, given: list[NDArray[np.uint8]], seconds: float, x264: X264) -> tuple[float, int]:
    """Seconds from the last chunk to the file, and its bytes; chunks come evenly over so many seconds."""
    frames = sum(map(len, given))
    height, width = given[0].shape[1:3]
    with ClipWriter(path, height, width, frames, x264) as writer:
        writer.write_sound(np.zeros((2, samples_for_frames(frames)), np.float32))
        begun = last = time.perf_counter()
        for number, chunk in enumerate(given, start=1):
            time.sleep(max(0.0, begun + seconds * number / len(given) - time.perf_counter()))
            last = time.perf_counter()
            writer.write_frames(chunk)
        size = writer.finish()
    return time.perf_counter() - last, size


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description="The last frames of a clip, by setting of x264.")
    parser.add_argument("--size", default="768x1344", help="height x width")
    parser.add_argument("--frames", type=int, default=124)
    parser.add_argument("--seconds", type=float, default=3.8, help="of the decoder, for all of them")
    parser.add_argument("--noise", type=float, default=0.5, help="part of every picture")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", type=json.loads, action="append", help="JSON of a setting; repeat")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    height, width = map(int, arguments.size.split("x"))
    given = list(chunks(arguments.frames, height, width, arguments.noise))
    rows: list[dict[str, object]] = []
    print("| x264 | tail s | MB |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for setting in arguments.set or SETTINGS:
            x264 = X264.model_validate(setting)
            runs = [tail(Path(folder) / "clip.mp4", given, arguments.seconds, x264) for _ in range(arguments.repeats)]
            seconds, size = [run[0] for run in runs], runs[0][1]
            row = {"tail_s": round(statistics.median(seconds), 3), "all_s": [round(each, 3) for each in seconds]}
            rows.append({"x264": setting, **row, "bytes": size})
            print(f"| {json.dumps(setting)} | {row['tail_s']} | {size / 1e6:.2f} |", flush=True)
    if arguments.json is not None:
        write_json(arguments.json, {**provenance(sys.argv), "settings": rows})


if __name__ == "__main__":
    main()
