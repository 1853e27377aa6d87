"""The cells of `benchmarks.topologies` that need a rank group and no services: which measurements, in which order."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.topology_ranks import Decode, EncodeOnce, Figures, Forward, Links, Settings, name_of
from diffusion_service.mux import samples_for_frames
from encoder_service.commands import EncoderRankSettings
from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.mesh import Mesh, rank_specs
from shared_schema.deploy.load import load_deployment
from shared_schema.deploy.model import Deployment
from shared_schema.encode import EncodeRequest, ReferenceInput
from shared_schema.tasks import Task
from video_client.samples import landscape
from video_client.scenes import write_clip

LIMITS = GroupLimits(stuck_s=300, dead_s=120, load_s=300)
ENTRY = "benchmarks.topology_ranks:main"
VIDEO_FRAMES = 124
PROMPT = "a lighthouse at dusk, waves against the rocks, a gull calls twice"

Tell = Callable[[str, dict[str, Any]], None]
"""Says what one measurement found, as soon as it is there."""


@dataclass(frozen=True)
class Plan:
    """What a cell runs with."""

    folder: Path
    """The model: configs of the released sizes, or the tiny checkpoint."""
    scratch: Path
    devices: int
    tiny: bool
    long: bool
    """Also what takes a minute on one GPU."""

    @property
    def layers(self) -> int:
        """Of the transformer."""
        return 2 if self.tiny else 50

    def case(self, frames: int) -> str:
        """A forward on the largest canvas."""
        return f"64x96x{frames}:{self.layers}" if self.tiny else f"768x1344x{frames}:{self.layers}"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a clip."""
        return (64, 96) if self.tiny else (768, 1344)


@asynccontextmanager
async def group_of(plan: Plan, ranks: int) -> AsyncIterator[ProcessGroup]:
    """That many ranks, ready."""
    devices = tuple("cpu" if plan.tiny else str(index) for index in range(ranks))
    settings = Settings(plan.folder, plan.scratch, _deployment(plan).diffusion)
    group = ProcessGroup(rank_specs("bench", Mesh(ulysses=ranks), devices), ENTRY, settings, LIMITS)
    supervising = asyncio.create_task(group.supervise())
    ready = asyncio.create_task(group.until_ready())
    try:
        await asyncio.wait([supervising, ready], return_when=asyncio.FIRST_COMPLETED)
        if supervising.done():
            await supervising
        yield group
    finally:
        ready.cancel()
        supervising.cancel()
        await asyncio.wait([supervising])


async def run(group: ProcessGroup, command: object) -> dict[str, Any]:
    """One measurement."""
    figures = await group.run(command)
    assert isinstance(figures, Figures)
    return figures.values


async def links(plan: Plan, tell: Tell) -> None:
    """Bare collectives of the sizes that a forward has."""
    async with group_of(plan, plan.devices) as group:
        for mib in (1, 4) if plan.tiny else (1, 128, 780):
            tell(f"{mib} MiB a rank", await run(group, Links(mib << 20)))


async def _forwards(plan: Plan, tell: Tell, commands: Iterable[Forward]) -> None:
    async with group_of(plan, plan.devices) as group:
        for command in commands:
            if command.mesh.world_size <= plan.devices:
                figures = await run(group, command)
                how = ", eager" if command.eager else ""
                tell(f"{name_of(command.mesh)}, {command.case}{how}", figures)


async def dit(plan: Plan, tell: Tell) -> None:
    """One GPU, Ulysses 4 and 2 over one set of weights."""
    short, long = plan.case(124), plan.case(362)
    meshes = [Mesh(), Mesh(ulysses=4), Mesh(ulysses=2)]
    commands = [Forward(mesh, short, 3, profiled=mesh.world_size > 1) for mesh in meshes]
    commands.append(Forward(Mesh(ulysses=4), long, 2))
    if plan.long:
        commands.append(Forward(Mesh(), long, 1))
    await _forwards(plan, tell, commands)


