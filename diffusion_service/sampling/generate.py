"""One clip from a payload: prepare, denoise, decode, and write the file meanwhile. Diffusion ranks; torch."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines import ModularPipelineBlocks

from diffusion_service.commands import ClipDone, DiffusionEvent, Generate, Generated, Muxing, StepDone
from diffusion_service.sampling.decode import Beat, VideoDecoder, decode_sound
from diffusion_service.sampling.denoise import Denoiser, not_finite
from diffusion_service.sampling.prepare import blocks_of, prepare
from diffusion_service.sampling.recording import Recording
from shared_runtime.conditioning.blocks import Pipeline, assemble
from shared_runtime.conditioning.packing import Conditions
from shared_runtime.ranks.comm import RankComm
from shared_schema.layout import Block
from shared_schema.tasks import FRAMES_PER_CHUNK, Task
from shared_schema.videos import VideoOutput

Tell = Callable[[DiffusionEvent], None]
"""Reports an event, beats, and raises once the clip is not wanted any more."""


class Generator:
    """The sampling steps of the tasks that a rank serves, over one set of components."""

    def __init__(
        self,
        checkpoint: Path,
        tasks: frozenset[Task],
        components: dict[str, Any],
        comm: RankComm,
        video_decoder: Callable[[Pipeline], VideoDecoder],
    ) -> None:
        self._comm = comm
        self._prepare = {task: blocks_of(task) for task in tasks}
        self._denoisers = {task: Denoiser(task) for task in tasks}
        self._pipelines = {
            task: assemble(checkpoint, self._steps(task), _parts(task, components), comm.device) for task in tasks
        }
        self._audio_vae = components.get("audio_vae")
        self._video = video_decoder(next(iter(self._pipelines.values())))

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
        beat: Beat,
    ) -> Generated:
        """Make one clip, which the leader writes to `command.output`; the file is gone if this raises. A collective.

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
            self._comm.agree(not_finite(video, audio))
        del state
        with Recording(self._comm, command.output, command.height, command.width, command.num_frames) as recording:
            with _timed(timings, "audio_decode"):
                recording.write_sound(self._decode_sound(audio, beat))
            with _timed(timings, "video_decode"):
                total = command.num_frames // FRAMES_PER_CHUNK
                for index, frames in enumerate(self._video.decode(video, command.num_frames, beat)):
                    recording.write_frames(frames)
                    tell(ClipDone(min(index + 1, total), total))
            tell(Muxing())
            with _timed(timings, "mux"):
                recorded = recording.finish()
        output = VideoOutput(
            index=0,
            seed=command.seed,
            frames_sha256=recorded.frames_sha256,
            audio_sha256=recorded.audio_sha256,
            bytes=recorded.size,
        )
        return Generated(output, timings, recorded.warnings, _peak_memory_mb(self._comm.device))

    def _decode_sound(self, latents: torch.Tensor, beat: Beat) -> torch.Tensor | None:
        """The waveform on the leader, None elsewhere."""
        waveform: torch.Tensor | None = None

        def decode(tell: Beat) -> None:
            nonlocal waveform
            assert self._audio_vae is not None
            waveform = decode_sound(self._audio_vae, latents)
            tell()

        self._comm.from_busy_leader(decode, beat)
        return waveform


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
