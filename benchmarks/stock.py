"""Stock diffusers with made-up weights in one process, told what to make as `benchmarks.one_process` is.

    python -m benchmarks.stock MODEL_FOLDER OUT.mp4 < orders          see `benchmarks.whole`

Everything is the library's own: forward, attention, tiles one by one in FP32.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import Device
from benchmarks.one_process import take_orders
from shared_runtime.weights import (
    load_audio_vae,
    load_processor,
    load_scheduler,
    load_text_encoder,
    load_tokenizer,
    load_transformer,
    load_video_vae,
)
from tests.end_to_end.reference import WidePipeline


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


if __name__ == "__main__":
    model, out = map(Path, sys.argv[1:])
    take_orders(load(model, Device.best().torch_device), out.parent, out)
