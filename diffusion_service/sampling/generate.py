"""Clips from a payload: prepare, denoise, decode, and write the file meanwhile. Diffusion ranks; torch.

The last file is left to be finished beside the next job: that is the `Rest` of a `Generate`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines import ModularPipelineBlocks, PipelineState

from diffusion_service.commands import (
    ChunkDone,
    DiffusionEvent,
    Generate,
    Generated,
    Muxing,
    SoundDone,
    StepDone,
)
from diffusion_service.model.dit import Dit
from diffusion_service.model.turns import DECODERS, Turns
from diffusion_service.mux import ClipWriter
from diffusion_service.sampling.decode import Beat, VideoDecoder, decode_sound
from diffusion_service.sampling.denoise import Denoiser, not_finite
from diffusion_service.sampling.prepare import blocks_of, prepare
from diffusion_service.sampling.recording import Finisher, Recorded, Recording
from shared_runtime.conditioning.blocks import Pipeline, assemble
from shared_runtime.conditioning.packing import Conditions
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.worker import Rest
from shared_runtime.tracing import span
from shared_schema.deploy.model import X264
from shared_schema.deploy.settings import Partition, partition_of
from shared_schema.layout import Block
from shared_schema.tasks import FRAMES_PER_CHUNK, Task
from shared_schema.videos import VideoOutput

Tell = Callable[[DiffusionEvent], None]
"""Reports an event, beats, and raises once the clip is not wanted any more."""


class Timings:
    """Seconds by stage, summed over the clips of a job."""

    def __init__(self, before: Mapping[str, float]) -> None:
        self.seconds = dict(before)

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """Count the block's time."""
        start = time.perf_counter()
        with span(stage):
            yield
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - start, 6)


class _StopWatch:
    """Seconds from one `lap` to the next, the first from its making."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        last, self._last = self._last, time.perf_counter()
        return self._last - last


@dataclass(frozen=True)
class _Made:
    """A clip whose frames and sound are all handed over."""

    file: Future[Recorded] | None
    """Once it is whole; None on followers."""
    skipped: int
    """Of its forwards."""

    def recorded(self) -> Recorded:
        """Wait for the file, on the leader."""
        assert self.file is not None
        return self.file.result()


class Generator:
    """The sampling blocks of the tasks that a rank serves, over one set of components."""

    def __init__(
        self,
        checkpoint: Path,
        tasks: frozenset[Task],
        components: dict[str, Any],
        dits: dict[Partition, Dit],
        comm: RankComm,
        video_decoder: Callable[[Pipeline], VideoDecoder],
        x264: X264,
        turns: Turns,
    ) -> None:
        self._comm = comm
        self._turns = turns
        self._x264 = x264
        self._finisher = Finisher()
        self._prepare = {task: blocks_of(task) for task in tasks}
        self._denoisers = {task: Denoiser(task, dits[partition_of(task)]) for task in tasks}
        self._pipelines = {
            task: assemble(checkpoint, self._blocks(task), _parts(task, components), comm.device) for task in tasks
        }
        self._audio_vae = components.get("audio_vae")
        self._video = video_decoder(next(iter(self._pipelines.values())))

    def _blocks(self, task: Task) -> dict[str, ModularPipelineBlocks]:
        blocks = (*self._prepare[task], *self._denoisers[task].blocks)
        return {f"{index}_{type(block).__name__}": block for index, block in enumerate(blocks)}

    def generate(
        self,
        command: Generate,
        conditions: Conditions,
        blocks: tuple[Block, ...],
        keyframes: tuple[int, ...],
        timings: Timings,
        tell: Tell,
        beat: Beat,
    ) -> Rest | None:
        """Make the clips of a job, which the leader writes to the paths of `command.outputs`; a collective.

        What is left on the leader is to wait for the last file, which makes a `Generated`. If this raises, the file
        that was being written is gone; those that were finished before stay.

        Raises:
            JobFailed: `numerical_error`, something is not finite; `internal_error`, a file could not be written.
            TaskCancelled: from `tell`.
        """
        pipeline, made = self._pipelines[command.task], list[_Made]()
        with ExitStack() as failing:
            failing.callback(_settle, made)
            for target in command.outputs:
                with timings.of("prepare"):
                    before = self._prepare[command.task]
                    state = prepare(pipeline, before, command, target.seed, conditions, blocks, keyframes)
                made.append(self._make(command, tuple(made), pipeline, state, timings, tell, beat))
            failing.pop_all()
        peak_mb = _peak_memory_mb(self._comm.device)
        return Rest(lambda: _generated(command, made, timings, peak_mb)) if self._comm.is_leader else None

    def _make(
        self,
        command: Generate,
        before: tuple[_Made, ...],
        pipeline: Pipeline,
        state: PipelineState,
        timings: Timings,
        tell: Tell,
        beat: Beat,
    ) -> _Made:
        """The clip after those before it, from its prepared state."""
        output = len(before)
        with timings.of("denoise"):
            self._turns.take(partition_of(command.task))
            watch = _StopWatch()
            video, audio, skipped = self._denoisers[command.task].run(
                pipeline,
                state,
                lambda done, of, skipped: tell(StepDone(done, of, output, watch.lap(), skipped)),
                command.step_cache,
            )
            self._comm.agree(not_finite(video, audio))
        if before:
            self._comm.from_leader(before[-1].recorded)
        self._turns.take(DECODERS)
        with Recording(self._comm, self._finisher, lambda: self._open(command, output)) as recording:
            with timings.of("audio_decode"):
                recording.write_sound(self._decode_sound(audio, beat))
            tell(SoundDone(output))
            with timings.of("video_decode"):
                total = command.num_frames // FRAMES_PER_CHUNK
                for index, frames in enumerate(self._video.decode(video, command.num_frames, beat)):
                    recording.write_frames(frames)
                    tell(ChunkDone(min(index + 1, total), total, output))
            tell(Muxing(output))
            return _Made(recording.finish(timings.of("mux")), skipped)

    def _open(self, command: Generate, output: int) -> ClipWriter:
        path = command.outputs[output].path
        return ClipWriter(path, command.height, command.width, command.num_frames, self._x264)

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


def _settle(made: Sequence[_Made]) -> None:
    """Wait until nobody writes these files."""
    wait([clip.file for clip in made if clip.file is not None])


def _generated(command: Generate, made: Sequence[_Made], timings: Timings, peak_memory_mb: float | None) -> Generated:
    """The result of a job, once its last file is whole."""
    outputs, warnings = [], list[str]()
    for index, (target, clip) in enumerate(zip(command.outputs, made, strict=True)):
        recorded = clip.recorded()
        outputs.append(
            VideoOutput(
                index=index,
                seed=target.seed,
                frames_sha256=recorded.frames_sha256,
                audio_sha256=recorded.audio_sha256,
                bytes=recorded.size,
                skipped_forwards=clip.skipped,
            )
        )
        prefix = f"output {index}: " if len(command.outputs) > 1 else ""
        warnings += [prefix + warning for warning in recorded.warnings]
    return Generated(tuple(outputs), timings.seconds, tuple(warnings), peak_memory_mb)


def _parts(task: Task, components: dict[str, Any]) -> dict[str, Any]:
    return {name: components[name] for name in (partition_of(task), "scheduler", "audio_scheduler")}


def _peak_memory_mb(device: torch.device) -> float | None:
    """The most device memory that the clip needed, in MiB; None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_reserved(device) / 2**20
    torch.cuda.reset_peak_memory_stats(device)
    return round(peak, 1)
