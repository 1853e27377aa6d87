"""Whole diffusion ranks without services: one job of each task on the tiny checkpoint, on whatever ranks there are."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.commands import DiffusionRankSettings, Generate, Generated, OutputTarget, StepDone
from diffusion_service.mux import ClipWriter
from diffusion_service.sampling.denoise import Denoiser
from diffusion_service.worker import DiffusionRank
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh
from shared_runtime.ranks.worker import Rest, TaskHandle
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.transport.codec import checksum, gather
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.slab import Slab
from shared_schema.deploy.load import load_deployment
from shared_schema.encode import ShmLanding
from shared_schema.encoder_output import AUDIO, ROLES, TEXT, VISUAL, Manifest
from shared_schema.layout import Block, BlockKind, Layout
from shared_schema.quality import StepCache
from shared_schema.tasks import Task
from tests.ranks import Ranks

JOBS = "tests.diffusion_service.rank_jobs:jobs"
SIDE, FRAMES, TOKENS, TEXT_DIM = 32, 107, 6, 32
LAYOUTS = {
    Task.T2VA: Layout(Task.T2VA, SIDE, SIDE, FRAMES),
    Task.FL2VA: Layout(Task.FL2VA, SIDE, SIDE, FRAMES, (Block(BlockKind.IMAGE, 0, 0, 2, 2),), (0,)),
    Task.REF2VA: Layout(
        Task.REF2VA, SIDE, SIDE, FRAMES, (Block(BlockKind.IMAGE, 0, 0, 4, 4), Block(BlockKind.AUDIO, 80))
    ),
}


@dataclass(frozen=True)
class Payload:
    """A payload in its landing."""

    landing: ShmLanding
    manifest: Manifest


@dataclass(frozen=True)
class Made:
    """One clip: its digests, its frames where they were muxed, and the latents that they were decoded from."""

    digests: tuple[str, str]
    frames: list[NDArray[np.uint8]]
    video: torch.Tensor
    audio: torch.Tensor
    generated: Generated
    skipped: tuple[bool, ...]
    """By step, as the leader told it."""


@dataclass(frozen=True)
class Outcome:
    """What a group made, by task, and what its leader holds."""

    clips: dict[Task, Made]
    facts: Any


class Shop:
    """Payloads of every task in a slab, and ranks that make clips of them."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder = folder
        self._ranks = ranks
        self.slab = Slab.create(folder, 8 * 2**20, "test")
        sender = ShmSender(folder)
        self._payloads = {task: self._push(sender, layout) for task, layout in LAYOUTS.items()}
        sender.close()

    def _push(self, sender: ShmSender, layout: Layout) -> Payload:
        draw = np.random.default_rng(7)
        text = torch.from_numpy(draw.standard_normal((TOKENS, TEXT_DIM))).bfloat16().view(torch.uint16).numpy()
        payload = gather(
            {
                TEXT: text,
                ROLES: np.ones(TOKENS, dtype=np.int64),
                VISUAL: draw.standard_normal((layout.visual_rows, 96)).astype(np.float32),
                AUDIO: draw.standard_normal((layout.audio_rows, 32)).astype(np.float32),
            },
            layout,
        )
        landing = self.slab.reserve(payload.manifest.nbytes, "1" * 32, 3600.0, time.time())
        sender.push(landing, payload, checksum=checksum(payload.data))
        return Payload(landing, payload.manifest)

    def make(
        self,
        stage: dict[str, object],
        *,
        steps: int = 2,
        adapter: Adapter | None = None,
        requested: Adapter | None = None,
        step_cache: StepCache | None = None,
        only: frozenset[Task] = frozenset(Task),
    ) -> Outcome:
        """One job of each task in `only`, by ranks that are loaded as `stage` of the tiny preset says.

        Both adapters are for t2va and fl2va: with `adapter`, which is merged, no other task is made; `requested` comes
        with the jobs that it is for.
        """
        diffusion = load_deployment("tiny", json.dumps({"1": stage})).diffusion
        tasks = only if adapter is None else only - {Task.REF2VA}
        settings = DiffusionRankSettings(
            checkpoint=tiny_checkpoint(),
            stage=diffusion,
            tasks=tasks,
            slab_folder=self._folder,
            slab=self.slab.path,
            log_level="warning",
            log_format="text",
            adapter=adapter,
        )
        parallel = diffusion.parallel_config
        mesh = Mesh(parallel.tensor_parallel_size, parallel.ulysses_degree)
        commands = [self._command(task, steps) for task in Task if task in tasks]
        commands = [each if each.task is Task.REF2VA else replace(each, adapter=requested) for each in commands]
        commands = [replace(each, step_cache=step_cache) for each in commands]
        made = self._ranks.run(mesh, JOBS, settings, commands)
        assert isinstance(made, Outcome)
        return made

    def _command(self, task: Task, steps: int) -> Generate:
        return Generate(
            landing=self._payloads[task].landing,
            manifest=self._payloads[task].manifest,
            task=task,
            height=SIDE,
            width=SIDE,
            num_frames=FRAMES,
            num_inference_steps=steps,
            flow_shift=6.0,
            audio_flow_shift=3.0,
            outputs=(OutputTarget(5, self._folder / f"{task}.mp4"),),
        )


def jobs(comm: RankComm, task: TaskHandle, settings: DiffusionRankSettings, commands: list[Generate]) -> Outcome:
    """Load, and make one clip after the other. Runs in ranks."""
    rank = DiffusionRank(comm, settings, task.beater)
    clips = {}
    for command in commands:
        with _latents() as seen, _frames() as written, _events(task) as told:
            rest = rank.handle(command, task)
        if not isinstance(rest, Rest):
            continue
        generated = rest.end()
        assert isinstance(generated, Generated)
        (output,) = generated.outputs
        clips[command.task] = Made((output.frames_sha256, output.audio_sha256), written, *seen, generated, tuple(told))
    return Outcome(clips, rank.facts)


@contextmanager
def _events(task: TaskHandle) -> Iterator[list[bool]]:
    """Which steps were skipped, in their order."""
    seen: list[bool] = []
    report = task.report

    def heard(event: object) -> None:
        if isinstance(event, StepDone):
            seen.append(event.skipped)
        report(event)

    task.report = heard  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        task.report = report  # type: ignore[method-assign]


@contextmanager
def _latents() -> Iterator[list[torch.Tensor]]:
    """What the denoising loop returns meanwhile."""
    seen: list[torch.Tensor] = []
    run = Denoiser.run

    def recorded(self: Denoiser, *arguments: Any, **named: Any) -> Any:
        made = run(self, *arguments, **named)
        seen[:] = made[:2]
        return made

    Denoiser.run = recorded  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Denoiser.run = run  # type: ignore[method-assign]


@contextmanager
def _frames() -> Iterator[list[NDArray[np.uint8]]]:
    """What is written into clips meanwhile."""
    seen: list[NDArray[np.uint8]] = []
    write = ClipWriter.write_frames

    def recorded(self: ClipWriter, frames: NDArray[np.uint8]) -> None:
        seen.append(frames.copy())
        write(self, frames)

    ClipWriter.write_frames = recorded  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        ClipWriter.write_frames = write  # type: ignore[method-assign]


def plan(tp: int = 1, ulysses: int = 1) -> dict[str, object]:
    """Keys of a stage for so many ranks."""
    devices = ",".join(["cpu"] * tp * ulysses)
    return {"devices": devices, "tensor_parallel_size": tp, "ulysses_degree": ulysses}
