"""Diffusers' VAE blocks on whatever ranks there are: runs in the ranks of `tests.ranks`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers.modular_pipelines import PipelineState
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3KeyframeVaeEncoderStep,
    MiniMaxH3Ref2VAReferenceEncoderStep,
)
from PIL import Image

from shared_runtime.conditioning.blocks import assemble, run_block
from shared_runtime.conditioning.taken import TakenPicturesBlock, TakenReference, sounds_of
from shared_runtime.conditioning.tile_runner import BatchedTiles
from shared_runtime.conditioning.vae_tiles import Mode, visual_encoder
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.worker import TaskHandle
from shared_runtime.weights import load_audio_vae, load_video_vae
from shared_schema.deploy.model import EncodePrecision


@dataclass(frozen=True)
class Medium:
    """A picture (one frame), a clip, or a sound (no frames). Pixels."""

    height: int = 0
    width: int = 0
    frames: int = 1
    sound: bool = False


@dataclass(frozen=True)
class Request:
    """What is encoded, and how."""

    media: tuple[Medium, ...]
    keyframes: bool = False
    tile: int | None = None
    """Pixels; overlaps are a quarter. None: as released."""
    mode: Mode = "patch"
    precision: EncodePrecision | None = None
    """Batches of tiles, as on a GPU; None: diffusers' own modules."""


@dataclass(frozen=True)
class Encoded:
    """What the leader's state holds, and what every rank did."""

    visual: list[torch.Tensor]
    audio: list[torch.Tensor]
    beats: list[int]
    """By rank."""
    sounds: list[int]
    """How often each rank encoded sound."""
    agree: bool
    """Whether every rank's state is the leader's."""


def encode(comm: RankComm, _task: TaskHandle, path: Path, request: Request) -> Encoded:
    """Twice, for what the first time leaves behind must not show in the second."""
    vae = load_video_vae(path, "encoder", "cpu") if comm.is_leader or request.mode == "patch" else None
    if vae is not None and request.tile is not None:
        vae.enable_tiling(request.tile, request.tile, request.tile // 4, request.tile // 4)
    audio_vae = load_audio_vae(path, "encoder", "cpu")
    sounds = 0

    def heard(*_: Any) -> None:
        nonlocal sounds
        sounds += 1

    audio_vae.encoder.register_forward_hook(heard)
    block = MiniMaxH3KeyframeVaeEncoderStep() if request.keyframes else TakenPicturesBlock()
    listening = MiniMaxH3Ref2VAReferenceEncoderStep()
    batched = None
    if vae is not None and request.precision is not None:
        batched = BatchedTiles(vae, request.precision, compiler=None)
    encoder = visual_encoder(vae, comm, request.mode, batched)
    components = {"vae": encoder.vae} if request.keyframes else {"vae": encoder.vae, "audio_vae": audio_vae}
    pipeline = assemble(path, {"block": block, "listening": listening}, components, comm.device)
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1

    encoder.run(block, pipeline, state_of(Request((Medium(64, 64),), request.keyframes)), lambda: None)
    state = state_of(request)
    encoder.run(block, pipeline, state, beat)
    waveforms = PipelineState()
    waveforms.set("normalized_references", sounds_of(state.get("normalized_references") or ()))
    if not request.keyframes:
        run_block(listening, pipeline, waveforms)
    visual, audio = state.get("condition_latents"), waveforms.get("audio_condition_latents") or []
    told = everybody(comm, (beats, sounds, [each.double().sum().item() for each in (*visual, *audio)]))
    agree = all(sums == told[0][2] for _, _, sums in told)
    return Encoded(visual, audio, [each[0] for each in told], [each[1] for each in told], agree)


def state_of(request: Request) -> PipelineState:
    random = np.random.default_rng(7)
    state = PipelineState()
    made = [_medium(medium, random) for medium in request.media]
    if request.keyframes:
        state.set("keyframes", [Image.fromarray(each.pixels[0, :, 0].permute(1, 2, 0).numpy()) for each in made])
    else:
        state.set("normalized_references", made)
    return state


def _medium(medium: Medium, random: np.random.Generator) -> Any:
    waveform = torch.from_numpy(random.uniform(-0.5, 0.5, (2, 8000)).astype(np.float32))
    if medium.frames == 0:
        return TakenReference("audio", waveform, None, None)
    pixels = random.integers(0, 256, (medium.frames, medium.height, medium.width, 3), dtype=np.uint8)
    on_device = torch.from_numpy(pixels).permute(3, 0, 1, 2)[None]
    if medium.frames == 1:
        return TakenReference("image", None, None, on_device)
    return TakenReference("video", waveform if medium.sound else None, None, on_device)


def everybody(comm: RankComm, mine: Any) -> list[Any]:
    """What every rank says, by rank."""
    told = [mine] * comm.world_size
    if comm.world_size > 1:
        dist.all_gather_object(told, mine, group=comm.world)
    return told
