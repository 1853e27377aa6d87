"""One decode on whatever ranks there are: runs in the ranks of `tests.ranks`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diffusion_service.parallel.vae_tiles import video_decoder
from diffusion_service.sampling.decode import Chunks
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.worker import TaskHandle
from shared_runtime.weights import load_video_vae
from shared_schema.deploy.model import Precision
from shared_schema.errors import JobFailed

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Clip:
    """Latents and how they are decoded."""

    height: int
    width: int
    """Of the latents."""
    frames: int
    tile: int | None = None
    """Pixels; overlaps are a quarter. None: as released."""
    precision: Precision = "fp32"
    patch: bool = True

    @property
    def latent_frames(self) -> int:
        return (self.frames - 5) // 17 * 5 + 2

    def latents(self) -> torch.Tensor:
        random = torch.Generator().manual_seed(self.height * 1000 + self.width)
        return torch.rand(1, 24, self.latent_frames, self.height, self.width, generator=random) * 4 - 2


@dataclass(frozen=True)
class Decoded:
    """What the leader was given, and what every rank did."""

    frames: torch.Tensor
    lengths: list[int]
    beats: list[int]
    """By rank."""
    yields: list[int]
    """By rank."""


def decode(comm: RankComm, task: TaskHandle, path: Path, clip: Clip) -> Decoded:
    return _decode(comm, task, load(path, clip), clip)


def decode_again(comm: RankComm, task: TaskHandle, path: Path, clip: Clip) -> Decoded:
    """After a decode that was given up at its second piece."""
    vae = load(path, clip)
    for _, _ in zip(range(2), stream(comm, vae, clip, task.beat), strict=False):
        task.go_on()
    return _decode(comm, task, vae, clip)


def decode_reference(_comm: RankComm, _task: TaskHandle, path: Path, clip: Clip) -> torch.Tensor:
    """Diffusers' own decode, to `(n, height, width, 3)` uint8."""
    vae = load(path, clip)
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))
    with torch.autocast("cpu", torch.float16, enabled=clip.precision == "fp16"):
        decoded = vae.decode(clip.latents() * std + mean, return_dict=False)[0].float()
    pixel_mean, pixel_std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (MEAN, STD))
    scaled: torch.Tensor = ((decoded * pixel_std + pixel_mean).clamp(0, 1) * 255).round().to(torch.uint8)
    return scaled[0].permute(1, 2, 3, 0).contiguous()


def poison(comm: RankComm, task: TaskHandle, path: Path, clip: Clip, rank: int) -> list[str]:
    """A pixel that is no number, made on one rank; what every rank raised."""
    vae = load(path, clip)
    if comm.spec.rank == rank:
        vae.decoder.register_forward_hook(_spoil)
    raised = "nothing"
    try:
        for _ in stream(comm, vae, clip, task.beat):
            task.go_on()
    except JobFailed as error:
        raised = error.code
    return everybody(comm, raised)


def _spoil(_decoder: torch.nn.Module, _args: Any, pixels: torch.Tensor) -> torch.Tensor:
    return pixels.index_fill(3, torch.tensor(40), torch.nan)


def _decode(comm: RankComm, task: TaskHandle, vae: Any, clip: Clip) -> Decoded:
    beats, yields = 0, 0
    frames: list[torch.Tensor] = []

    def beat() -> None:
        nonlocal beats
        beats += 1

    for made in stream(comm, vae, clip, beat):
        assert (made is not None) == comm.is_leader
        frames += [] if made is None else [made]
        yields += 1
        task.go_on()
    everyone = everybody(comm, (beats, yields))
    whole = torch.cat(frames) if frames else torch.empty(0)
    return Decoded(whole, [len(each) for each in frames], [b for b, _ in everyone], [y for _, y in everyone])


def stream(comm: RankComm, vae: Any, clip: Clip, beat: Callable[[], None]) -> Any:
    needed = comm.is_leader or clip.patch
    chunks = Chunks(vae, MEAN, STD, clip.precision) if needed else None
    decoder = video_decoder(chunks, comm, comm.world_size if clip.patch else 1)
    return decoder.decode(clip.latents(), clip.frames, beat)


def load(path: Path, clip: Clip) -> Any:
    vae = load_video_vae(path, "decoder", "cpu")
    if clip.tile is not None:
        vae.enable_tiling(clip.tile, clip.tile, clip.tile // 4, clip.tile // 4)
    return vae


def everybody(comm: RankComm, mine: Any) -> list[Any]:
    """What every rank says, by rank."""
    told = [mine] * comm.world_size
    if comm.world_size > 1:
        dist.all_gather_object(told, mine, group=comm.world)
    return told
