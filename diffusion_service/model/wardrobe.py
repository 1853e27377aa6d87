"""Changes the adapter of a loaded partition between two jobs, by reading weights anew. Diffusion ranks; torch.

Whatever an adapter changed is read from the checkpoint again, with the next one added or with none: a weight is always
what loading would have made it, bit for bit, however many adapters came before. Nothing is ever subtracted.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.model.dit import Dit
from diffusion_service.model.lora import LoraDeltas
from shared_runtime.ranks.comm import RankComm
from shared_runtime.sharding import Sharding
from shared_runtime.weights import read_weight, tensor_readers
from shared_schema.deploy.settings import Partition
from shared_schema.errors import AdapterError, JobFailed

logger = logging.getLogger(__name__)


class Wardrobe:
    """One partition on one rank, and the adapter that it has."""

    def __init__(self, path: Path, partition: Partition, dit: Dit, sharding: Sharding, comm: RankComm) -> None:
        self._path = path
        self._partition = partition
        self._dit = dit
        self._sharding = sharding
        self._comm = comm
        self._worn: Adapter | None = None
        self._changed: frozenset[str] = frozenset()
        """Weights that are not the checkpoint's, or may not be."""
        self._settled = True
        """False while weights are read: if that fails, the next call reads them again, whatever it asks for."""

    def wear(self, adapter: Adapter | None, beat: Callable[[], None]) -> None:
        """Give the partition this adapter, or none, if it has another. A collective.

        Raises:
            JobFailed: the file cannot be read; the partition is as it was.
        """
        if adapter == self._worn and self._settled:
            return
        begun = time.perf_counter()
        deltas = self._open(adapter)
        wanted = frozenset() if deltas is None else deltas.names
        self._changed |= wanted
        self._settled = False
        self._read(self._changed, deltas, beat)
        logger.info("%d weights read anew in %.1f s", len(self._changed), time.perf_counter() - begun)
        self._worn, self._changed, self._settled = adapter, wanted, True

    def _open(self, adapter: Adapter | None) -> LoraDeltas | None:
        deltas, error = None, None
        if adapter is not None:
            try:
                deltas = LoraDeltas(adapter, self._comm.device)
            except AdapterError as raised:
                error = JobFailed(raised.message, code="invalid_input", param="lora")
        self._comm.agree(error)
        return deltas

    def _read(self, names: frozenset[str], deltas: LoraDeltas | None, beat: Callable[[], None]) -> None:
        device, places = self._comm.device, places_of(self._dit)
        with torch.no_grad():
            for name, stored, reader in tensor_readers(self._path, self._partition, device):
                if name in names:
                    places[name].copy_(read_weight(name, stored, reader, device, self._sharding, deltas))
                    beat()
        self._dit.modulation.forget()


def places_of(dit: Dit) -> dict[str, torch.Tensor]:
    """Where the weight of every linear lies now, by its name in the checkpoint: some were moved, some joined."""
    modules = dit.transformer.named_modules()
    places: dict[str, torch.Tensor] = {f"{n}.weight": m.weight for n, m in modules if isinstance(m, nn.Linear)}
    for number, projection in enumerate(dit.modulation.projections):
        block = f"transformer_blocks.{number}"
        assert isinstance(projection, nn.Linear)
        places[f"{block}.adaln_proj.linear.weight"] = projection.weight
        joined = places.pop(f"{block}.attn.to_qkv.weight", None)
        if joined is not None:
            for kind, part in zip("qkv", joined.chunk(3), strict=True):
                places[f"{block}.attn.to_{kind}.weight"] = part
    return places
