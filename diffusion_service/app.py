"""Builds the diffusion service and runs it. Runs in its API process; no torch here."""

import asyncio
import contextlib
import logging
import socket
import time
from dataclasses import dataclass
from typing import Protocol

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from diffusion_service.accounts import CacheCollector, EncoderCollector, WebhookAccounts
from diffusion_service.api import layers
from diffusion_service.api.deps import ApiDeps
from diffusion_service.api.disk import DiskGuard
from diffusion_service.api.fetch import MediaFetcher
from diffusion_service.api.health import overall
from diffusion_service.api.layers import Access
from diffusion_service.api.lora import planned, shown
from diffusion_service.api.rates import Rate, RateLimiter
from diffusion_service.api.router import build_router
from diffusion_service.conditioning_cache import ConditioningCache
from diffusion_service.encoder_client import EncoderClient
from diffusion_service.encoder_link import EncoderLink, Expected
from diffusion_service.encoders import Encoders
from diffusion_service.engine import Engine
from diffusion_service.handover import Handover
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
from diffusion_service.keys import KeyRing
from diffusion_service.life import ServiceLife
from diffusion_service.outbound import PinnedClient
from diffusion_service.settled import Settled, checkpoint_for, settle
from diffusion_service.signature import Signer
from diffusion_service.webhooks import Webhooks
from shared_runtime.answers import AnswerAccounts
from shared_runtime.checkpoint import Checkpoint
from shared_runtime.gpu_memory import GpuMemory
from shared_runtime.gpus import Gpu
from shared_runtime.logs import set_up_logging
from shared_runtime.metrics import new_registry
from shared_runtime.ranks.group import ProcessGroup
from shared_runtime.serving import bind, hold_signals, log_ready, log_start, serve, url_of
from shared_runtime.spans_out import SpanSink, span_sink
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
    TaskType,
)
from shared_schema.encode import ShmLanding
from shared_schema.errors import DeployError, StoreUnavailable

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """What holds connections until it is closed."""

    async def close(self) -> None:
        """Give them back."""


@dataclass(frozen=True)
class Opened:
    """What was opened before the event loop, and is closed after it."""

    listener: socket.socket
    artifacts: Artifacts
    slab: Slab
    receiver: Receiver[ShmLanding]
    sender: ShmSender
    memory: GpuMemory
    sink: SpanSink


@dataclass(frozen=True)
class Jobs:
    """What makes jobs, and how it does."""

    group: ProcessGroup
    encoders: Encoders
    store: JobStore
    feed: JobFeed
    runner: JobRunner
    health: ServiceHealth
    registry: CollectorRegistry


def run(settings: DiffusionSettings, gpus: tuple[Gpu, ...]) -> None:
    """Serve until TERM or INT. `gpus` are those of the stage's devices, in the order of its ranks.

    Raises:
        DeployError: port, files, folders or settings are wrong.
    """
    set_up_logging(settings.log_level, "diffusion-api", settings.log_format)
    listener = bind(settings.host, settings.port)
    log_start(settings.model, settings.deployment, settings.deployment.diffusion, gpus)
    settled = settle(settings, gpus)
    hold_signals()
    artifacts = Artifacts(settings.state_dir, _shelf(settings))
    service = settings.deployment.service
    size = _slab_size(service.slab_bytes, settled.checkpoint)
    sink = span_sink(service.otlp_endpoint, "h3-diffusion")
    slab = Slab.create(service.slab_folder, size, f"diffusion-{listener.getsockname()[1]}")
    try:
        with (
            contextlib.closing(_receiver(settings, slab, listener)) as receiver,
            contextlib.closing(ShmSender(service.slab_folder)) as sender,
            contextlib.closing(GpuMemory.of(settled.gpus)) as memory,
        ):
            asyncio.run(_serve(settled, Opened(listener, artifacts, slab, receiver, sender, memory, sink)))
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
    path = checkpoint_for(model, deployment, task_type, lora_path).path
    logger.info("%s is complete for the diffusion service in %s", model, path)


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


