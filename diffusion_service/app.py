"""Builds the diffusion service and runs it. Runs in its API process; no torch here."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Protocol

from fastapi import FastAPI

from diffusion_service.adapters.catalog import Catalog
from diffusion_service.adapters.finding import startup_contract
from diffusion_service.adapters.startup import startup_adapter
from diffusion_service.api import layers
from diffusion_service.api.deps import ApiDeps
from diffusion_service.api.disk import DiskGuard
from diffusion_service.api.fetch import MediaFetcher
from diffusion_service.api.health import overall
from diffusion_service.api.layers import Access
from diffusion_service.api.limits import BodyCaps, RequestDefaults, ServerLimits, StartupAdapter
from diffusion_service.api.lora import defaults_with, planned, shown
from diffusion_service.api.rates import Rate, RateLimiter
from diffusion_service.api.router import build_router
from diffusion_service.commands import DiffusionFacts, DiffusionRankSettings
from diffusion_service.conditioning_cache import ConditioningCache
from diffusion_service.encoder_client import EncoderClient
from diffusion_service.encoder_link import PROBE_BYTES, EncoderLink, Expected
from diffusion_service.encoders import Encoders
from diffusion_service.engine import Engine
from diffusion_service.handover import Handover, PayloadRules
from diffusion_service.health import ServiceHealth
from diffusion_service.jobs.accounts import JobAccounts, QueueCollector
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.feed import JobFeed
from diffusion_service.jobs.runner import JobRunner
from diffusion_service.jobs.shelves.folder import FolderShelf
from diffusion_service.jobs.shelves.objects import ObjectShelf
from diffusion_service.jobs.shelves.shelf import Shelf
from diffusion_service.jobs.sql.store import SqlJobStore
from diffusion_service.jobs.store import JobStore
from diffusion_service.jobs.workshop import RunnerRules
from diffusion_service.keys import KeyRing
from diffusion_service.life import ServiceLife
from diffusion_service.metrics import CacheCollector, EncoderCollector, WebhookAccounts
from diffusion_service.outbound import PinnedClient
from diffusion_service.signature import Signer
from diffusion_service.webhooks import Webhooks
from shared_runtime.answers import AnswerAccounts
from shared_runtime.checkpoint import Checkpoint, Component, resolve_checkpoint
from shared_runtime.gpu_memory import GpuMemory
from shared_runtime.gpus import Gpu
from shared_runtime.logs import set_up_logging
from shared_runtime.metrics import new_registry
from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.mesh import Mesh, rank_specs
from shared_runtime.serving import bind, hold_signals, log_start, serve, url_of
from shared_runtime.spans_out import SpanSink, span_sink
from shared_runtime.stored import MEDIA_ENCODERS, component_folder, read_json
from shared_runtime.transport.accounts import SlabCollector, TransportAccounts
from shared_runtime.transport.base import Receiver
from shared_runtime.transport.header import LANDING_OVERHEAD
from shared_runtime.transport.nixl_receiver import NixlReceiver
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.sizing import largest_payload, slab_for_two
from shared_runtime.transport.slab import Slab
from shared_schema.deploy.layout import layout_of
from shared_schema.deploy.model import Deployment
from shared_schema.deploy.service import ServiceSettings, WebhookSettings
from shared_schema.deploy.settings import (
    DiffusionSettings,
    Partition,
    TaskType,
    partition_of,
    partitions_for,
    tasks_served,
)
from shared_schema.encode import ShmLanding
from shared_schema.errors import DeployError
from shared_schema.lora import Contract
from shared_schema.tasks import Task

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """What holds connections until it is closed."""

    async def close(self) -> None:
        """Give them back."""


RANKS = "diffusion_service.worker:main"
"""What a rank process runs."""

ALWAYS_NEEDED: frozenset[Component] = frozenset({"vae_decoder", "audio_vae_decoder", "scheduler", "audio_scheduler"})


def run(settings: DiffusionSettings, gpus: tuple[Gpu, ...]) -> None:
    """Serve until TERM or INT. `gpus` are those of the stage's devices, in the order of its ranks.

    Raises:
        DeployError: port, files, folders or settings are wrong.
    """
    set_up_logging(settings.log_level, "diffusion-api", settings.log_format)
    listener = bind(settings.host, settings.port)
    log_start(settings.model, settings.deployment, settings.deployment.diffusion, gpus)
    contract = startup_contract(settings.lora_path)
    partitions = _partitions(settings.task_type, settings.deployment, contract)
    if settings.task_type == "auto" or contract is not None:
        logger.info("task type %s serves %s", settings.task_type, ", ".join(sorted(tasks_served(partitions))))
    checkpoint = _checkpoint(settings.model, settings.deployment, partitions)
    lora = None if contract is None else _startup_lora(settings, checkpoint, partitions[0], contract)
    hold_signals()
    artifacts = Artifacts(settings.state_dir, _shelf(settings))
    service = settings.deployment.service
    size = _slab_size(service.slab_bytes, checkpoint)
    sink = span_sink(service.otlp_endpoint, "h3-diffusion")
    slab = Slab.create(service.slab_folder, size, f"diffusion-{listener.getsockname()[1]}")
    try:
        with contextlib.closing(_receiver(settings, slab, listener)) as receiver:
            asyncio.run(
                _serve(
                    settings,
                    gpus,
                    checkpoint,
                    tasks_served(partitions),
                    lora,
                    artifacts,
                    slab,
                    receiver,
                    listener,
                    sink,
                )
            )
    finally:
        slab.close()
        artifacts.close()
        sink.close()


def fetch(model: str, deployment: Deployment, task_type: TaskType, lora_path: str | None = None) -> None:
    """Bring what this service needs of `model` to this machine, and say where it lies.

    Raises:
        DeployError: no such model, not complete, or the hub refuses.
    """
    set_up_logging("info", "diffusion-fetch")
    partitions = _partitions(task_type, deployment, startup_contract(lora_path))
    path = _checkpoint(model, deployment, partitions).path
    logger.info("%s is complete for the diffusion service in %s", model, path)


def _partitions(task_type: TaskType, deployment: Deployment, contract: Contract | None) -> tuple[Partition, ...]:
    # Whether both partitions fit is a question of GPU memory; on a CPU they do.
    return partitions_for(task_type, both_fit=deployment.diffusion.on_cpu, contract=contract)


def _catalog(roots: Collection[Path], checkpoint: Checkpoint, tasks: frozenset[Task]) -> Catalog | None:
    """The adapters that requests may name; None where no folder holds any."""
    if not roots:
        return None
    return Catalog(tuple(roots), checkpoint.path, {partition_of(task) for task in tasks})


def _startup_lora(
    settings: DiffusionSettings, checkpoint: Checkpoint, partition: Partition, contract: Contract
) -> StartupAdapter:
    assert settings.lora_path is not None
    scale = settings.deployment.diffusion.lora_scale
    adapter = startup_adapter(settings.lora_path, scale, checkpoint.path, partition)
    logger.info("adapter %s: bound to %d modules of %s", adapter.name, len(adapter.modules), partition)
    return StartupAdapter(adapter, contract)


def _checkpoint(model: str, deployment: Deployment, partitions: Collection[Partition]) -> Checkpoint:
    needs = ALWAYS_NEEDED | set(partitions)
    if deployment.diffusion.text_only:
        needs |= MEDIA_ENCODERS
    revision, dummy = deployment.model.revision, deployment.diffusion.dummy
    return resolve_checkpoint(model, needs, revision=revision, dummy=dummy)


def _receiver(settings: DiffusionSettings, slab: Slab, listener: socket.socket) -> Receiver[ShmLanding]:
    """The slab itself, or the slab behind a NIXL agent."""
    options = settings.deployment.nixl
    if options is None:
        return slab
    return NixlReceiver.start(slab, f"{socket.gethostname()}:{listener.getsockname()[1]}", options)


def _shelf(settings: DiffusionSettings) -> Shelf | None:
    """Where inputs and clips of shared jobs lie; None: in the state folder."""
    storage = settings.deployment.service.storage
    if storage.url is None:
        return None
    if storage.folder is None:
        return ObjectShelf(storage.url, storage.options, settings.state_dir / "parts")
    try:
        return FolderShelf(storage.folder, shared=True)
    except OSError as error:
        raise DeployError(f"service.storage.url: {storage.folder} cannot be written: {error.strerror}") from error


def _slab_size(asked: int | None, checkpoint: Checkpoint) -> int:
    """Room for two of the largest payloads, or what the deploy file says, which may hold none of them."""
    largest = largest_payload(checkpoint.limits, checkpoint.text_dim)
    size = slab_for_two(largest) if asked is None else asked
    if size < largest + LANDING_OVERHEAD:
        logger.warning(
            "service.slab_bytes is %d: requests whose payload is larger are refused; the largest has %d bytes",
            size,
            largest,
        )
    return size


async def _serve(
    settings: DiffusionSettings,
    gpus: tuple[Gpu, ...],
    checkpoint: Checkpoint,
    tasks: frozenset[Task],
    lora: StartupAdapter | None,
    artifacts: Artifacts,
    slab: Slab,
    receiver: Receiver[ShmLanding],
    listener: socket.socket,
    sink: SpanSink,
) -> None:
    deployment, service = settings.deployment, settings.deployment.service
    url = settings.advertise_url or url_of(listener)
    group = _group(settings, checkpoint, tasks, slab.path, lora)
    adapters = _catalog(service.lora_roots, checkpoint, tasks)
    engine = Engine(group, None if lora is None else planned(lora.adapter), adapters)
    cache = ConditioningCache(receiver, service.conditioning_cache_bytes)
    encoders = _encoders(settings, receiver, cache, _expected(settings, gpus, checkpoint, slab))
    sender = ShmSender(service.slab_folder)
    health = ServiceHealth(engine, encoders, None if lora is None else lora.adapter.name)
    registry = new_registry("diffusion", lambda: overall(health))
    accounts = TransportAccounts(registry)
    registry.register(SlabCollector(receiver.kind, lambda: slab.stats))
    feed = JobFeed()
    store = SqlJobStore(settings.database_url or _local_database(settings), tell=feed.tell)
    limits = _limits(settings, checkpoint, tasks, lora, slab.largest_landing)
    rules = PayloadRules(deployment.diffusion.text_only, checkpoint.text_dim, checkpoint.revision)
    memory, known = GpuMemory.of(gpus), len(settings.encoder_urls)
    for each in (CacheCollector(lambda: cache.stats), EncoderCollector(lambda: encoders.ready, known), memory):
        registry.register(each)
    handover = Handover(encoders, receiver, sender, artifacts, service.lease_s, rules, cache, accounts)
    jobs, job_rules = JobAccounts(registry), _runner_rules(deployment)
    runner = JobRunner(store, artifacts, handover, engine, job_rules, feed, jobs, sink.export)
    registry.register(QueueCollector(lambda: runner.queue(service.queue_limit)))
    info = {"load_format": deployment.diffusion.load_format, "layout": layout_of(deployment), "lora": shown(lora)}
    outbound = PinnedClient(service.media_hosts)
    disk = DiskGuard(settings.state_dir, service.min_free_bytes)
    fetcher, tokens = _fetcher(service, outbound, disk), encoders.count_tokens
    deps = ApiDeps(
        store, artifacts, runner, limits, health, tokens, time.time, feed, disk, info, fetcher, adapters, registry
    )
    hooks = PinnedClient(service.webhook.hosts)
    webhooks = _webhooks(service.webhook, store, hooks, WebhookAccounts(registry))
    life = ServiceLife(group, encoders, store, runner, feed, webhooks, health, service.drain_s)
    try:
        # Before anybody is answered: what it sweeps could be a new request's.
        await runner.recover()
        app = _app(deps, service)
        await serve(
            app,
            listener,
            life.supervise(_ready(group, url, checkpoint.name)),
            life.drain,
            proxies=service.trusted_proxies,
        )
    finally:
        sender.close()
        memory.close()
        await _close(hooks, encoders, outbound, store)


def _local_database(settings: DiffusionSettings) -> str:
    """The jobs of a service that shares them with nobody."""
    return f"sqlite:///{settings.state_dir.absolute() / 'jobs.sqlite3'}"


async def _close(*opened: Closable) -> None:
    for each in opened:
        await each.close()


def _ready(group: ProcessGroup, url: str, name: str) -> Callable[[], Coroutine[None, None, None]]:
    """Says so in the log."""

    async def ready() -> None:
        facts = group.facts
        assert isinstance(facts, DiffusionFacts)
        logger.info("ready at %s: %s on %s, %d MiB", url, name, facts.device, facts.weight_bytes >> 20)

    return ready


def _webhooks(
    settings: WebhookSettings, store: JobStore, client: PinnedClient, accounts: WebhookAccounts
) -> Webhooks | None:
    """What tells the end of jobs; None where the deploy file allows no host."""
    if settings.secret_file is None or not settings.hosts:
        return None
    signer = Signer.read(settings.secret_file)
    return Webhooks(store, client.post, signer, accounts, timeout_s=settings.timeout_s, attempts=settings.attempts)


def _group(
    settings: DiffusionSettings,
    checkpoint: Checkpoint,
    tasks: frozenset[Task],
    slab: Path,
    lora: StartupAdapter | None,
) -> ProcessGroup:
    stage, service = settings.deployment.diffusion, settings.deployment.service
    mesh = Mesh(stage.parallel_config.tensor_parallel_size, stage.parallel_config.ulysses_degree)
    return ProcessGroup(
        rank_specs("diffusion", mesh, stage.devices),
        RANKS,
        DiffusionRankSettings(
            checkpoint.path,
            stage,
            tasks,
            service.slab_folder,
            slab,
            settings.log_level,
            settings.log_format,
            None if lora is None else lora.adapter,
        ),
        GroupLimits(stuck_s=service.stuck_s, dead_s=service.dead_s, load_s=service.load_s),
        settings.deployment.distributed_executor_backend,
    )


def _encoders(
    settings: DiffusionSettings, receiver: Receiver[ShmLanding], cache: ConditioningCache, expected: Expected
) -> Encoders:
    service, token = settings.deployment.service, settings.shared_token
    clients = [
        EncoderClient(url, token=token, encode_timeout_s=service.encode_timeout_s) for url in settings.encoder_urls
    ]
    return Encoders([EncoderLink(client, receiver, expected, service.lease_s, cache.make_room) for client in clients])


def _runner_rules(deployment: Deployment) -> RunnerRules:
    service = deployment.service
    return RunnerRules(
        retention_s=service.retention_hours * 3600,
        look_ahead=service.look_ahead,
        running_per_key=service.running_per_key,
        job_timeout_s=service.job_timeout_s,
        lease_s=service.job_lease_s,
        encoder_ranks=deployment.encoder.world_size,
        diffusion_ranks=deployment.diffusion.world_size,
    )


def _app(deps: ApiDeps, service: ServiceSettings) -> FastAPI:
    app = FastAPI(title="MiniMax-H3 video service", version="1")
    layers.install(app, _access(service), AnswerAccounts(deps.registry))
    app.include_router(build_router(deps))
    return app


def _access(service: ServiceSettings) -> Access:
    rate = service.requests_per_minute
    return Access(
        ring=None if service.keys_file is None else KeyRing(service.keys_file),
        limiter=None if rate is None else RateLimiter(Rate(rate, service.request_burst), time.monotonic),
        origins=service.cors_origins,
        prefix=service.root_path,
    )


def _fetcher(service: ServiceSettings, client: PinnedClient, disk: DiskGuard) -> MediaFetcher | None:
    if not service.media_hosts:
        return None
    return MediaFetcher(client, service.media_hosts, service.media_fetch_s, disk.check)


def _expected(settings: DiffusionSettings, gpus: tuple[Gpu, ...], checkpoint: Checkpoint, slab: Slab) -> Expected:
    return Expected(
        weights_revision=checkpoint.revision,
        text_only=settings.deployment.diffusion.text_only,
        connector=settings.deployment.connector,
        probe_bytes=min(PROBE_BYTES, slab.largest_landing),
        gpus=tuple(gpu.uuid for gpu in gpus),
        share_devices=settings.deployment.diffusion.share_devices,
    )


def _limits(
    settings: DiffusionSettings,
    checkpoint: Checkpoint,
    tasks: frozenset[Task],
    lora: StartupAdapter | None,
    landing: int,
) -> ServerLimits:
    """`landing` is the most bytes that one payload may have."""
    service, sampling = settings.deployment.service, settings.deployment.diffusion.default_sampling_params
    extra = sampling.extra_args
    defaults = RequestDefaults(
        seed=sampling.seed,
        num_inference_steps=sampling.num_inference_steps,
        flow_shift=extra.flow_shift or _shift(checkpoint.path, "scheduler"),
        audio_flow_shift=extra.audio_flow_shift or _shift(checkpoint.path, "audio_scheduler"),
    )
    if lora is not None:
        defaults, changes = defaults_with(defaults, lora.contract)
        for change in changes:
            logger.info("adapter %s: default %s", lora.adapter.name, change)
    return ServerLimits(
        served_names=(settings.served_model_name or checkpoint.name,),
        text_dim=checkpoint.text_dim,
        canvas=checkpoint.limits,
        defaults=defaults,
        tasks=tasks,
        queue_limit=service.queue_limit,
        jobs_per_key=service.jobs_per_key,
        sync_timeout_s=service.sync_timeout_s,
        retention_s=service.retention_hours * 3600,
        accept_when_not_ready=service.accept_when_not_ready,
        caps=service.media_caps,
        body=BodyCaps(),
        redirect_s=service.storage.signed_url_s if service.storage.content == "redirect" else None,
        webhook_hosts=service.webhook.hosts,
        takes_encoder_output=not settings.deployment.diffusion.text_only,
        landing_bytes=landing,
        lora=lora,
        takes_lora=bool(service.lora_roots),
    )


def _shift(path: Path, name: Component) -> float:
    """The checkpoint's own flow shift."""
    return float(read_json(component_folder(path, name) / "scheduler_config.json")["shift"])
