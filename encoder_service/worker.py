"""What runs in an encoder rank: load the three encoders, then encode, push and forget. Torch."""

import logging
import socket

import torch

from encoder_service.commands import (
    CountTokens,
    Drop,
    Encode,
    Encoded,
    EncoderRankSettings,
    Probe,
    Push,
    Tidy,
)
from encoder_service.outbox import Outbox
from encoder_service.parallel import TEXT_PLAN
from encoder_service.pipeline import EncodedRequest, EncoderPipeline
from encoder_service.text import compile_layers, warm_up
from encoder_service.vision import batch_vision
from shared_runtime.compiling import compile_now
from shared_runtime.conditioning.latents import MediaEncoder
from shared_runtime.device_memory import locker_for
from shared_runtime.logs import set_up_logging
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import RankFacts
from shared_runtime.ranks.worker import Beater, TaskHandle, rank_main
from shared_runtime.sharding import Sharding
from shared_runtime.transport.nixl_sender import NixlSender
from shared_runtime.transport.shm import ShmSender
from shared_runtime.weights import load_processor, load_text_encoder, load_tokenizer, weight_bytes
from shared_schema.encode import EncodeProgress

logger = logging.getLogger(__name__)


class EncoderRank:
    """The commands of the encoder service, on one rank."""

    def __init__(self, comm: RankComm, settings: EncoderRankSettings, beater: Beater) -> None:
        self._comm = comm
        self._device = comm.device
        path = settings.checkpoint
        text_encoder = load_text_encoder(path, comm.device, Sharding(TEXT_PLAN, comm), dummy=settings.stage.dummy)
        processor = load_processor(path)
        if comm.device.type == "cuda":
            # A product over more rows may end in other bits: on a CPU the clips are the reference's.
            batch_vision(text_encoder)
        beater.beat()
        if comm.device.type == "cuda" and not settings.stage.enforce_eager:
            compile_layers(text_encoder)
            compile_now("the text encoder", lambda: warm_up(text_encoder, processor), settings.stage, beater.beat)
        media_encoder = _media_encoder(settings, comm, beater)
        if comm.device.type == "cuda":
            # What warming up took goes back: others may share the GPU.
            torch.cuda.empty_cache()
        self._tokenizer = load_tokenizer(path)
        components = {
            "text_encoder": text_encoder,
            "tokenizer": self._tokenizer,
            "processor": processor,
        }
        self._pipeline = EncoderPipeline(path, components, media_encoder, comm)
        self._outbox = _outbox(settings, comm)
        self._load_format = settings.stage.load_format
        self._weight_bytes = weight_bytes(text_encoder)
        if media_encoder is not None:
            self._weight_bytes += media_encoder.weight_bytes

    @property
    def facts(self) -> RankFacts:
        """What this rank holds."""
        return RankFacts(
            device=str(self._device),
            weight_bytes=self._weight_bytes,
            load_format=self._load_format,
        )

    def handle(self, command: object, task: TaskHandle) -> object:
        """Do one command; see `encoder_service.commands`."""
        match command:
            case Encode():
                return self._encode(command, task)
            case Push(encoding_id, landing):
                return self._outbox.push(encoding_id, landing) if self._comm.is_leader else None
            case Drop(encoding_id):
                self._outbox.drop(encoding_id)
                return None
            case Probe(landing, nbytes):
                return self._outbox.probe(landing, nbytes) if self._comm.is_leader else None
            case Tidy():
                self._outbox.tidy()
                return None
            case CountTokens(prompt):
                return len(self._tokenizer(prompt, add_special_tokens=False)["input_ids"])
            case _:
                raise TypeError(f"an encoder rank does not know {type(command).__name__}")

    def _encode(self, command: Encode, task: TaskHandle) -> Encoded:
        def tell(part: EncodeProgress) -> None:
            if self._comm.is_leader:
                task.report(part)

        encoded = self._pipeline.encode(command.request, command.files, task.go_on, task.beat, tell)
        return self._comm.from_leader(lambda: self._keep(command.encoding_id, encoded))

    def _keep(self, encoding_id: str, encoded: EncodedRequest | None) -> Encoded:
        assert encoded is not None
        return Encoded(self._outbox.keep(encoding_id, encoded.payload), encoded.references, encoded.timings)


def _outbox(settings: EncoderRankSettings, comm: RankComm) -> Outbox:
    if settings.nixl is not None:
        sender = NixlSender.start(settings.nixl) if comm.is_leader else None
        return Outbox(None, sender, gpu_direct=settings.nixl.gpu_direct)
    locker = locker_for(comm.device)
    return Outbox(ShmSender(settings.slab_folder, on_map=locker.lock if locker else None), None, locker)


def _media_encoder(settings: EncoderRankSettings, comm: RankComm, beater: Beater) -> MediaEncoder | None:
    if settings.text_only:
        return None
    roles = settings.stage.components
    assert roles is not None
    assert roles.video_vae is not None
    return MediaEncoder.load(settings.checkpoint, comm, roles.video_vae.parallel_mode, beater.beat, settings.stage)


def build(comm: RankComm, settings: object, beater: Beater) -> EncoderRank:
    """Load an encoder rank; see `shared_runtime.ranks.worker.BuildService`."""
    assert isinstance(settings, EncoderRankSettings)
    set_up_logging(settings.log_level, comm.spec.name, settings.log_format)
    return EncoderRank(comm, settings, beater)


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    """Entry of the rank process, named by `encoder_service.app`."""
    rank_main(build, spec, settings, end)
