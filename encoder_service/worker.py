"""What runs in an encoder rank: load the three encoders, then encode, push and forget. Torch."""

import logging
import socket
from dataclasses import dataclass

import torch

from encoder_service.commands import (
    CountTokens,
    Drop,
    Encode,
    Encoded,
    EncoderFacts,
    EncoderRankSettings,
    Probe,
    Push,
    Pushed,
    Tidy,
)
from encoder_service.parallel import TEXT_PLAN
from encoder_service.pipeline import EncodedRequest, EncoderPipeline
from shared_runtime.conditioning.latents import MediaEncoder
from shared_runtime.logs import set_up_logging
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.worker import Beater, TaskHandle, rank_main
from shared_runtime.sharding import Sharding
from shared_runtime.transport.codec import check_values, checksum
from shared_runtime.transport.inline import to_safetensors
from shared_runtime.transport.nixl_sender import NixlSender
from shared_runtime.transport.shm import ShmSender
from shared_runtime.weights import load_processor, load_text_encoder, load_tokenizer, weight_bytes
from shared_schema.encode import InlineLanding, Landing, NixlLanding, PushReceipt, ShmLanding
from shared_schema.encoder_output import EncoderOutput
from shared_schema.errors import LeaseExpired, TransportError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Waiting:
    """A payload that nobody has pushed yet."""

    payload: EncoderOutput
    checksum: str


class EncoderRank:
    """The commands of the encoder service, on one rank."""

    def __init__(self, comm: RankComm, settings: EncoderRankSettings, beater: Beater) -> None:
        self._comm = comm
        self._device = comm.device
        path = settings.checkpoint
        text_encoder = load_text_encoder(path, comm.device, Sharding(TEXT_PLAN, comm), dummy=settings.stage.dummy)
        beater.beat()
        media_encoder = _media_encoder(settings, comm, beater)
        self._tokenizer = load_tokenizer(path)
        components = {
            "text_encoder": text_encoder,
            "tokenizer": self._tokenizer,
            "processor": load_processor(path),
        }
        self._pipeline = EncoderPipeline(path, components, media_encoder, comm)
        nixl, sends = settings.nixl, comm.is_leader
        self._shm = ShmSender(settings.slab_folder) if nixl is None else None
        self._nixl = NixlSender.start(nixl) if nixl is not None and sends else None
        self._waiting: dict[str, _Waiting] = {}
        self._load_format = settings.stage.load_format
        self._weight_bytes = weight_bytes(text_encoder)
        if media_encoder is not None:
            self._weight_bytes += media_encoder.weight_bytes

    @property
    def facts(self) -> EncoderFacts:
        """What this rank holds."""
        return EncoderFacts(
            device=str(self._device),
            torch=str(torch.__version__),
            weight_bytes=self._weight_bytes,
            load_format=self._load_format,
        )

    def handle(self, command: object, task: TaskHandle) -> object:
        """Do one command; see `encoder_service.commands`."""
        match command:
            case Encode():
                return self._encode(command, task)
            case Push(encoding_id, landing):
                return self._push(encoding_id, landing)
            case Drop(encoding_id):
                self._waiting.pop(encoding_id, None)
                return None
            case Probe(landing, nbytes):
                return self._probe(landing, nbytes)
            case Tidy():
                for sender in (self._shm, self._nixl):
                    if sender is not None:
                        sender.forget_removed()
                return None
            case CountTokens(prompt):
                return len(self._tokenizer(prompt, add_special_tokens=False)["input_ids"])
            case _:
                raise TypeError(f"an encoder rank does not know {type(command).__name__}")

    def _encode(self, command: Encode, task: TaskHandle) -> Encoded:
        encoded = self._pipeline.encode(command.request, command.files, task.step, task.beat)
        return self._comm.from_leader(lambda: self._keep(command.encoding_id, encoded))

    def _keep(self, encoding_id: str, encoded: EncodedRequest | None) -> Encoded:
        assert encoded is not None
        check_values(encoded.payload)
        # Made here and not while pushing: the push is then one memcpy at its full rate.
        self._waiting[encoding_id] = _Waiting(encoded.payload, checksum(encoded.payload.data))
        return Encoded(encoded.payload.manifest, encoded.references, encoded.timings)

    def _push(self, encoding_id: str, landing: Landing) -> Pushed | None:
        if not self._comm.is_leader:
            return None
        waiting = self._waiting.get(encoding_id)
        if waiting is None:
            raise LeaseExpired(f"encoding {encoding_id} is not here: it was pushed, dropped, or lapsed")
        pushed = self._deliver(landing, waiting)
        self._waiting.pop(encoding_id, None)
        return pushed

    def _deliver(self, landing: Landing, waiting: _Waiting) -> Pushed:
        match landing:
            case ShmLanding() | NixlLanding():
                return Pushed(self._send(landing, waiting.payload.data, waiting.checksum))
            case InlineLanding():
                blob = to_safetensors(waiting.payload)
                receipt = PushReceipt(bytes=len(blob), checksum=checksum(memoryview(blob)), seconds=0.0)
                return Pushed(receipt, blob)

    def _send(self, landing: ShmLanding | NixlLanding, data: memoryview, known: str | None) -> PushReceipt:
        """By the sender of the connector, and no other."""
        if isinstance(landing, NixlLanding) and self._nixl is not None:
            return self._nixl.push_bytes(landing, data, checksum=known)
        if isinstance(landing, ShmLanding) and self._shm is not None:
            return self._shm.push_bytes(landing, data, checksum=known)
        ours = "SharedMemoryConnector" if self._shm is not None else "NixlConnector"
        raise TransportError(f"a landing of kind {landing.kind} was given to an encoder that sends over {ours}")

    def _probe(self, landing: Landing, nbytes: int) -> Pushed | None:
        if not self._comm.is_leader:
            return None
        pattern = _pattern(nbytes).numpy().data
        match landing:
            case ShmLanding() | NixlLanding():
                return Pushed(self._send(landing, pattern, None))
            case InlineLanding():
                receipt = PushReceipt(bytes=nbytes, checksum=checksum(pattern), seconds=0.0)
                return Pushed(receipt, bytes(pattern))


def _pattern(nbytes: int) -> torch.Tensor:
    """Bytes that repeat nowhere near a page, so that a shifted or partial write shows."""
    return (torch.arange(nbytes, dtype=torch.int64) * 2_654_435_761 >> 7).to(torch.uint8)


def _media_encoder(settings: EncoderRankSettings, comm: RankComm, beater: Beater) -> MediaEncoder | None:
    if settings.text_only:
        return None
    roles = settings.stage.components
    assert roles is not None
    assert roles.video_vae is not None
    return MediaEncoder.load(
        settings.checkpoint, comm, roles.video_vae.parallel_mode, beater.beat, dummy=settings.stage.dummy
    )


def build(comm: RankComm, settings: object, beater: Beater) -> EncoderRank:
    """Load an encoder rank; see `shared_runtime.ranks.worker.BuildService`."""
    assert isinstance(settings, EncoderRankSettings)
    set_up_logging(settings.log_level, comm.spec.name)
    return EncoderRank(comm, settings, beater)


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    """Entry of the rank process, named by `encoder_service.app`."""
    rank_main(build, spec, settings, end)
