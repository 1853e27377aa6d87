"""What a diffusion rank loads, where it puts it, and how it makes diffusers' modules fast there. Torch.

Runs in diffusion ranks.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.commands import DiffusionRankSettings
from diffusion_service.model.adaln import Modulation
from diffusion_service.model.attention import (
    attend_with,
    join_qkv,
    norm_and_rotate,
    norm_and_rotate_in_one_pass,
    use_attention,
)
from diffusion_service.model.compile import compile_blocks
from diffusion_service.model.dit import Dit
from diffusion_service.model.lora import LoraDeltas
from diffusion_service.model.offload import Blocks, ResidentBlocks, StreamedBlocks
from diffusion_service.model.quantize import Quantizer, check_device
from diffusion_service.model.turns import DECODERS, Parked, Turns
from diffusion_service.parallel.tensor import DIT_PLAN, use_local_heads
from diffusion_service.parallel.ulysses import SequenceShard, attend_by_heads
from shared_runtime.compiling import compile_now
from shared_runtime.device_memory import PageLocker
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.worker import Beater
from shared_runtime.sharding import Sharding
from shared_runtime.weights import (
    Place,
    load_audio_vae,
    load_scheduler,
    load_transformer,
    load_video_vae,
    weight_bytes,
)
from shared_schema.deploy.model import AttentionBackend, DiffusionStage
from shared_schema.deploy.offload import OffloadPlan, offload_of
from shared_schema.deploy.settings import PARTITION_TASKS, Partition
from shared_schema.errors import AdapterError, DeployError

logger = logging.getLogger(__name__)

LONGEST_ROWS = 110_000
"""Of the packed sequence of 362 frames on the largest canvas."""


def load(settings: DiffusionRankSettings, comm: RankComm, beater: Beater) -> dict[str, Any]:
    """Only what this rank needs: no tokenizer, no processor, no encoder half, no partition nobody asks for.

    Raises:
        DeployError: files are missing or wrong, or what the stage asks for cannot be had here.
    """
    path, device, dummy = settings.checkpoint, comm.device, settings.stage.dummy
    if settings.stage.diffusion_quantization_config is not None:
        check_device(device)
    components: dict[str, Any] = {
        "scheduler": load_scheduler(path, "scheduler"),
        "audio_scheduler": load_scheduler(path, "audio_scheduler"),
    }
    # Before the decoders: blocks that wait on the host are never all on the device.
    for partition, tasks in PARTITION_TASKS.items():
        if settings.tasks & tasks:
            components[partition] = load_partition(settings, partition, comm)
            beater.beat()
    if comm.is_leader:
        components["audio_vae"] = load_audio_vae(path, "decoder", device, dummy=dummy)
    if comm.is_leader or settings.stage.parallel_config.vae_patch_parallel_size > 1:
        components["vae"] = load_video_vae(path, "decoder", device, dummy=dummy)
    beater.beat()
    return components


def load_partition(settings: DiffusionRankSettings, partition: Partition, comm: RankComm) -> Any:
    """One partition, its linears quantized where the stage says so, what waits on the host there already."""
    stage, quantizer = settings.stage, None
    if stage.diffusion_quantization_config is not None:
        ignored = stage.diffusion_quantization_config.transformer.ignored_layers
        quantizer = Quantizer(ignored, modulation=comm.world_size > 1)
    transformer = load_transformer(
        settings.checkpoint,
        partition,
        comm.device,
        Sharding(DIT_PLAN, comm),
        dummy=stage.dummy,
        deltas=_deltas(settings.adapter, partition, comm.device),
        place=_place(quantizer, offload_of(stage)),
    )
    if quantizer is not None:
        quantizer.fit(transformer)
    return transformer


def _place(quantizer: Quantizer | None, plan: OffloadPlan) -> Place:
    def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor if quantizer is None else quantizer.place(name, tensor)
        waits = plan.mode == "module" or (plan.mode == "layer" and name.startswith("transformer_blocks."))
        return kept.cpu() if waits else kept

    return place


def _deltas(adapter: Adapter | None, partition: Partition, device: torch.device) -> LoraDeltas | None:
    if adapter is None or adapter.partition != partition:
        return None
    logger.info("adapter %s: merging %d modules into %s", adapter.name, len(adapter.modules), partition)
    try:
        return LoraDeltas(adapter, device)
    except AdapterError as error:
        raise DeployError(error.message) from error


class Fitter:
    """Makes loaded modules work with the other ranks' and, on GPUs, as fast as it can."""

    def __init__(
        self,
        stage: DiffusionStage,
        attention: AttentionBackend,
        comm: RankComm,
        locker: PageLocker | None,
        turns: Turns,
    ) -> None:
        self._stage = stage
        self._attention: AttentionBackend = attention
        self._attend = attend_with(attention)
        self._comm = comm
        self._turns = turns
        self._plan = offload_of(stage)
        self._locker = locker if self._plan.pinned else None
        self._on_gpu = comm.device.type == "cuda"

    def fit(self, name: Partition, transformer: Any) -> Dit:
        """This rank's share of a partition; its blocks are not compiled yet."""
        attend, split = self._attend, None
        use_local_heads(transformer, self._comm)
        use_attention(transformer, attend)
        if self._comm.size("ulysses") > 1:
            split = SequenceShard(self._comm)
            attend = attend_by_heads(split, self._attention)
            use_attention(transformer.transformer_blocks, attend)
        on_host = self._on_gpu and (self._comm.world_size == 1 or self._plan.mode != "none")
        modulation = Modulation(transformer, on_host=on_host, device=self._comm.device, pinned=self._plan.pinned)
        if self._on_gpu:
            # The kernel wants a C compiler, which `enforce_eager` is to do without.
            turn = norm_and_rotate if self._stage.enforce_eager else norm_and_rotate_in_one_pass()
            join_qkv(transformer, attend, turn)
        if self._plan.mode == "module":
            self.park(name, _parts(transformer))
        return Dit(transformer, modulation, split, self._blocks(transformer), self._comm.total)

    def _blocks(self, transformer: Any) -> Blocks:
        blocks = transformer.transformer_blocks
        if self._plan.mode != "layer":
            return ResidentBlocks(blocks)
        group = self._comm.group("ulysses") if self._plan.gathered else None
        resident = self._plan.resident_layers
        return StreamedBlocks(blocks, self._comm.device, self._locker, resident=resident, group=group)

    def park(self, name: str, modules: Sequence[nn.Module]) -> None:
        """Have modules take turns with what else is parked, where the stage wants that."""
        if self._plan.mode == "module":
            self._turns.park(name, Parked(modules, self._comm.device, self._locker, name))

    def park_decoders(self, components: dict[str, Any]) -> None:
        """The decoders that this rank has."""
        self.park(
            DECODERS, [part for name in ("vae", "audio_vae") if name in components for part in _parts(components[name])]
        )

    def compile(self, name: Partition, dit: Dit, beater: Beater) -> None:
        """Compile the blocks of a partition where that is done, before anybody waits for it."""
        if not self._on_gpu or self._stage.enforce_eager:
            return
        self._turns.take(name)
        compile_blocks(dit.transformer.transformer_blocks)
        compile_now("the transformer's blocks", lambda: dit.warm_up(LONGEST_ROWS), self._stage, beater.beat)


