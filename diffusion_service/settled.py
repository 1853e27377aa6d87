"""What a diffusion service is told and finds, and what follows from it, before anything of it runs. API process."""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from diffusion_service.adapters.catalog import Catalog
from diffusion_service.adapters.finding import startup_contract
from diffusion_service.adapters.startup import startup_adapter
from diffusion_service.api.limits import BodyCaps, RequestDefaults, ServerLimits, StartupAdapter
from diffusion_service.api.lora import defaults_with
from diffusion_service.commands import DiffusionRankSettings
from diffusion_service.encoder_link import PROBE_BYTES, Expected
from diffusion_service.handover import PayloadRules
from diffusion_service.jobs.workshop import RunnerRules
from shared_runtime.checkpoint import Checkpoint, Component, resolve_checkpoint
from shared_runtime.gpus import Gpu
from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.mesh import Mesh, rank_specs
from shared_runtime.stored import MEDIA_ENCODERS, component_folder, read_json
from shared_schema.deploy.model import Deployment, DiffusionStage
from shared_schema.deploy.offload import offload_of
from shared_schema.deploy.quantization import check_ignored
from shared_schema.deploy.settings import (
    DiffusionSettings,
    Partition,
    TaskType,
    partition_of,
    partitions_for,
    tasks_served,
)
from shared_schema.errors import DeployError
from shared_schema.lora import Contract
from shared_schema.tasks import Task

logger = logging.getLogger(__name__)

RANKS = "diffusion_service.worker:main"
"""What a rank process runs."""

ALWAYS_NEEDED: frozenset[Component] = frozenset({"vae_decoder", "audio_vae_decoder", "scheduler", "audio_scheduler"})

RELEASED_BLOCKS = 50
"""Of a transformer, where its configuration says nothing."""
PARTITION_BYTES = 66_300_000_000
"""Of one released transformer."""
ADALN_BYTES = 26_000_000_000
"""Of it the AdaLN projections, which one GPU alone keeps on the host."""
QUANTIZED_AWAY_BYTES = 19_200_000_000
"""What FP8 saves of it."""
BESIDE_BYTES = 24 * 2**30
"""Decoders (9 GiB at their peak), the working set of the longest clip (11 GiB, and 2 with `quality: high`), what driver
and libraries take."""


@dataclass(frozen=True)
class Settled:
    """A service's command line and deploy file, and what they name."""

    settings: DiffusionSettings
    gpus: tuple[Gpu, ...]
    """Of the stage's devices, in the order of its ranks."""
    checkpoint: Checkpoint
    tasks: frozenset[Task]
    """That the loaded partitions can make."""
    lora: StartupAdapter | None

    @property
    def database_url(self) -> str:
        """Of the jobs: by default of a database that is shared with nobody."""
        return self.settings.database_url or f"sqlite:///{self.settings.state_dir.absolute() / 'jobs.sqlite3'}"

    @property
    def adapters(self) -> Catalog | None:
        """Those that requests may name; None where no folder holds any."""
        roots = self.settings.deployment.service.lora_roots
        if not roots:
            return None
        return Catalog(tuple(roots), self.checkpoint.path, {partition_of(task) for task in self.tasks})

    @property
    def payload_rules(self) -> PayloadRules:
        """What every payload must be."""
        text_only = self.settings.deployment.diffusion.text_only
        return PayloadRules(text_only, self.checkpoint.text_dim, self.checkpoint.revision)

    @property
    def runner_rules(self) -> RunnerRules:
        """How jobs are taken and kept."""
        deployment, service = self.settings.deployment, self.settings.deployment.service
        return RunnerRules(
            retention_s=service.retention_hours * 3600,
            look_ahead=service.look_ahead,
            running_per_key=service.running_per_key,
            job_timeout_s=service.job_timeout_s,
            lease_s=service.job_lease_s,
            encoder_ranks=deployment.encoder.world_size,
            diffusion_ranks=deployment.diffusion.world_size,
        )

    def group(self, slab: Path) -> ProcessGroup:
        """The ranks, not started yet; `slab` is where payloads land."""
        settings, stage = self.settings, self.settings.deployment.diffusion
        service = settings.deployment.service
        mesh = Mesh(stage.parallel_config.tensor_parallel_size, stage.parallel_config.ulysses_degree)
        return ProcessGroup(
            rank_specs("diffusion", mesh, stage.devices),
            RANKS,
            DiffusionRankSettings(
                self.checkpoint.path,
                stage,
                self.tasks,
                service.slab_folder,
                slab,
                settings.log_level,
                settings.log_format,
                None if self.lora is None else self.lora.adapter,
                stage.encode_precision if stage.text_only else settings.deployment.encoder.encode_precision,
            ),
            GroupLimits(stuck_s=service.stuck_s, dead_s=service.dead_s, load_s=service.load_s),
            settings.deployment.distributed_executor_backend,
        )

    def expected(self, largest_landing: int) -> Expected:
        """What an encoder must be; `largest_landing` is what the slab takes at most, in bytes."""
        deployment = self.settings.deployment
        return Expected(
            weights_revision=self.checkpoint.revision,
            text_only=deployment.diffusion.text_only,
            connector=deployment.connector,
            vae_encode_precision=deployment.encoder.encode_precision,
            probe_bytes=min(PROBE_BYTES, largest_landing),
            gpus=tuple(gpu.uuid for gpu in self.gpus),
            share_devices=deployment.diffusion.share_devices,
        )

    def limits(self, largest_landing: int) -> ServerLimits:
        """What requests may ask for; `largest_landing` is the most bytes that one payload may have."""
        settings, service = self.settings, self.settings.deployment.service
        return ServerLimits(
            served_names=(settings.served_model_name or self.checkpoint.name,),
            text_dim=self.checkpoint.text_dim,
            canvas=self.checkpoint.limits,
            defaults=self._defaults(),
            tasks=self.tasks,
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
            landing_bytes=largest_landing,
            lora=self.lora,
            takes_lora=bool(service.lora_roots),
        )

    def _defaults(self) -> RequestDefaults:
        sampling, path = self.settings.deployment.diffusion.default_sampling_params, self.checkpoint.path
        defaults = RequestDefaults(
            seed=sampling.seed,
            num_inference_steps=sampling.num_inference_steps,
            flow_shift=sampling.extra_args.flow_shift or _shift(path, "scheduler"),
            audio_flow_shift=sampling.extra_args.audio_flow_shift or _shift(path, "audio_scheduler"),
        )
        if self.lora is None:
            return defaults
        defaults, changes = defaults_with(defaults, self.lora.contract)
        for change in changes:
            logger.info("adapter %s: default %s", self.lora.adapter.name, change)
        return defaults


