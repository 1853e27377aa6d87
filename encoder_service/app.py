"""Builds the encoder service and runs it. Runs in its API process; no torch here."""

import asyncio
import logging
import socket

from prometheus_client import CollectorRegistry

from encoder_service.accounts import EncodeAccounts, EncodingCollector
from encoder_service.commands import EncoderRankSettings
from encoder_service.encoder import Encoder
from encoder_service.routes import EncoderDeps, build_app
from shared_runtime.checkpoint import Checkpoint, Component, resolve_checkpoint
from shared_runtime.gpu_memory import GpuMemory
from shared_runtime.gpus import Gpu
from shared_runtime.logs import set_up_logging
from shared_runtime.metrics import new_registry
from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.mesh import Mesh, rank_specs
from shared_runtime.serving import bind, hold_signals, log_ready, log_start, serve, url_of
from shared_runtime.spans_out import SpanSink, span_sink
from shared_runtime.stored import MEDIA_ENCODERS
from shared_runtime.transport.accounts import TransportAccounts
from shared_schema.deploy.model import Deployment
from shared_schema.deploy.settings import ServerSettings
from shared_schema.encode import SCHEMA_VERSION, EncoderIdentity

logger = logging.getLogger(__name__)

RANKS = "encoder_service.worker:main"
"""What a rank process runs."""

ALWAYS_NEEDED: frozenset[Component] = frozenset({"text_encoder", "tokenizer", "processor"})


def run(settings: ServerSettings, gpus: tuple[Gpu, ...]) -> None:
    """Serve until TERM or INT. `gpus` are those of the stage's devices, in the order of its ranks.

    Raises:
        DeployError: port, files or settings are wrong.
    """
    set_up_logging(settings.log_level, "encoder-api", settings.log_format)
    listener = bind(settings.host, settings.port)
    log_start(settings.model, settings.deployment, settings.deployment.encoder, gpus)
    checkpoint = _checkpoint(settings.model, settings.deployment)
    hold_signals()
    sink = span_sink(settings.deployment.service.otlp_endpoint, "h3-encoder")
    try:
        asyncio.run(_serve(settings, gpus, checkpoint, listener, sink))
    finally:
        sink.close()


def fetch(model: str, deployment: Deployment) -> None:
    """Bring what this service needs of `model` to this machine, and say where it lies.

    Raises:
        DeployError: no such model, not complete, or the hub refuses.
    """
    set_up_logging("info", "encoder-fetch")
    logger.info("%s is complete for the encoder service in %s", model, _checkpoint(model, deployment).path)


def _checkpoint(model: str, deployment: Deployment) -> Checkpoint:
    needs = ALWAYS_NEEDED if deployment.diffusion.text_only else ALWAYS_NEEDED | MEDIA_ENCODERS
    revision, dummy = deployment.model.revision, deployment.encoder.dummy
    return resolve_checkpoint(model, needs, revision=revision, dummy=dummy)


async def _serve(
    settings: ServerSettings, gpus: tuple[Gpu, ...], checkpoint: Checkpoint, listener: socket.socket, sink: SpanSink
) -> None:
    service, group = settings.deployment.service, _group(settings, checkpoint)
    url = settings.advertise_url or url_of(listener)
    memory = GpuMemory.of(gpus)
    encoder, registry = _counted(group, url, service.lease_s, memory)
    identity = _identity(settings, gpus, checkpoint, encoder)
    deps = EncoderDeps(encoder, identity, settings.shared_token, registry, sink.export)
    sweeping = asyncio.create_task(encoder.sweep())

    async def ready() -> None:
        encoder.forget_all()
        log_ready(url, checkpoint.name, group.facts)

    async def drain() -> None:
        await encoder.drain(service.drain_s)
        group.stop_gently()

    try:
        await serve(build_app(deps), listener, group.supervise(ready), drain)
    finally:
        sweeping.cancel()
        memory.close()


def _group(settings: ServerSettings, checkpoint: Checkpoint) -> ProcessGroup:
    deployment, stage, service = settings.deployment, settings.deployment.encoder, settings.deployment.service
    return ProcessGroup(
        rank_specs("encoder", Mesh(tp=stage.tensor_parallel_size), stage.devices),
        RANKS,
        EncoderRankSettings(
            checkpoint.path,
            stage,
            deployment.diffusion.text_only,
            service.slab_folder,
            deployment.nixl,
            settings.log_level,
            settings.log_format,
        ),
        GroupLimits(stuck_s=service.stuck_s, dead_s=service.dead_s, load_s=service.load_s),
        deployment.distributed_executor_backend,
    )


def _counted(
    group: ProcessGroup, endpoint: str, lease_s: float, memory: GpuMemory
) -> tuple[Encoder, CollectorRegistry]:
    """The encoder and what `/metrics` shows of it: either is made with the other."""
    registry = new_registry("encoder", lambda: encoder.health())
    accounts, encodes = TransportAccounts(registry), EncodeAccounts(registry)
    encoder = Encoder(group, endpoint=endpoint, lease_s=lease_s, accounts=accounts, encodes=encodes)
    registry.register(memory)
    registry.register(EncodingCollector(lambda: encoder.queued, lambda: encoder.waiting))
    return encoder, registry


def _identity(
    settings: ServerSettings, gpus: tuple[Gpu, ...], checkpoint: Checkpoint, encoder: Encoder
) -> EncoderIdentity:
    return EncoderIdentity(
        schema_version=SCHEMA_VERSION,
        instance_id=encoder.instance_id,
        model=checkpoint.name,
        weights_revision=checkpoint.revision,
        text_only=settings.deployment.diffusion.text_only,
        connector=settings.deployment.connector,
        vae_encode_precision=settings.deployment.encoder.encode_precision,
        gpus=tuple(gpu.uuid for gpu in gpus),
        share_devices=settings.deployment.encoder.share_devices,
    )
