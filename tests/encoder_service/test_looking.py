"""References that are looked at one by one are seen as all at once."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3Ref2VATextEncoderStep
from PIL import Image

from encoder_service.looking import LookingTextBlock
from shared_runtime.conditioning.blocks import assemble
from shared_runtime.conditioning.taken import TakenReference
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_processor, load_text_encoder, load_tokenizer

RANDOM = np.random.default_rng(3)


def picture(height: int, width: int) -> MiniMaxH3ImageReference:
    return MiniMaxH3ImageReference(image=Image.fromarray(RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8)))


def video(frames: int, height: int, width: int) -> MiniMaxH3VideoReference:
    return MiniMaxH3VideoReference(frames=RANDOM.integers(0, 256, (frames, height, width, 3), dtype=np.uint8), fps=24.0)


SOUND = MiniMaxH3AudioReference(audio=torch.zeros(2, 100), sample_rate=32000)
MIXED = {
    "all kinds": (video(48, 64, 112), picture(64, 64), SOUND, picture(64, 64), video(61, 64, 64), picture(96, 64)),
    "pictures": (picture(64, 96), picture(64, 96)),
    "one video": (video(107, 112, 64),),
}


@pytest.mark.parametrize("references", MIXED.values(), ids=MIXED)
def test_what_is_seen_one_by_one_is_what_is_seen_at_once(references: tuple[Any, ...]) -> None:
    path, cpu = tiny_checkpoint(), torch.device("cpu")
    components = {
        "text_encoder": load_text_encoder(path, cpu),
        "tokenizer": load_tokenizer(path),
        "processor": load_processor(path),
    }
    block, processor = LookingTextBlock(), components["processor"]
    pipeline = assemble(path, {"text": block}, components, cpu)
    wanted, *counts = MiniMaxH3Ref2VATextEncoderStep()._gather_vision_features(processor, list(references), 24.0)
    taken = [
        TakenReference(each.kind, None, None if each.kind == "audio" else block.look(pipeline, each), None)
        for each in references
    ]
    seen, *seen_counts = block._gather_vision_features(processor, taken, 24.0)
    assert seen_counts == counts
    assert seen.keys() == wanted.keys()
    for name, value in wanted.items():
        precise = value.to(components["text_encoder"].dtype) if name.startswith("pixel_") else value
        assert torch.equal(seen[name], precise)
    assert not any(each.vision for each in taken)
