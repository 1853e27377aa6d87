"""What the keys about offload come to, whichever of their two forms a deploy file uses. Pure."""

from dataclasses import dataclass
from typing import Literal

from shared_schema.deploy.model import DiffusionStage


@dataclass(frozen=True)
class OffloadPlan:
    """Where stage 1's weights wait."""

    mode: Literal["none", "module", "layer"]
    """module: transformer and decoders take turns on the GPU. layer: blocks come one after the other."""
    distributed: bool = False
    """Named as such: the same as layer, with the two options below."""
    gathered: bool = False
    """Ranks that hold the same weights keep a share of every block each, and gather it."""
    resident_layers: int = 0
    """Blocks that stay on the GPU, from the first."""
    pinned: bool = True
    """Host memory is page-locked, as far as that goes."""


def offload_of(stage: DiffusionStage) -> OffloadPlan:
    """The plan of a stage whose keys have been checked."""
    compact = stage.diffusion_offload_config
    if compact is not None:
        layer = compact.layer_options.dit
        gathered = layer.weight_transfer == "allgather"
        distributed = layer.weight_transfer is not None or layer.resident_layers > 0
        return OffloadPlan(compact.mode, distributed, gathered, layer.resident_layers, compact.pin_memory)
    if stage.enable_distributed_layerwise_offload:
        return OffloadPlan("layer", True, stage.dlo_use_allgather, stage.dlo_resident_layers)
    return OffloadPlan("module" if stage.enable_cpu_offload else "layer" if stage.enable_layerwise_offload else "none")
