"""diffusers' MiniMax-H3 pipeline as this project runs it: block by block, over components loaded elsewhere. Torch."""

from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3ModularPipeline
from diffusers.modular_pipelines import ModularPipelineBlocks, PipelineState, SequentialPipelineBlocks


class Pipeline(MiniMaxH3ModularPipeline):  # type: ignore[misc]
    """The released pipeline with the durations that the contract serves: 4 s and 362 frames are legal."""

    device_of_rank = torch.device("cpu")

    @property
    def _execution_device(self) -> torch.device:
        """Diffusers looks for a module to ask, and a component may stand for one that another rank holds."""
        return self.device_of_rank

    @property
    def min_duration(self) -> float:
        """Seconds; 107 frames are 4.46 s, and 96 may be asked for."""
        return 4.0

    @property
    def max_duration(self) -> float:
        """Seconds; 362 frames are 15.083 s."""
        return 15.1


def assemble(
    checkpoint: Path, blocks: dict[str, ModularPipelineBlocks], components: dict[str, Any], device: torch.device
) -> Pipeline:
    """A pipeline of `blocks` with its configuration from the checkpoint's index and its `components` as they are.

    `blocks` must name the concrete step of a task, never diffusers' automatic one: that drops references silently.
    """
    pipeline = Pipeline(SequentialPipelineBlocks.from_blocks_dict(blocks), str(checkpoint))
    pipeline.update_components(**components)
    pipeline.device_of_rank = device
    return pipeline


@torch.no_grad()
def run_block(block: ModularPipelineBlocks, pipeline: Pipeline, state: PipelineState) -> None:
    """One block, its results left in `state`."""
    block(pipeline, state)
