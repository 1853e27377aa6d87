"""A rank without a model, for the transport's benchmark: it holds payloads of any size as an encoder's leader does,
and takes them off a slab as diffusion ranks do. Torch.
"""

import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from encoder_service.commands import Drop, Encode, Encoded, Probe, Push, Tidy
from encoder_service.outbox import Outbox
from shared_runtime.conditioning.packing import Packed
from shared_runtime.device_memory import flat_bytes, from_bytes
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import RankFacts
from shared_runtime.ranks.worker import Beater, TaskHandle, rank_main
from shared_runtime.transport.shm import ShmSender, SlabReader
from shared_schema.encode import ShmLanding
from shared_schema.encoder_output import AUDIO, LAYOUT, ROLES, TEXT, VISUAL, Manifest
from shared_schema.layout import Layout
from shared_schema.tasks import Task

TEXT_DIM = 5120
T2VA = Layout(Task.T2VA, 768, 1344, 124)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankSettings:
    """Where landings lie."""

    slab_folder: Path


@dataclass(frozen=True)
class Take:
    """Have a landing's bytes on every rank, `turns` times; answers with the leader's seconds of each."""

    landing: ShmLanding
    broadcast: bool
    """One reads and broadcasts; else all read."""
    turns: int


class BareRank:
    """The transport's part of both kinds of rank."""

    def __init__(self, comm: RankComm, settings: RankSettings) -> None:
        self._comm = comm
        self._outbox = Outbox(ShmSender(settings.slab_folder), None)
        self._reader = SlabReader(settings.slab_folder)
        self.facts = RankFacts(device="cpu", weight_bytes=0, load_format="dummy")

    def handle(self, command: object, task: TaskHandle) -> object:
        """Do one command."""
        match command:
            case Encode(encoding_id, request):
                return Encoded(self._outbox.keep(encoding_id, payload_of(int(request.prompt))), (), {})
            case Push(encoding_id, landing):
                return self._outbox.push(encoding_id, landing)
            case Probe(landing, nbytes):
                return self._outbox.probe(landing, nbytes)
            case Drop(encoding_id):
                self._outbox.drop(encoding_id)
            case Tidy():
                self._outbox.tidy()
            case Take(landing, broadcast, turns):
                return [self._take(landing, broadcast=broadcast) for _ in range(turns)]
            case _:
                raise TypeError(f"a bare rank does not know {type(command).__name__}")
        return None

    def _take(self, landing: ShmLanding, *, broadcast: bool) -> float:
        self._comm.any(False)
        begun = time.perf_counter()
        if broadcast:
            self._comm.from_leader(lambda: self._read(landing))
        else:
            self._read(landing)
        self._comm.agree(None)
        return time.perf_counter() - begun

    def _read(self, landing: ShmLanding) -> torch.Tensor:
        return from_bytes(self._reader.view(landing), torch.uint8, (landing.length,), CPU)


def payload_of(nbytes: int) -> Packed:
    """A legal t2va payload of about that many bytes, all of it text."""
    tokens = max(1, nbytes // (TEXT_DIM * 2 + 8))
    manifest = Manifest.plan({TEXT: (tokens, TEXT_DIM), ROLES: (tokens,), VISUAL: (0,), AUDIO: (0,)}, T2VA)
    raw = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    text, layout = manifest.slot(TEXT), manifest.slot(LAYOUT)
    raw[text.offset : text.offset + text.nbytes] = flat_bytes(torch.randn(tokens, TEXT_DIM, dtype=torch.bfloat16))
    raw[layout.offset : layout.offset + layout.nbytes] = flat_bytes(torch.tensor(manifest.layout))
    return Packed(manifest, raw)


def build(comm: RankComm, settings: object, beater: Beater) -> BareRank:
    """See `shared_runtime.ranks.worker.BuildService`."""
    assert isinstance(settings, RankSettings)
    return BareRank(comm, settings)


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    """Entry of the rank process."""
    rank_main(build, spec, settings, end)
