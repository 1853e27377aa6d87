"""What this version cannot do yet, refused in one line each, so that no key is read and then ignored. Pure."""

from collections.abc import Iterator

from shared_schema.deploy.model import Deployment, NixlConnector
from shared_schema.errors import DeployError

NIXL_USED = frozenset({"backends", "num_threads", "transfer_timeout_s", "poll_interval_s", "gpu_direct"})
"""Options of the NIXL connector that change something. The others belong to vLLM-Omni's own hand-shake: here agents
introduce themselves over the services' HTTP, leases are `service.lease_s`, and landings are host memory."""


def check_served(deployment: Deployment) -> None:
    """Stop before anything starts if the deployment asks for what comes with a later version.

    Raises:
        DeployError: the first thing that is not served yet, and the value that is.
    """
    for refusal in _refusals(deployment):
        raise DeployError(refusal)


def check_lora(deployment: Deployment, lora_path: str | None) -> None:
    """Stop if the adapters of stage 1 do not go with the rest of it; `lora_path` from flag or file.

    Raises:
        DeployError: the first thing that it does not go with.
    """
    for refusal in _lora_refusals(deployment, lora_path):
        raise DeployError(refusal)


def _lora_refusals(deployment: Deployment, lora_path: str | None) -> Iterator[str]:
    stage, by_request = deployment.diffusion, bool(deployment.service.lora_roots)
    if lora_path is None and "lora_scale" in stage.model_fields_set:
        yield "stages[1].lora_scale has no effect without lora_path, or --lora-path"
    if lora_path is None and not by_request:
        return
    if lora_path is not None and by_request:
        yield "service.lora_roots does not go with --lora-path, whose adapter every request gets: leave one out"
    given = "--lora-path" if lora_path is not None else "service.lora_roots"
    if stage.dummy:
        yield f"{given} does not go with load_format: dummy: an adapter means nothing to made-up weights"


def _refusals(deployment: Deployment) -> Iterator[str]:
    encoder, diffusion = deployment.encoder, deployment.diffusion
    if deployment.nixl is not None and deployment.nixl.backends != ("UCX",):
        backends = ", ".join(deployment.nixl.backends)
        yield f"the NixlConnector's extra.backends: [{backends}] is not served: use [UCX]"
    if deployment.distributed_executor_backend == "ray" and (encoder.share_devices or diffusion.share_devices):
        yield "share_devices does not go with distributed_executor_backend: ray, which gives each rank its own: use mp"
    backend = diffusion.diffusion_attention_backend
    if diffusion.on_cpu and backend not in (None, "TORCH_SDPA"):
        yield f"stages[1].diffusion_attention_backend: {backend} needs a GPU: use TORCH_SDPA or leave it out"


def costs(deployment: Deployment) -> list[str]:
    """What settings cost that are not obvious, for the log of a start."""
    stage = deployment.diffusion if deployment.diffusion.text_only else deployment.encoder
    if stage.encode_precision != "tf32":
        return []
    where = f"stages[{stage.stage_id}].vae_encode_precision"
    what = "latents of keyframes and references are 5e-4 to 1.6e-3 away from FP32 (on an H200), and clips with them"
    return [f"{where}: tf32 rounds every product: {what}; split costs some time and keeps 22 bits of 24"]


def unused_keys(deployment: Deployment) -> list[str]:
    """Keys that the file gives, that are read so that files load, and that change nothing; logged once at start."""
    unused = ["trust_remote_code"] if deployment.trust_remote_code else []
    for name, connector in deployment.connectors.items():
        if isinstance(connector, NixlConnector):
            given = sorted(connector.extra.model_fields_set - NIXL_USED)
            unused += [f"connectors.{name}.extra.{key}" for key in given]
    for stage in deployment.stages:
        if stage.gpu_memory_utilization is not None:
            unused.append(f"stages[{stage.stage_id}].gpu_memory_utilization")
    return unused
