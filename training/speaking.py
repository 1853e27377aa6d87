"""Prompts and references to text embeddings, as the encoder service makes them, many at a time. Torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3Ref2VATextEncoderStep
from numpy.typing import NDArray
from PIL import Image

from shared_runtime.stored import TEXT_LAYERS
from shared_runtime.weights import load_processor, load_text_encoder, load_tokenizer
from shared_schema.tasks import FPS

TOGETHER = 256
"""Presentations that are encoded at once."""


@dataclass(frozen=True)
class Reference:
    """A picture, clip or sound as the text encoder is shown it; keyframes are pictures too."""

    kind: str
    has_audio: bool
    features: dict[str, Any] = field(default_factory=dict)
    """Of the processor: pixels and their grid, tokens of a block, and seconds of the blocks of a video."""


@dataclass(frozen=True)
class Presentation:
    """What the text encoder reads of one clip."""

    tokens: list[int]
    tags: list[int]
    references: tuple[Reference, ...]


class Speaker:
    """Tokenizer, processor and text encoder of the checkpoint's folder."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._device = device
        self._step = MiniMaxH3Ref2VATextEncoderStep()
        self._tokenizer, self._processor = load_tokenizer(folder), load_processor(folder)
        self._encoder = load_text_encoder(folder, device)

    def picture(self, pixels: NDArray[np.uint8]) -> Reference:
        """Of `(height, width, 3)` RGB."""
        found = self._processor.image_processor(images=[Image.fromarray(pixels)], return_tensors="pt")
        tokens = int(found["image_grid_thw"][0].prod()) // self._processor.image_processor.merge_size**2
        pixel_values, grid = found["pixel_values"], found["image_grid_thw"]
        return Reference("image", False, {"pixel_values": pixel_values, "image_grid_thw": grid, "tokens": tokens})

    def clip(self, num_frames: int, frame: Callable[[int], NDArray[np.uint8]], has_audio: bool) -> Reference:
        """Of so many frames at 24 a second, each `(height, width, 3)` RGB; only what is looked at is asked for."""
        processor = self._processor.video_processor
        numbers, seconds = self._step._sample_video_condition_frames(
            np.arange(num_frames), float(FPS), self._step.video_sample_fps, processor.temporal_patch_size
        )
        pictures = np.stack([frame(int(number)) for number in numbers])
        found = processor(videos=[pictures], do_sample_frames=False, return_tensors="pt")
        grid = found["video_grid_thw"]
        tokens = int(grid[0, 1] * grid[0, 2]) // processor.merge_size**2
        features = {"pixel_values_videos": found["pixel_values_videos"], "video_grid_thw": grid}
        return Reference("video", has_audio, {**features, "tokens": tokens, "seconds": seconds})

    def present(self, prompt: str, references: Sequence[Reference]) -> Presentation:
        """Labels, vision blocks and prompt, in the order of the request."""
        counts = {
            kind: [each.features["tokens"] for each in references if each.kind == kind] for kind in ("image", "video")
        }
        seconds = [each.features["seconds"] for each in references if each.kind == "video"]
        tokens, tags = self._step._build_presentation(
            self._tokenizer, prompt, list(references), counts["image"], counts["video"], seconds
        )
        return Presentation(tokens, tags, tuple(references))

    @torch.no_grad()
    def embed(self, many: Sequence[Presentation]) -> torch.Tensor:
        """`(clips, tokens, text_dim)` BF16 of presentations of one form: equally many tokens, the same kinds."""
        return torch.cat([self._embed(many[at : at + TOGETHER]) for at in range(0, len(many), TOGETHER)])

    def _embed(self, many: Sequence[Presentation]) -> torch.Tensor:
        tokens = torch.tensor([each.tokens for each in many], device=self._device)
        types = self._processor.create_mm_token_type_ids([each.tokens for each in many])
        vision = {}
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
            parts = [ref.features[name] for each in many for ref in each.references if name in ref.features]
            if parts:
                joined = torch.cat(parts).to(self._device)
                vision[name] = joined.to(self._encoder.dtype) if name.startswith("pixel_") else joined
        output = self._encoder.model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            mm_token_type_ids=torch.tensor(types, device=self._device),
            use_cache=False,
            output_hidden_states=True,
            **vision,
        )
        states: torch.Tensor = output.hidden_states[TEXT_LAYERS]
        return states
