"""What a LoRA adapter adds to the weights of its partition, part by part as they are read. Diffusion ranks; torch."""

from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from diffusion_service.adapters.adapter import Adapter, BoundModule
from shared_schema.errors import AdapterBroken


class LoraDeltas:
    """The products of an adapter's matrices, each made when its weight is read, and only as much as the rank holds."""

    def __init__(self, adapter: Adapter, device: torch.device) -> None:
        """Open the file of a bound adapter.

        Raises:
            AdapterBroken: it is not there any more, or no longer what was bound.
        """
        self._adapter = adapter
        # At scale 0 nothing is added, not even a zero: that would turn -0.0 into 0.0.
        modules = adapter.modules if adapter.scale else ()
        self._modules = {f"{each.module}.weight": each for each in modules}
        try:
            self._file = cast(Any, safe_open(adapter.file, framework="pt", device=str(device)))
            held = set(self._file.keys())
        except (OSError, SafetensorError) as error:
            raise AdapterBroken(f"{adapter.name} cannot be read any more: {error}") from error
        if not {name for each in adapter.modules for name in (each.down, each.up)} <= held:
            raise AdapterBroken(f"{adapter.name} has changed since it was checked")

    @property
    def names(self) -> frozenset[str]:
        """Weights that get something on top."""
        return frozenset(self._modules)

    def of(self, name: str) -> "_Product | None":
        """See `shared_runtime.weights.Deltas`."""
        module = self._modules.get(name)
        return None if module is None else self._product(module)

    def _product(self, module: BoundModule) -> "_Product":
        down, up = (self._file.get_tensor(name).float() for name in (module.down, module.up))
        if module.swapped:
            first, second = up.chunk(2)
            up = torch.cat([second, first])
        return _Product(down, up, self._adapter.scale * module.factor)


class _Product:
    """`factor * up @ down`, of which only the part is made that is asked for."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor, factor: float) -> None:
        self._down = down
        self._up = up
        self._factor = factor

    def __getitem__(self, index: Any) -> torch.Tensor:
        """`...`, rows, or rows and columns, as a `TensorReader` is asked; FP32."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        return self._factor * (self._up[rows] @ self._down[:, columns])
