"""Stock diffusers with made-up weights in one process: answers a line for every clip that it is told to make.

    python -m benchmarks.stock MODEL_FOLDER OUT.mp4 < orders          see `benchmarks.whole`

Everything is the library's own: forward, attention, tiles one by one in FP32. The answer says the seconds from the
prompt to a file that can be read, and those of the parts.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from diffusion_service.mux import ClipWriter
from shared_runtime.weights import (
    load_audio_vae,
    load_processor,
    load_scheduler,
    load_text_encoder,
    load_tokenizer,
    load_transformer,
    load_video_vae,
)
from tests.end_to_end.clips import Clip, clip_from_json
from tests.end_to_end.reference import WidePipeline, make_clip


def load(folder: Path, device: torch.device) -> Any:
    """Diffusers' pipeline for t2va over made-up weights on one device."""
    pipeline = WidePipeline.from_pretrained(str(folder))
    pipeline.update_components(
        tokenizer=load_tokenizer(folder),
        processor=load_processor(folder),
        text_encoder=load_text_encoder(folder, device, dummy=True),
        transformer=load_transformer(folder, "transformer", device, dummy=True),
        vae=load_video_vae(folder, "decoder", device, dummy=True),
        audio_vae=load_audio_vae(folder, "decoder", device, dummy=True),
        scheduler=load_scheduler(folder, "scheduler"),
        audio_scheduler=load_scheduler(folder, "audio_scheduler"),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make(pipeline: Any, clip: Clip, out: Path) -> dict[str, float]:
    """One clip into `out`."""
    begun = time.perf_counter()
    made = make_clip(pipeline, clip, out.parent)
    pixels = time.perf_counter()
    with ClipWriter(out, clip.height, clip.width, clip.num_frames) as writer:
        writer.write_frames(made.frames)
        writer.write_sound(made.sound)
        writer.finish()
    done = time.perf_counter()
    return {"seconds": done - begun, "to_pixels_s": pixels - begun, "mp4_s": done - pixels}


def main(folder: Path, out: Path) -> None:
    """Answer orders until the input ends; the first answer says that all is loaded."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = load(folder, device)
    print(json.dumps({"ready": 1}), flush=True)
    for line in sys.stdin:
        print(json.dumps(make(pipeline, clip_from_json(json.loads(line)), out)), flush=True)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