def _jobs(settled: Settled, opened: Opened) -> Jobs:
    """Built and counted."""
    settings, lora, slab, receiver = settled.settings, settled.lora, opened.slab, opened.receiver
    service, artifacts = settings.deployment.service, opened.artifacts
    group = settled.group(slab.path)
    engine = Engine(group, None if lora is None else planned(lora.adapter), settled.adapters)
    cache = ConditioningCache(receiver, service.conditioning_cache_bytes)
    encoders = _encoders(settings, receiver, cache, settled.expected(slab.largest_landing))
    health = ServiceHealth(engine, encoders, None if lora is None else lora.adapter.name)
    registry = new_registry("diffusion", lambda: overall(health))
    accounts, rules = TransportAccounts(registry), settled.payload_rules
    handover = Handover(encoders, receiver, opened.sender, artifacts, service.lease_s, rules, cache, accounts)
    feed = JobFeed()
    store = SqlJobStore(settled.database_url, tell=feed.tell)
    ended, export = JobAccounts(registry), opened.sink.export
    runner = JobRunner(store, artifacts, handover, engine, settled.runner_rules, feed, ended, export)
    for each in (
        SlabCollector(receiver.kind, lambda: slab.stats),
        CacheCollector(lambda: cache.stats),
        EncoderCollector(lambda: encoders.ready, len(settings.encoder_urls)),
        opened.memory,
        QueueCollector(lambda: runner.queue(service.queue_limit)),
    ):
        registry.register(each)
    return Jobs(group, encoders, store, feed, runner, health, registry)


async def _serve(settled: Settled, opened: Opened) -> None:
    settings, deployment, lora = settled.settings, settled.settings.deployment, settled.lora
    service, jobs = deployment.service, _jobs(settled, opened)
    outbound, hooks = PinnedClient(service.media_hosts), PinnedClient(service.webhook.hosts)
    disk = DiskGuard(settings.state_dir, service.min_free_bytes)
    deps = ApiDeps(
        jobs.store,
        opened.artifacts,
        jobs.runner,
        settled.limits(opened.slab.largest_landing),
        jobs.health,
        jobs.encoders.count_tokens,
        time.time,
        jobs.feed,
        disk,
        {"load_format": deployment.diffusion.load_format, "layout": layout_of(deployment), "lora": shown(lora)},
        _fetcher(service, outbound, disk),
        settled.adapters,
        jobs.registry,
    )
    webhooks = _webhooks(service.webhook, jobs.store, hooks, WebhookAccounts(jobs.registry))
    life = ServiceLife(
        jobs.group, jobs.encoders, jobs.store, jobs.runner, jobs.feed, webhooks, jobs.health, service.drain_s
    )
    url = settings.advertise_url or url_of(opened.listener)

    async def ready() -> None:
        log_ready(url, settled.checkpoint.name, jobs.group.facts)

    try:
        await _recover(jobs.runner)
        app, proxies = _app(deps, service), service.trusted_proxies
        await serve(app, opened.listener, life.supervise(ready), life.drain, proxies=proxies)
    finally:
        await _close(hooks, jobs.encoders, outbound, jobs.store)


async def _recover(runner: JobRunner) -> None:
    """Before anybody is answered: what is swept could be a new request's.

    Raises:
        DeployError: the database does not answer.
    """
    try:
        await runner.recover()
    except StoreUnavailable as error:
        raise DeployError(f"the jobs' database: {error.message}") from error


async def _close(*opened: Closable) -> None:
    for each in opened:
        await each.close()


def _webhooks(
    settings: WebhookSettings, store: JobStore, client: PinnedClient, accounts: WebhookAccounts
) -> Webhooks | None:
    """What tells the end of jobs; None where the deploy file allows no host."""
    if settings.secret_file is None or not settings.hosts:
        return None
    signer = Signer.read(settings.secret_file)
    return Webhooks(store, client.post, signer, accounts, timeout_s=settings.timeout_s, attempts=settings.attempts)


def _encoders(
    settings: DiffusionSettings, receiver: Receiver[ShmLanding], cache: ConditioningCache, expected: Expected
) -> Encoders:
    service, token = settings.deployment.service, settings.shared_token
    clients = [
        EncoderClient(url, token=token, encode_timeout_s=service.encode_timeout_s) for url in settings.encoder_urls
    ]
    return Encoders([EncoderLink(client, receiver, expected, service.lease_s, cache.make_room) for client in clients])


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
