"""The adapters that requests may name: files in the allowed folders, bound to this service's transformers. API process.

What is found good is remembered until its file changes, so that a request costs a look at the header.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.adapters.binding import bind, linears
from diffusion_service.adapters.finding import display_name, find_allowed
from diffusion_service.adapters.values import check_values
from shared_runtime.stored import stored_tensors
from shared_schema.deploy.settings import Partition, partition_of
from shared_schema.errors import AdapterBroken
from shared_schema.lora import CONTRACTS, Contract, check_export
from shared_schema.tasks import Task


class Catalog:
    """LoRA files under some roots. Safe to call from several threads."""

    def __init__(self, roots: Sequence[Path], checkpoint: Path, partitions: Collection[Partition]) -> None:
        self._roots = tuple(roots)
        self._shapes = {name: linears(stored_tensors(checkpoint, name)) for name in partitions}
        self._finite: dict[Path, int] = {}

    def find(self, *, name: str | None, path: str | None) -> tuple[Path, str, Contract | None]:
        """The file that a request means, under which name it goes, and its contract if it is a Turbo artifact.

        Raises:
            AdapterNotFound: no root has it.
            AdapterNotServed: it is an export for ComfyUI.
        """
        file = find_allowed(self._roots, name=name, path=path)
        check_export(file.name)
        return file, name or display_name(file), CONTRACTS.get(file.name)

    def bind(self, file: Path, task: Task, *, name: str, scale: float) -> Adapter:
        """The adapter for the transformer of a task; its values are read where that has not been done.

        Raises:
            AdapterError: the file cannot be used.
        """
        contract = CONTRACTS.get(file.name)
        partition = partition_of(task)
        alpha = None if contract is None else contract.alpha
        try:
            adapter = bind(file, partition, self._shapes[partition], name=name, scale=scale, alpha=alpha)
            if self._finite.get(file) != adapter.written_ns:
                check_values(adapter)
                self._finite[file] = adapter.written_ns
        except OSError as error:
            raise AdapterBroken(f"{file.name} cannot be read: {error.strerror}") from error
        return adapter
