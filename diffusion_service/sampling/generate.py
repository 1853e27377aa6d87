"""One clip from a payload: prepare, denoise, decode, and write the file meanwhile. Diffusion leader; torch."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines import ModularPipelineBlocks

from diffusion_service.commands import ClipDone, DiffusionEvent, Generate, Generated, Muxing, StepDone
from diffusion_service.mux import ClipWriter
from diffusion_service.sampling.decode import Precision, VideoDecoder, decode_sound
from diffusion_service.sampling.denoise import Denoiser
from diffusion_service.sampling.prepare import blocks_of, prepare
from shared_runtime.conditioning.blocks import assemble
from shared_runtime.conditioning.packing import Conditions
from shared_schema.layout import Block
from shared_schema.tasks import Task
from shared_schema.videos import VideoOutput

Tell = Callable[[DiffusionEvent], None]
"""Reports an event, beats, and raises once the clip is not wanted any more."""


class Generator:
    """The sampling steps of the tasks that a rank serves, over one set of components."""

    def __init__(
        self, checkpoint: Path, tasks: frozenset[Task], components: dict[str, Any], precision: Precision
    ) -> None:
        self._prepare = {task: blocks_of(task) for task in tasks}
        self._denoisers = {task: Denoiser(task) for task in tasks}
        self._pipelines = {task: assemble(checkpoint, self._steps(task), _parts(task, components)) for task in tasks}
        self._audio_vae = components["audio_vae"]
        pipeline = next(iter(self._pipelines.values()))
        self._video = VideoDecoder(components["vae"], pipeline.pixel_mean, pipeline.pixel_std, precision)

    def _steps(self, task: Task) -> dict[str, ModularPipelineBlocks]:
        steps = (*self._prepare[task], *self._denoisers[task].blocks)
        return {f"{index}_{type(step).__name__}": step for index, step in enumerate(steps)}

    def generate(
        self,
        command: Generate,
        conditions: Conditions,
        blocks: tuple[Block, ...],
        keyframes: tuple[int, ...],
        tell: Tell,
    ) -> Generated:
        """Make one clip and write it to `command.output`; the file is gone if this raises.

        Raises:
            JobFailed: `numerical_error`, something is not finite.
            TaskCancelled: from `tell`.
        """
        timings: dict[str, float] = {}
        pipeline = self._pipelines[command.task]
        with _timed(timings, "prepare"):
            state = prepare(pipeline, self._prepare[command.task], command, conditions, blocks, keyframes)
        with _timed(timings, "denoise"):
            video, audio = self._denoisers[command.task].run(pipeline, state, lambda done, of: tell(StepDone(done, of)))
        del state
        with ClipWriter(command.output, command.height, command.width, command.num_frames) as writer:
            with _timed(timings, "audio_decode"):
                waveform = decode_sound(self._audio_vae, audio)
                writer.write_sound(waveform.numpy())
            with _timed(timings, "video_decode"):
                frames_sha256 = self._write_frames(writer, video, command.num_frames, tell)
            tell(Muxing())
            with _timed(timings, "mux"):
                size = writer.finish()
            warnings = writer.warnings()
        output = VideoOutput(
            index=0,
            seed=command.seed,
            frames_sha256=frames_sha256,
            audio_sha256=hashlib.sha256(waveform.numpy().tobytes()).hexdigest(),
            bytes=size,
        )
        return Generated(output, timings, warnings, _peak_memory_mb(self._video.device))

    def _write_frames(self, writer: ClipWriter, latents: torch.Tensor, num_frames: int, tell: Tell) -> str:
        digest = hashlib.sha256()
        total = self._video.chunks_of(latents.shape[2])
        for index, frames in enumerate(self._video.decode(latents, num_frames)):
            pixels = frames.numpy()
            digest.update(pixels.data)
            writer.write_frames(pixels)
            tell(ClipDone(min(index + 1, total), total))
        return digest.hexdigest()


def _parts(task: Task, components: dict[str, Any]) -> dict[str, Any]:
    transformer = "transformer_ref" if task is Task.REF2VA else "transformer"
    return {name: components[name] for name in (transformer, "scheduler", "audio_scheduler")}


@contextmanager
def _timed(timings: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timings[name] = round(time.perf_counter() - start, 6)


def _peak_memory_mb(device: torch.device) -> float | None:
    """The most device memory that the clip needed, in MiB; None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_reserved(device) / 2**20
    torch.cuda.reset_peak_memory_stats(device)
    return round(peak, 1)
