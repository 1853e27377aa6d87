"""A request's sounds on whatever ranks there are: runs in the ranks of `tests.ranks`."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from shared_runtime.conditioning.audio_vae import LeaderAudioVae
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.worker import TaskHandle
from shared_runtime.weights import load_audio_vae
from tests.shared_runtime.conditioning.encoding import everybody


@dataclass(frozen=True)
class Heard:
    """What the leader returns."""

    latents: list[torch.Tensor]
    before: list[int]
    """Sounds that each rank had encoded when it had only begun."""
    after: list[int]
    agree: bool


def hear(comm: RankComm, _task: TaskHandle, path: Path, begun: int, asked: int) -> Heard:
    """Begin some sounds, then ask for some, once more after a request that nobody asked anything of."""
    vae = load_audio_vae(path, "encoder", "cpu") if comm.is_leader else None
    count = 0

    def heard(*_: object) -> None:
        nonlocal count
        count += 1

    if vae is not None:
        vae.encoder.register_forward_hook(heard)
    sounds = LeaderAudioVae(vae, comm)
    waveforms = tones()
    with sounds.begun(waveforms[::-1]):
        count = 0
    with sounds.begun(waveforms[:begun]):
        before = everybody(comm, count)
        latents = [sounds.encode(each, return_dict=False)[0].mode() for each in waveforms[:asked]]
    told = everybody(comm, [each.double().sum().item() for each in latents])
    return Heard(latents, before, everybody(comm, count), all(each == told[0] for each in told))


def tones() -> list[torch.Tensor]:
    """Three sounds of a quarter of a second, low to high, `(2, 1, 8000)` each."""
    return [torch.sin(torch.arange(8000.0) * (number + 1) / 50).expand(2, 1, -1) for number in range(3)]


def hear_after_a_failure(comm: RankComm, _task: TaskHandle, path: Path, fails_at: int) -> list[torch.Tensor]:
    """The latents of the last of three sounds, as asked for after a failure and as asked for before anything.

    Of the sounds that were begun the one at `fails_at` raises; past the last one, what is done beside them does.
    """
    vae = load_audio_vae(path, "encoder", "cpu")
    sounds, waveforms = LeaderAudioVae(vae, comm), tones()
    alone = sounds.encode(waveforms[2])[0].mode()
    left = fails_at

    def fail(*_: object) -> None:
        nonlocal left
        if left == 0:
            raise torch.OutOfMemoryError("no room")
        left -= 1

    hook = vae.encoder.register_forward_hook(fail)
    with suppress(torch.OutOfMemoryError), sounds.begun(waveforms):
        raise torch.OutOfMemoryError("no room for the pictures")
    hook.remove()
    return [sounds.encode(waveforms[2])[0].mode(), alone]