async def eager(plan: Plan, tell: Tell) -> None:
    """Ulysses 4 without a compiler: what is left if compiling fails, and what compiling brings."""
    await _forwards(plan, tell, [Forward(Mesh(ulysses=4), plan.case(124), 3, profiled=True, eager=True)])


async def tensor(plan: Plan, tell: Tell) -> None:
    """Tensor parallelism, alone and with Ulysses; every mesh has weights of its own."""
    meshes = [Mesh(tp=2, ulysses=2), Mesh(tp=4), Mesh(tp=2)]
    await _forwards(plan, tell, [Forward(mesh, plan.case(124), 2, profiled=True) for mesh in meshes])


async def decode(plan: Plan, tell: Tell) -> None:
    """The video decoder's tiles on 1, 2 and 4 ranks."""
    height, width = plan.size
    frames = 39 if plan.tiny else 124
    async with group_of(plan, plan.devices) as group:
        for ranks in (1, 2, 4):
            if ranks <= plan.devices:
                tell(f"{ranks} ranks, {frames} frames", await run(group, Decode(ranks, height, width, frames, 3)))


async def encoder(plan: Plan, tell: Tell) -> None:
    """A short prompt, two keyframes, and a video with sound, on one rank and on two."""
    height, width = plan.size
    requests = {
        "t2va": EncodeRequest(
            request_id="1" * 32, task=Task.T2VA, prompt=PROMPT, height=height, width=width, num_frames=124
        ),
        "fl2va": EncodeRequest(
            request_id="2" * 32,
            task=Task.FL2VA,
            prompt=PROMPT,
            height=height,
            width=width,
            num_frames=124,
            keyframes=(0, -1),
            references=(ReferenceInput(kind="image"), ReferenceInput(kind="image")),
        ),
        "ref2va": EncodeRequest(
            request_id="3" * 32,
            task=Task.REF2VA,
            prompt=PROMPT,
            height=height,
            width=width,
            num_frames=124,
            references=(ReferenceInput(kind="video"),),
        ),
    }
    files = {"t2va": (), "fl2va": tuple(_picture(plan, sun) for sun in (0.2, 0.8)), "ref2va": (_video(plan),)}
    async with group_of(plan, 2) as group:
        for ranks in (1, 2):
            for name, request in requests.items():
                settings = _encoder_settings(plan, ranks)
                repeats = 1 if name == "ref2va" else 3
                figures = await run(group, EncodeOnce(name, settings, request, files[name], repeats))
                tell(f"tp{ranks}, {name}", figures)


def _picture(plan: Plan, sun: float) -> Path:
    height, width = plan.size
    path = plan.scratch / f"key_{sun}.png"
    Image.fromarray(landscape(width, height, sun=sun)).save(path)
    return path


def _video(plan: Plan) -> Path:
    height, width = plan.size
    pictures = np.broadcast_to(landscape(width, height, sun=0.5), (VIDEO_FRAMES, height, width, 3))
    waveform = np.zeros((2, samples_for_frames(VIDEO_FRAMES)), np.float32)
    return write_clip(plan.scratch / "reference.mp4", np.ascontiguousarray(pictures), waveform)


def _encoder_settings(plan: Plan, ranks: int) -> EncoderRankSettings:
    """The preset's encoder, on so many ranks."""
    devices = ",".join("cpu" if plan.tiny else str(index) for index in range(ranks))
    stage = _deployment(plan, {"0": {"devices": devices, "tensor_parallel_size": ranks}}).encoder
    return EncoderRankSettings(plan.folder, stage, False, plan.scratch, None, "info", "text")


def _deployment(plan: Plan, overrides: dict[str, dict[str, Any]] | None = None) -> Deployment:
    """A preset, with made-up weights unless they are tiny."""
    if plan.tiny:
        return load_deployment("tiny", json.dumps(overrides or {}))
    made_up = {stage: {"load_format": "dummy", **(overrides or {}).get(stage, {})} for stage in ("0", "1")}
    return load_deployment("minimax_h3_disaggregated", json.dumps(made_up))