def settle(settings: DiffusionSettings, gpus: tuple[Gpu, ...]) -> Settled:
    """Find the checkpoint, and the adapter if one is named.

    Raises:
        DeployError: files are missing or wrong.
    """
    contract = startup_contract(settings.lora_path)
    partitions = _partitions(settings.task_type, settings.deployment, contract, gpus)
    checkpoint, partitions = _present(settings, partitions)
    _check_quantization(settings.deployment.diffusion, checkpoint, partitions)
    tasks = tasks_served(partitions)
    if settings.task_type == "auto" or contract is not None:
        logger.info("task type %s serves %s", settings.task_type, ", ".join(sorted(tasks)))
    lora = None if contract is None else _startup_lora(settings, checkpoint, partitions[0], contract)
    return Settled(settings, gpus, checkpoint, tasks, lora)


def checkpoint_for(model: str, deployment: Deployment, task_type: TaskType, lora_path: str | None) -> Checkpoint:
    """The checkpoint `model`, fetched where that is called for, complete for what a service would load of it.

    Whoever fetches may have no GPU: `auto` brings both transformers only where a service on CPUs would load them.

    Raises:
        DeployError: no such model, not complete, or the hub refuses.
    """
    return _checkpoint(model, deployment, _partitions(task_type, deployment, startup_contract(lora_path), ()))


def _partitions(
    task_type: TaskType, deployment: Deployment, contract: Contract | None, gpus: tuple[Gpu, ...]
) -> tuple[Partition, ...]:
    return partitions_for(task_type, both_fit=both_fit(deployment.diffusion, gpus), contract=contract)


def both_fit(stage: DiffusionStage, gpus: tuple[Gpu, ...]) -> bool:
    """Whether every GPU of the stage holds its part of both transformers beside all else; on a CPU they fit.

    By the released sizes. On GPUs that others use too, or whose memory is not known, and with offload, which moves the
    question to the host's memory, they do not.
    """
    if stage.on_cpu:
        return True
    if stage.share_devices or not gpus or offload_of(stage).mode != "none":
        return False
    part = PARTITION_BYTES - (ADALN_BYTES if stage.world_size == 1 else 0)
    quantized = stage.diffusion_quantization_config
    if quantized is not None and not quantized.transformer.ignored_layers:
        part -= QUANTIZED_AWAY_BYTES
    each = part // stage.parallel_config.tensor_parallel_size
    return 2 * each + BESIDE_BYTES <= min(gpu.memory_bytes for gpu in gpus)


def _present(
    settings: DiffusionSettings, partitions: tuple[Partition, ...]
) -> tuple[Checkpoint, tuple[Partition, ...]]:
    """The checkpoint, and which of the wanted transformers it has; only `auto` on GPUs does with fewer."""
    try:
        return _checkpoint(settings.model, settings.deployment, partitions), partitions
    except DeployError as error:
        if settings.task_type != "auto" or settings.deployment.diffusion.on_cpu or len(partitions) == 1:
            raise
        logger.warning("task type auto: both transformers fit, but one is not there: %s", error)
        return _checkpoint(settings.model, settings.deployment, partitions[:1]), partitions[:1]


def _check_quantization(stage: DiffusionStage, checkpoint: Checkpoint, partitions: Collection[Partition]) -> None:
    """Names of layers are those of the transformers that will be loaded."""
    quantization = stage.diffusion_quantization_config
    if quantization is None:
        return
    for partition in partitions:
        config = read_json(component_folder(checkpoint.path, partition) / "config.json")
        check_ignored(quantization.transformer.ignored_layers, int(config.get("num_layers", RELEASED_BLOCKS)))


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


def _shift(path: Path, name: Component) -> float:
    """The checkpoint's own flow shift."""
    return float(read_json(component_folder(path, name) / "scheduler_config.json")["shift"])
