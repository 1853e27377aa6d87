"""The adapter that a service is started with, bound to the checkpoint before any rank starts. API process; no torch."""

from pathlib import Path

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.adapters.binding import bind, linears
from diffusion_service.adapters.finding import find_artifact
from diffusion_service.adapters.values import check_values
from shared_runtime.stored import stored_tensors
from shared_schema.deploy.settings import Partition
from shared_schema.errors import AdapterError, DeployError


def startup_adapter(lora_path: str, scale: float, checkpoint: Path, partition: Partition) -> Adapter:
    """The artifact, bound to a partition of the checkpoint, its values read once.

    Raises:
        DeployError: a tensor that does not bind, a value that is not finite, or no whole file.
    """
    shapes = linears(stored_tensors(checkpoint, partition))
    try:
        file, contract = find_artifact(Path(lora_path))
        adapter = bind(file, partition, shapes, name=file.name, scale=scale, alpha=contract.alpha)
        check_values(adapter)
    except AdapterError as error:
        raise DeployError(f"--lora-path {lora_path}: {error.message}") from error
    return adapter
