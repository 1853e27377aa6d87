"""Flow matching as the released scheduler has it: velocities point to the data, time 1 is clean. Torch."""

from dataclasses import dataclass, replace

import torch

from training.folder import AUDIO_SHIFT, VIDEO_SHIFT
from training.packing import ANCHORED, CLEAN, Batch, Layout

POINTS = 9
"""Sigma points that the checkpoint is meant for; half of the training is at these very times."""


@dataclass(frozen=True)
class Clips:
    """Clips of one layout, clean. Rows of what is made and of what conditions them."""

    layout: Layout
    text: torch.Tensor
    video: torch.Tensor
    sound: torch.Tensor
    shown: torch.Tensor
    heard: torch.Tensor


@dataclass(frozen=True)
class Moment:
    """How noised the two streams of every clip are: sigmas `(clips, 1, 1)`."""

    video: torch.Tensor
    sound: torch.Tensor


def shifted(part: torch.Tensor, shift: float) -> torch.Tensor:
    """Sigma at a part of the schedule, 1 at its beginning and 0 at its end."""
    return shift * part / (1 + (shift - 1) * part)


def moment(parts: torch.Tensor) -> Moment:
    """Both streams at the same parts `(clips,)` of their schedules, as in sampling."""
    return Moment(*(shifted(parts, shift)[:, None, None] for shift in (VIDEO_SHIFT, AUDIO_SHIFT)))


def draw_parts(clips: int, random: torch.Generator) -> torch.Tensor:
    """Parts of the schedule to learn at: half of them anywhere, half at the times that sampling stops at."""
    anywhere = torch.rand(clips, generator=random).clamp_min(1e-3)
    steps = torch.randint(1, POINTS, (clips,), generator=random) / (POINTS - 1)
    return torch.where(torch.rand(clips, generator=random) < 0.5, anywhere, steps)


def noised(clips: Clips, at: Moment, video_noise: torch.Tensor, sound_noise: torch.Tensor) -> Batch:
    """A batch at that moment; pictures that condition are noised to 0.999, sounds are left clean."""
    video = (1 - at.video) * clips.video + at.video * video_noise
    sound = (1 - at.sound) * clips.sound + at.sound * sound_noise
    return batch_of(clips, at, video, sound)


def batch_of(clips: Clips, at: Moment, video: torch.Tensor, sound: torch.Tensor) -> Batch:
    """A batch with these rows as what is being made."""
    shown = ANCHORED * clips.shown + (1 - ANCHORED) * torch.randn_like(clips.shown)
    times = torch.cat([1 - at.video, 1 - at.sound], dim=1)[..., 0]
    anchored, clean = times[:, :1].clamp_min(ANCHORED), torch.full_like(times[:, :1], CLEAN)
    return Batch(
        clips.layout,
        clips.text,
        torch.cat([shown, video], dim=1),
        torch.cat([clips.heard, sound], dim=1),
        torch.cat([times, anchored, clean], dim=1),
    )


def on(clips: Clips, device: torch.device) -> Clips:
    """The same on a device, in FP32."""
    names = ("text", "video", "sound", "shown", "heard")
    return replace(clips, **{name: getattr(clips, name).to(device, torch.float32) for name in names})
