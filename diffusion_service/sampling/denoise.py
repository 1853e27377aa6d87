"""The denoising loop: our forward, diffusers' scheduler step, progress and cancel between. Diffusion ranks; torch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from diffusers.modular_pipelines import BlockState, ModularPipelineBlocks, PipelineState
from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3AfterDenoiseStep
from diffusers.modular_pipelines.minimax_h3.denoise import (
    MiniMaxH3DenoiseLoopWrapper,
    MiniMaxH3DenoiseStep,
    MiniMaxH3LoopSchedulerStep,
    MiniMaxH3Ref2VADenoiseStep,
)

from diffusion_service.model.dit import Dit, Moment, Rows
from diffusion_service.model.reuse import Reuse
from shared_runtime.conditioning.blocks import Pipeline, run_block
from shared_schema.errors import JobFailed
from shared_schema.quality import StepCache
from shared_schema.tasks import Task

OnStep = Callable[[int, int, bool], None]
"""Called after each finished step: how many are done, of how many, and whether this one was skipped. May raise to stop.
"""


class Denoised(NamedTuple):
    """A clip's latents, normalised, equal on every rank."""

    video: torch.Tensor
    """`(1, 24, T, H, W)`."""
    audio: torch.Tensor
    """`(2, 32, latents)`."""
    skipped: int
    """Forwards that ended after the first block."""


class Denoiser:
    """The loop of one task over its own transformer partition."""

    def __init__(self, task: Task, dit: Dit) -> None:
        self._dit = dit
        self._update = MiniMaxH3LoopSchedulerStep()
        loop = MiniMaxH3Ref2VADenoiseStep if task is Task.REF2VA else MiniMaxH3DenoiseStep
        self._loop: MiniMaxH3DenoiseLoopWrapper = loop()
        self._after = MiniMaxH3AfterDenoiseStep()

    @property
    def blocks(self) -> tuple[ModularPipelineBlocks, ...]:
        """Diffusers' blocks, for the pipeline that holds their components."""
        return (self._loop, self._after)

    @torch.no_grad()
    def run(
        self, pipeline: Pipeline, state: PipelineState, on_step: OnStep, step_cache: StepCache | None = None
    ) -> Denoised:
        """All steps, those that `step_cache` lets be skipped after their first block. A collective."""
        inner = self._loop.get_block_state(state)
        schedule = [Moment(timesteps, of_row) for timesteps, of_row in inner.row_timestep_plan]
        rows = Rows.from_layout(inner.denoiser_input_fields)
        reuse = None if step_cache is None else Reuse(step_cache, denoised_rows(inner, rows))
        denoising, skipped = self._dit.begin(inner.prompt_embeds, rows, schedule, reuse), 0
        for index, timestep in enumerate(inner.timesteps):
            inner.noise_pred, inner.audio_noise_pred = denoising.step(
                index, inner.latents[None], inner.audio_latents[None]
            )
            self._update(pipeline, inner, index, timestep)
            _finish(inner.latents)
            before, skipped = skipped, denoising.skipped
            on_step(index + 1, len(schedule), skipped > before)
        self._loop.set_block_state(state, inner)
        run_block(self._after, pipeline, state)
        return Denoised(state.get("latents"), state.get("audio_latents"), skipped)


def denoised_rows(inner: BlockState, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Of picture and of sound, without the conditions, which come first in each."""
    return (
        rows.video_indices[inner.num_condition_video_rows :],
        rows.audio_indices[inner.num_condition_audio_rows :],
    )


def not_finite(video: torch.Tensor, audio: torch.Tensor) -> JobFailed | None:
    """The `numerical_error` of latents that are NaN or infinite somewhere."""
    for name, latents in (("video", video), ("audio", audio)):
        if not torch.isfinite(latents).all():
            return JobFailed(f"the {name} latents are not finite", code="numerical_error")
    return None


def _finish(latents: torch.Tensor) -> None:
    """Wait for the device: progress counts finished work, not queued work."""
    if latents.is_cuda:
        torch.cuda.synchronize(latents.device)
