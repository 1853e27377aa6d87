"""The denoising loop: our forward, diffusers' scheduler step, progress and cancel between. Diffusion ranks; torch."""

from collections.abc import Callable

import torch
from diffusers.modular_pipelines import ModularPipelineBlocks, PipelineState
from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3AfterDenoiseStep
from diffusers.modular_pipelines.minimax_h3.denoise import (
    MiniMaxH3DenoiseLoopWrapper,
    MiniMaxH3DenoiseStep,
    MiniMaxH3LoopSchedulerStep,
    MiniMaxH3Ref2VADenoiseStep,
)

from diffusion_service.model.dit import Dit, Moment, Rows
from shared_runtime.conditioning.blocks import Pipeline, run_block
from shared_schema.errors import JobFailed
from shared_schema.tasks import Task

OnStep = Callable[[int, int], None]
"""Called after each finished step with how many are done, of how many; may raise to stop."""


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
    def run(self, pipeline: Pipeline, state: PipelineState, on_step: OnStep) -> tuple[torch.Tensor, torch.Tensor]:
        """All steps; the clip's latents, `(1, 24, T, H, W)` and `(2, 32, latents)`, normalised, equal on every rank."""
        inner = self._loop.get_block_state(state)
        schedule = [Moment(timesteps, of_row) for timesteps, of_row in inner.row_timestep_plan]
        rows = Rows.from_layout(inner.denoiser_input_fields)
        denoising = self._dit.begin(inner.prompt_embeds, rows, schedule)
        for index, timestep in enumerate(inner.timesteps):
            inner.noise_pred, inner.audio_noise_pred = denoising.step(
                index, inner.latents[None], inner.audio_latents[None]
            )
            self._update(pipeline, inner, index, timestep)
            _finish(inner.latents)
            on_step(index + 1, len(schedule))
        self._loop.set_block_state(state, inner)
        run_block(self._after, pipeline, state)
        return state.get("latents"), state.get("audio_latents")


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
