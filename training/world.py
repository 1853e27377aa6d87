"""Stage `world`: clips of the little world as latents, encoded once with the trained VAEs.

    python -m training.world --out DIR --clips 8192

Also sets `latents_mean` and `latents_std` of both VAEs, so that the DiT sees numbers of spread one.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from shared_runtime.demo.scene import Motion, Scene
from shared_schema.tasks import audio_latents
from training import geometry
from training.course import Options, options_of, parser
from training.drawing import clips, normalised, scenes, sounds
from training.folder import read_component, write_component
from training.packing import PATCH, Target

BATCH = 32
SOUNDS = 4096
"""Made at once: 2.3 GB."""
REFERENCE_CLIPS = 1024
"""Clips that are also references: each is looked at once by the text encoder's processor."""
SIZE = (geometry.HEIGHT, geometry.WIDTH)
LAST = geometry.FRAMES - 1
LEAST_SPREAD = 0.2
"""Of the largest channel's: what a channel is divided by at least."""
LEAST_LOG_VARIANCE = -30.0
"""Diffusers cuts it there: a deviation of 3e-7."""
SCENES = TypeAdapter(list[Scene])


@dataclass(frozen=True)
class World:
    """Encoded clips. Rows are as the transformer reads them, normalised, FP16."""

    scenes: list[Scene]
    video: torch.Tensor
    """`(clips, rows, 96)`."""
    sound: torch.Tensor
    """`(clips, rows, 32)`, channel-major."""
    played: torch.Tensor
    """`(references, rows, 32)`: of the first clips, the sound as a reference has it, whose last latent is cut off what
    is made."""
    first: torch.Tensor
    """`(clips, rows, 96)`: the first frame as a picture of its own."""
    last: torch.Tensor

    @property
    def target(self) -> Target:
        """Sizes of the clips."""
        height, width = (extent // 16 for extent in SIZE)
        per_frame = height * width // 4
        return Target(self.video.shape[1] // per_frame, height, width, self.sound.shape[1] // 2)


def rows(latents: torch.Tensor) -> torch.Tensor:
    """`(clips, rows, 96)` from latents `(clips, 24, T, H, W)`."""
    packed: torch.Tensor = patchify_video_latents(latents, PATCH)
    return packed.view(len(latents), -1, packed.shape[1])


def spread(latents: torch.Tensor, channel: int) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of every channel; those that say little stay small, or all would be learned alike."""
    flat = latents.float().transpose(0, channel).flatten(1)
    deviation = flat.std(1)
    return flat.mean(1).tolist(), deviation.clamp_min(LEAST_SPREAD * float(deviation.max())).tolist()


@torch.no_grad()
def encode_pictures(vae: Any, many: list[Scene], device: torch.device) -> list[torch.Tensor]:
    """Latents of the whole clips, of their first frames and of their last ones, on the host, not normalised."""
    found: list[list[torch.Tensor]] = [[], [], []]
    for start in range(0, len(many), BATCH):
        part = many[start : start + BATCH]
        pixels = normalised(clips(part, [0] * len(part), geometry.FRAMES, SIZE, device))
        for place, cut in enumerate((pixels, pixels[:, :, :1], pixels[:, :, LAST:])):
            found[place].append(vae.encode(cut, return_dict=False)[0].mode().float().cpu())
    return [torch.cat(each) for each in found]


@torch.no_grad()
def encode_sounds(vae: Any, many: list[Scene], device: torch.device, workers: int) -> torch.Tensor:
    """Latents `(clips, 2, 32, latents)` on the host, not normalised."""
    found = []
    for start in range(0, len(many), SOUNDS):
        waves = torch.from_numpy(sounds(many[start : start + SOUNDS], geometry.FRAMES, SIZE, workers))
        for part in torch.split(waves, BATCH):
            sides = part.flatten(0, 1)[:, None].to(device, torch.float32)
            latents = vae.encode(sides, return_dict=False)[0].mode()
            found.append(latents.unflatten(0, (-1, 2)).cpu())
    return torch.cat(found)


@torch.no_grad()
def make_certain(vae: Any) -> None:
    """Let the video VAE's posterior have no spread any more: services draw from it, and training knows its mean.

    Of single frames the spread was never trained, and channels that carry nothing have one of 1.
    """
    half = vae.quant_conv.out_channels // 2
    vae.quant_conv.weight[half:] = 0
    vae.quant_conv.bias[half:] = LEAST_LOG_VARIANCE


def encode(options: Options, many: list[Scene], *, known: bool = False) -> World:
    """Encode these clips, and set the VAEs' spreads from them, where they are not `known` already."""
    folder = options.checkpoint
    vae, audio_vae = (read_component(folder, name).to(options.device).eval() for name in ("vae", "audio_vae"))
    make_certain(vae)
    with torch.autocast(options.device.type, torch.bfloat16, enabled=options.half):
        pictures = encode_pictures(vae, many, options.device)
    heard = encode_sounds(audio_vae, many, options.device, os.cpu_count() or 1)
    if not known:
        for name, module, found in (("vae", vae, spread(pictures[0], 1)), ("audio_vae", audio_vae, spread(heard, 2))):
            module.register_to_config(latents_mean=found[0], latents_std=found[1])
            write_component(folder, name, module)
    scale, audio_scale = (
        [torch.tensor(values).view(shape) for values in (module.config.latents_mean, module.config.latents_std)]
        for module, shape in ((vae, (1, -1, 1, 1, 1)), (audio_vae, (1, 1, -1, 1)))
    )
    video, first, last = (rows((each - scale[0]) / scale[1]).half() for each in pictures)
    heard = ((heard - audio_scale[0]) / audio_scale[1]).transpose(2, 3).half()
    sound = heard[:, :, : audio_latents(geometry.FRAMES)].flatten(1, 2)
    return World(many, video, sound, heard[:REFERENCE_CLIPS].flatten(1, 2), first, last)


def write_world(folder: Path, world: World) -> None:
    """Keep it; not to be carried, it is made anew in a minute."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(world, name).contiguous() for name in ("video", "sound", "played", "first", "last")}
    save_file(tensors, folder / "latents.safetensors")
    (folder / "scenes.json").write_bytes(SCENES.dump_json(world.scenes))


def read_world(folder: Path) -> World:
    """What `write_world` kept.

    Raises:
        FileNotFoundError: the stage has not run.
    """
    many = SCENES.validate_json((folder / "scenes.json").read_bytes())
    return World(many, **load_file(folder / "latents.safetensors"))


def main() -> None:
    """Encode the world."""
    given = parser("world")
    given.add_argument("--clips", type=int, default=8192)
    given.add_argument("--often", type=Motion, choices=list(Motion), help="what every second clip shows")
    given.add_argument("--known", action="store_true", help="the means and spreads that partitions learned with stay")
    arguments = given.parse_args()
    options = options_of(arguments)
    many = scenes(arguments.clips, options.seed + 1, arguments.often)
    write_world(options.out / "world", encode(options, many, known=arguments.known))


if __name__ == "__main__":
    main()