@dataclass(frozen=True)
class Held:
    """Bytes of weights and buffers."""

    resident: int
    """On the device, at most at any time."""
    offloaded: int
    """In host memory, for the device."""


def held(components: dict[str, Any], dits: dict[Partition, Dit], turns: Turns) -> Held:
    """What a rank holds, once all of it is where it belongs."""
    modules = [part for part in components.values() if isinstance(part, nn.Module)]
    resident = sum(weight_bytes(part) for part in modules) - turns.weight_bytes + turns.resident_bytes
    offloaded = turns.offloaded_bytes
    for dit in dits.values():
        blocks = sum(weight_bytes(block) for block in dit.transformer.transformer_blocks)
        resident += dit.blocks.resident_bytes - blocks + dit.modulation.resident_bytes
        offloaded += dit.blocks.offloaded_bytes + dit.modulation.offloaded_bytes
    return Held(resident, offloaded)


def _parts(module: Any) -> list[nn.Module]:
    """A module in parts that are each a piece of memory of their own: its children, a stack of blocks one by one."""
    found: list[nn.Module] = []
    for child in module.children():
        found += list(child) if isinstance(child, nn.ModuleList) else [child]
    direct = [name for name, _ in module.named_parameters(recurse=False)]
    assert not direct, f"{type(module).__name__} has weights of its own: {direct}"
    return found
