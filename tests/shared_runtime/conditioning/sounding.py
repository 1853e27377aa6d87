"""A request's sounds on whatever ranks there are: runs in the ranks of `tests.ranks`."""

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
    waveforms = [torch.sin(torch.arange(8000.0) * (number + 1) / 50).expand(2, 1, -1) for number in range(3)]
    sounds.begin(waveforms[::-1])
    count = 0
    sounds.begin(waveforms[:begun])
    before = everybody(comm, count)
    latents = [sounds.encode(each, return_dict=False)[0].mode() for each in waveforms[:asked]]
    told = everybody(comm, [each.double().sum().item() for each in latents])
    return Heard(latents, before, everybody(comm, count), all(each == told[0] for each in told))
