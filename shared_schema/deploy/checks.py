"""What several keys of a deploy file must agree on. Pure; no GPU and no weights are looked at."""

from dataclasses import asdict

from shared_schema.deploy.merge import Path
from shared_schema.deploy.model import Deployment, DiffusionStage, EncoderStage, ParallelConfig
from shared_schema.deploy.service import ServiceSettings
from shared_schema.tasks import MediaCaps

TEXT_HEADS, TEXT_KV_HEADS, DIT_HEADS = 64, 8, 56
"""Attention heads of the released model."""


class Broken(Exception):
    """A rule that spans keys does not hold. `path` is where to change it."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path
        self.message = message


def check_deployment(deployment: Deployment, *, one_host_numbering: bool = True) -> None:
    """Every rule of the contract's "deploy checks".

    Args:
        one_host_numbering: whether both stages' indices count the same GPUs, so that overlap can be seen here.

    Raises:
        Broken: the first rule that does not hold.
    """
    encoder, diffusion = deployment.encoder, deployment.diffusion
    _check_edge(deployment)
    _check_encoder(encoder, text_only=diffusion.text_only)
    _check_parallel(diffusion.parallel_config, len(diffusion.devices))
    _check_offload(diffusion)
    _check_precision(encoder, diffusion)
    if one_host_numbering and deployment.distributed_executor_backend == "mp":
        _check_overlap(encoder, diffusion)
    _check_service(deployment.service)


def _check_service(service: ServiceSettings) -> None:
    for name, most in asdict(MediaCaps()).items():
        if getattr(service.media_caps, name) > most:
            raise Broken(("service", "media_caps", name), f"is at most {most}: no more is read")
    if service.internal_token is not None and service.internal_token_file is not None:
        raise Broken(("service", "internal_token_file"), "stands beside internal_token: give one of them")
    if service.database is not None and service.database_file is not None:
        raise Broken(("service", "database_file"), "stands beside database: give one of them")
    shared = service.database is not None or service.database_file is not None
    if shared and service.storage.url is None:
        why = "is needed beside database: a folder or store that all services of the queue reach"
        raise Broken(("service", "storage", "url"), why)
    if service.storage.url is not None and not shared:
        why = "goes with database: without one the jobs are this service's alone, and lie in its state folder"
        raise Broken(("service", "storage", "url"), why)


def _check_edge(deployment: Deployment) -> None:
    ends = (
        (("stages", 0, "output_connectors"), "to_stage_1", deployment.encoder.output_connectors.get("to_stage_1")),
        (("stages", 1, "input_connectors"), "from_stage_0", deployment.diffusion.input_connectors.get("from_stage_0")),
    )
    for path, key, name in ends:
        if name is not None and name not in deployment.connectors:
            known = ", ".join(deployment.connectors) or "none"
            raise Broken((*path, key), f"names {name!r}, and the connectors are: {known}")
    sent, received = ends[0][2], ends[1][2]
    if sent != received:
        path, key, name = ends[0] if sent is None else ends[1]
        raise Broken((*path, key), f"must name the connector of the other end, {sent or received!r}, not {name!r}")


def _check_encoder(encoder: EncoderStage, *, text_only: bool) -> None:
    path: Path = ("stages", 0, "hf_overrides", "minimax_h3_encoder_components")
    roles = encoder.components
    named = [] if roles is None else [name for name, role in roles if role is not None]
    wanted = ["text_encoder"] if text_only else ["text_encoder", "video_vae", "audio_vae"]
    if named != wanted and not (text_only and roles is None):
        split = "the text-only split" if text_only else "the full split"
        raise Broken(path, f"{split} names exactly {', '.join(wanted)}, not {', '.join(named) or 'nothing'}")
    size = encoder.tensor_parallel_size
    if TEXT_KV_HEADS % size or TEXT_HEADS % size:
        heads = f"{TEXT_HEADS} heads and {TEXT_KV_HEADS} key-value heads"
        raise Broken(("stages", 0, "tensor_parallel_size"), f"must divide the text encoder's {heads}, not {size}")
    if len(encoder.devices) != size:
        count = len(encoder.devices)
        raise Broken(("stages", 0, "devices"), f"must list {size} (tensor_parallel_size), not {count}")


def _check_parallel(config: ParallelConfig, devices: int) -> None:
    path: Path = ("stages", 1, "parallel_config")
    tensor, ulysses, patch = config.tensor_parallel_size, config.ulysses_degree, config.vae_patch_parallel_size
    ranks = tensor * ulysses
    if DIT_HEADS % ranks:
        rule = f"tensor_parallel_size x ulysses_degree must divide the transformer's {DIT_HEADS} heads"
        raise Broken(path, f"{rule}, not {tensor} x {ulysses}")
    if devices != ranks:
        rule = f"must list {ranks} (tensor_parallel_size {tensor} x ulysses_degree {ulysses})"
        raise Broken(("stages", 1, "devices"), f"{rule}, not {devices}")
    if patch not in (1, ranks):
        raise Broken((*path, "vae_patch_parallel_size"), f"must be 1 or the whole group ({ranks}), not {patch}")


def _check_offload(stage: DiffusionStage) -> None:
    path: Path = ("stages", 1)
    flags = ("enable_cpu_offload", "enable_layerwise_offload", "enable_distributed_layerwise_offload")
    chosen = [flag for flag in flags if getattr(stage, flag)]
    if len(chosen) > 1:
        raise Broken((*path, chosen[-1]), f"stands beside {chosen[0]}: choose one kind of offload")
    tuned = ["dlo_resident_layers"] * (stage.dlo_resident_layers > 0) + ["dlo_use_allgather"] * (
        not stage.dlo_use_allgather
    )
    if stage.diffusion_offload_config is not None:
        _check_compact_offload(stage, [*chosen, *tuned])
    elif tuned and not stage.enable_distributed_layerwise_offload:
        raise Broken((*path, tuned[0]), "has no effect without enable_distributed_layerwise_offload: true")
    if stage.dlo_resident_layers > 0 and stage.dlo_use_allgather:
        raise Broken((*path, "dlo_resident_layers"), "needs dlo_use_allgather: false")


def _check_compact_offload(stage: DiffusionStage, old_keys: list[str]) -> None:
    path: Path = ("stages", 1, "diffusion_offload_config")
    offload = stage.diffusion_offload_config
    if old_keys:
        raise Broken(path, f"stands beside {old_keys[0]}: use one of the two forms")
    if offload is None or not offload.model_fields_set & {"layer_options"}:
        return
    if offload.mode == "module":
        raise Broken((*path, "layer_options"), "needs mode: layer")
    if offload.layer_options.dit.resident_layers and offload.layer_options.dit.weight_transfer == "allgather":
        raise Broken((*path, "layer_options", "dit", "resident_layers"), "needs weight_transfer: rank-local")


def _check_precision(encoder: EncoderStage, diffusion: DiffusionStage) -> None:
    idle = encoder if diffusion.text_only else diffusion
    if idle.vae_encode_precision is not None:
        owner = 1 if diffusion.text_only else 0
        where = ("stages", idle.stage_id, "vae_encode_precision")
        raise Broken(where, f"belongs to stage {owner}, which has the VAE encoders in this split")
    for stage in (encoder, diffusion):
        named: dict[str, str | None] = {"vae_encode_precision": stage.vae_encode_precision}
        if isinstance(stage, DiffusionStage):
            named["vae_decode_precision"] = stage.vae_decode_precision
        for key, precision in named.items():
            if stage.on_cpu and precision in ("tf32", "split"):
                raise Broken(("stages", stage.stage_id, key), f"{precision} needs a GPU: use fp32 on the CPU")


def _check_overlap(encoder: EncoderStage, diffusion: DiffusionStage) -> None:
    if encoder.on_cpu or diffusion.on_cpu or (encoder.share_devices and diffusion.share_devices):
        return
    shared = sorted(set(encoder.devices) & set(diffusion.devices), key=int)
    if shared:
        what = f"both stages use GPU {', '.join(shared)}"
        raise Broken(("stages", 1, "devices"), f"{what}: separate them, or set share_devices: true in both")
