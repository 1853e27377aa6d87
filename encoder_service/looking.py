"""What Qwen3-VL reads of a reference, taken when it comes: its frames need not wait for the others'. Torch."""

from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3Ref2VATextEncoderStep

from shared_runtime.conditioning.blocks import Pipeline
from shared_runtime.conditioning.references import Reference
from shared_runtime.conditioning.taken import TakenReference, Vision


class LookingTextBlock(MiniMaxH3Ref2VATextEncoderStep):  # type: ignore[misc]
    """Diffusers' block, whose look at the references is taken one by one and put together when all are there.

    The bits are those of all at once: Qwen3-VL's processors work on every picture and video by itself.
    """

    def look(self, pipeline: Pipeline, reference: Reference) -> Vision:
        """What is read of one picture or video, on the text encoder's device: two frames a second, cut into patches."""
        inputs, *counts = super()._gather_vision_features(pipeline.processor, [reference], pipeline.fps)
        device, dtype = pipeline.device_of_rank, pipeline.text_encoder.dtype
        moved = {
            name: value.to(device, dtype) if name.startswith("pixel_") else value.to(device)
            for name, value in inputs.items()
        }
        return Vision(moved, *counts)

    def _gather_vision_features(
        self, processor: Any, references: list[TakenReference], fps: float
    ) -> tuple[dict[str, torch.Tensor], list[int], list[int], list[list[float]]]:
        """Diffusers' name for it. It is asked once: what was seen of each reference is then gone."""
        seen = [each.seen() for each in references if each.vision is not None]
        names = dict.fromkeys(name for each in seen for name in each.inputs)
        return (
            {name: torch.cat([each.inputs[name] for each in seen if name in each.inputs]) for name in names},
            [count for each in seen for count in each.picture_tokens],
            [count for each in seen for count in each.block_tokens],
            [moments for each in seen for moments in each.timestamps],
        )
