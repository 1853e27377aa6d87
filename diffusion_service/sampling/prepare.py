"""A payload and a request as the state that diffusers' denoising blocks start from. Diffusion ranks; torch."""

from dataclasses import dataclass

import torch
from diffusers.modular_pipelines import ModularPipelineBlocks, PipelineState
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3FL2VAPrepareLatentsStep,
    MiniMaxH3NoKeyframeAnchorsStep,
    MiniMaxH3PrepareConditionLatentsStep,
    MiniMaxH3PrepareLatentsStep,
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLatentsStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
)

from diffusion_service.commands import Generate
from shared_runtime.conditioning.blocks import Pipeline, run_block
from shared_runtime.conditioning.packing import Conditions
from shared_schema.layout import Block
from shared_schema.tasks import Task

_BLOCKS: dict[Task, tuple[type[ModularPipelineBlocks], ...]] = {
    Task.T2VA: (
        MiniMaxH3NoKeyframeAnchorsStep,
        MiniMaxH3PrepareLayoutStep,
        MiniMaxH3PrepareLatentsStep,
        MiniMaxH3SetTimestepsStep,
    ),
    Task.FL2VA: (
        MiniMaxH3PrepareLayoutStep,
        MiniMaxH3PrepareConditionLatentsStep,
        MiniMaxH3PrepareLatentsStep,
        MiniMaxH3FL2VAPrepareLatentsStep,
        MiniMaxH3SetTimestepsStep,
    ),
    Task.REF2VA: (
        MiniMaxH3Ref2VAPrepareLayoutStep,
        MiniMaxH3PrepareConditionLatentsStep,
        MiniMaxH3PrepareLatentsStep,
        MiniMaxH3Ref2VAPrepareLatentsStep,
        MiniMaxH3SetTimestepsStep,
    ),
}
"""Conditions draw their noise before the clip does: the order is part of what a seed reproduces."""

_ANCHORS = {0: "first", -1: "last"}


@dataclass(frozen=True)
class ReferenceKind:
    """All that the layout block reads of a reference."""

    kind: str
    has_audio: bool


def blocks_of(task: Task) -> tuple[ModularPipelineBlocks, ...]:
    """Diffusers' blocks from a payload to the first step of one task."""
    return tuple(block() for block in _BLOCKS[task])


def prepare(
    pipeline: Pipeline,
    blocks: tuple[ModularPipelineBlocks, ...],
    command: Generate,
    seed: int,
    conditions: Conditions,
    layout_blocks: tuple[Block, ...],
    keyframes: tuple[int, ...],
) -> PipelineState:
    """Everything up to the first step: layout, noise, schedules. Noise comes from a CPU generator on every device."""
    pipeline.scheduler.set_shift(command.flow_shift)
    pipeline.audio_scheduler.set_shift(command.audio_flow_shift)
    device = pipeline._execution_device
    state = PipelineState()
    values = {
        "height": command.height,
        "width": command.width,
        "num_frames": command.num_frames,
        "num_inference_steps": command.num_inference_steps,
        "generator": torch.Generator("cpu").manual_seed(seed),
        "prompt_embeds": conditions.prompt_embeds.to(device),
        "text_token_tags": conditions.roles,
        "condition_latents": list(conditions.visual),
        "audio_condition_latents": list(conditions.audio),
        "keyframe_anchors": tuple(_ANCHORS[place] for place in keyframes),
        "normalized_references": [ReferenceKind(each.medium, each.has_sound) for each in layout_blocks],
    }
    for name, value in values.items():
        state.set(name, value)
    for block in blocks:
        run_block(block, pipeline, state)
    return state
