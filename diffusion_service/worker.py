"""What runs in a diffusion rank: load the DiT partitions and the decoders, then make clips. Torch."""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.commands import (
    DiffusionEvent,
    DiffusionFacts,
    DiffusionRankSettings,
    Generate,
    Generated,
    PayloadTaken,
)
from diffusion_service.model.adaln import Modulation
from diffusion_service.model.attention import (
    attend_with,
    choose,
    join_qkv,
    norm_and_rotate_in_one_pass,
    use_attention,
)
from diffusion_service.model.compile import compile_blocks
from diffusion_service.model.dit import Dit
from diffusion_service.model.lora import LoraDeltas
from diffusion_service.model.quantize import Quantizer, check_device
from diffusion_service.model.wardrobe import Wardrobe
from diffusion_service.parallel.tensor import DIT_PLAN, use_local_heads
from diffusion_service.parallel.ulysses import SequenceShard, attend_by_heads
from diffusion_service.parallel.vae_tiles import video_decoder
from diffusion_service.sampling.decode import Chunks, VideoDecoder
from diffusion_service.sampling.generate import Generator
from diffusion_service.sampling.media import MediaConditioner
from shared_runtime.conditioning.blocks import Pipeline
from shared_runtime.conditioning.latents import MediaEncoder
from shared_runtime.conditioning.packing import Conditions, unpack
from shared_runtime.conditioning.vae_tiles import Mode
from shared_runtime.device_memory import locker_for
from shared_runtime.logs import set_up_logging
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.worker import Beater, TaskHandle, rank_main
from shared_runtime.sharding import Sharding
from shared_runtime.transport.codec import check_values
from shared_runtime.transport.shm import SlabReader
from shared_runtime.weights import load_audio_vae, load_scheduler, load_transformer, load_video_vae, weight_bytes
from shared_schema.deploy.model import AttentionBackend, DiffusionStage, Precision
from shared_schema.deploy.settings import PARTITION_TASKS, Partition, partition_of
from shared_schema.encoder_output import EncoderOutput
from shared_schema.errors import AdapterError, DeployError, H3Error, TransportError
from shared_schema.layout import Layout
from shared_schema.videos import Execution

logger = logging.getLogger(__name__)

LONGEST_ROWS = 110_000
"""Of the packed sequence of 362 frames on the largest canvas."""


class DiffusionRank:
    """The commands of the diffusion service, on one rank."""

    def __init__(self, comm: RankComm, settings: DiffusionRankSettings, beater: Beater) -> None:
        device = comm.device
        self._comm = comm
        components = _load(settings, comm, beater)
        transformers: dict[Partition, Any] = {name: components[name] for name in PARTITION_TASKS if name in components}
        dtype = next(next(iter(transformers.values())).transformer_blocks.parameters()).dtype
        attention = choose(settings.stage.diffusion_attention_backend, device, dtype)
        dits = {name: fit(each, settings.stage, attention, comm, beater) for name, each in transformers.items()}
        sharding = Sharding(DIT_PLAN, comm)
        self._wardrobes = {name: Wardrobe(settings.checkpoint, name, dit, sharding, comm) for name, dit in dits.items()}
        precision = settings.stage.decode_precision
        vae, patch = components.get("vae"), settings.stage.parallel_config.vae_patch_parallel_size

        compiled = device.type == "cuda" and not settings.stage.enforce_eager

        def decoder(pipeline: Pipeline) -> VideoDecoder:
            chunks = None if vae is None else Chunks(vae, pipeline.pixel_mean, pipeline.pixel_std, precision)
            if chunks is not None and compiled:
                compile_blocks(chunks.vae.decoder.transformer_blocks)
                warm_up("the video decoder", chunks.warm_up, beater)
            return video_decoder(chunks, comm, patch)

        self._generator = Generator(
            settings.checkpoint, settings.tasks, components, dits, comm, decoder, settings.stage.x264
        )
        self._media = None
        held = [weight_bytes(part) for part in components.values() if isinstance(part, torch.nn.Module)]
        held += [dit.modulation.resident_bytes for dit in dits.values()]
        if settings.stage.text_only:
            mode: Mode = "patch" if patch > 1 else "leader"
            encoder = MediaEncoder.load(settings.checkpoint, comm, mode, beater.beat, dummy=settings.stage.dummy)
            self._media = MediaConditioner(settings.checkpoint, encoder, comm)
            held.append(encoder.weight_bytes)
        self._locker = locker_for(device)
        self._slabs = SlabReader(settings.slab_folder, self._locker.lock if self._locker else None)
        self._all_read = not comm.any(not self._can_read(settings.slab))
        self.facts = DiffusionFacts(
            device=str(device),
            torch=str(torch.__version__),
            weight_bytes=sum(held),
            load_format=settings.stage.load_format,
            execution=_execution(settings.stage, device, precision, dtype, attention),
        )

    def handle(self, command: object, task: TaskHandle) -> object:
        """Do one command; see `diffusion_service.commands`."""
        match command:
            case Generate():
                return self._generate(command, task)
            case _:
                raise TypeError(f"a diffusion rank does not know {type(command).__name__}")

    def _generate(self, command: Generate, task: TaskHandle) -> Generated:
        conditions, layout = self._receive(command)
        task.report(PayloadTaken())
        timings: dict[str, float] = {}
        if command.media is not None:
            assert self._media is not None
            completed = self._media.complete(conditions, command.media, task.step, task.beat)
            conditions, layout, timings = completed.conditions, completed.layout, completed.timings
        assert layout is not None

        def tell(event: DiffusionEvent) -> None:
            task.report(event)
            task.step()

        self._wardrobes[partition_of(command.task)].wear(command.adapter, task.beat)
        made = self._generator.generate(command, conditions, layout.blocks, layout.keyframes, tell, task.beat)
        return replace(made, timings={**timings, **made.timings})

    def _can_read(self, slab: Path) -> bool:
        """Whether the slab is on this rank's host; it is mapped, and page-locked where there is a GPU, from here on."""
        try:
            self._slabs.whole(str(slab))
        except TransportError:
            return False
        return True

    def _receive(self, command: Generate) -> tuple[Conditions, Layout | None]:
        """The payload on every rank, which then needs its landing no more. A collective.

        Where all ranks can read the slab they do: that beats a broadcast (`benchmarks/results/transport_cuda.json`).
        """
        if not self._all_read:
            return self._comm.from_leader(lambda: self._take(command))
        taken, error = None, None
        try:
            taken = self._take(command)
        except H3Error as raised:
            error = raised
        self._comm.agree(error)
        assert taken is not None
        return taken

    def _take(self, command: Generate) -> tuple[Conditions, Layout | None]:
        """Copy the payload off its landing, straight onto this rank's device."""
        payload = EncoderOutput(manifest=command.manifest, data=self._slabs.view(command.landing))
        if self._comm.is_leader:
            check_values(payload)
        return unpack(payload, self._comm.device, self._locker), payload.layout


def _load(settings: DiffusionRankSettings, comm: RankComm, beater: Beater) -> dict[str, Any]:
    """Only what this rank needs: no tokenizer, no processor, no encoder half, no partition nobody asks for."""
    path, device, dummy = settings.checkpoint, comm.device, settings.stage.dummy
    if settings.stage.diffusion_quantization_config is not None:
        check_device(device)
    sharding = Sharding(DIT_PLAN, comm)
    components: dict[str, Any] = {
        "scheduler": load_scheduler(path, "scheduler"),
        "audio_scheduler": load_scheduler(path, "audio_scheduler"),
    }
    if comm.is_leader:
        components["audio_vae"] = load_audio_vae(path, "decoder", device, dummy=dummy)
    if comm.is_leader or settings.stage.parallel_config.vae_patch_parallel_size > 1:
        components["vae"] = load_video_vae(path, "decoder", device, dummy=dummy)
    beater.beat()
    for partition, tasks in PARTITION_TASKS.items():
        if settings.tasks & tasks:
            deltas = _deltas(settings.adapter, partition, device)
            components[partition] = _load_transformer(settings.stage, path, partition, device, sharding, deltas)
            beater.beat()
    return components


def _load_transformer(
    stage: DiffusionStage,
    path: Path,
    partition: Partition,
    device: torch.device,
    sharding: Sharding,
    deltas: LoraDeltas | None,
) -> Any:
    """One partition, its linears quantized where the stage says so."""
    quantization = stage.diffusion_quantization_config
    if quantization is None:
        return load_transformer(path, partition, device, sharding, dummy=stage.dummy, deltas=deltas)
    quantizer = Quantizer(quantization.transformer.ignored_layers)
    transformer = load_transformer(
        path, partition, device, sharding, dummy=stage.dummy, deltas=deltas, place=quantizer.place
    )
    quantizer.fit(transformer)
    return transformer


def _deltas(adapter: Adapter | None, partition: Partition, device: torch.device) -> LoraDeltas | None:
    if adapter is None or adapter.partition != partition:
        return None
    logger.info("adapter %s: merging %d modules into %s", adapter.name, len(adapter.modules), partition)
    try:
        return LoraDeltas(adapter, device)
    except AdapterError as error:
        raise DeployError(error.message) from error


def fit(transformer: Any, stage: DiffusionStage, attention: AttentionBackend, comm: RankComm, beater: Beater) -> Dit:
    """This rank's share of a partition, made to work with the others' and, on GPUs, as fast as it can."""
    attend, split = attend_with(attention), None
    use_local_heads(transformer, comm)
    use_attention(transformer, attend)
    if comm.size("ulysses") > 1:
        split = SequenceShard(comm)
        attend = attend_by_heads(split, attention)
        use_attention(transformer.transformer_blocks, attend)
    on_gpu = comm.device.type == "cuda"
    dit = Dit(transformer, Modulation(transformer, on_host=on_gpu and comm.world_size == 1), split)
    beater.beat()
    if on_gpu:
        join_qkv(transformer, attend, norm_and_rotate_in_one_pass())
    if on_gpu and not stage.enforce_eager:
        compile_blocks(transformer.transformer_blocks)
        warm_up("the transformer's blocks", lambda: dit.warm_up(LONGEST_ROWS), beater)
    return dit


def warm_up(what: str, compile_: Callable[[], None], beater: Beater) -> None:
    """Compile something now, and say how long it took."""
    begun = time.perf_counter()
    compile_()
    beater.beat()
    logger.info("compiled %s in %.1f s", what, time.perf_counter() - begun)


def _execution(
    stage: DiffusionStage, device: torch.device, precision: Precision, dtype: torch.dtype, attention: AttentionBackend
) -> Execution:
    products = "" if stage.diffusion_quantization_config is None else " with fp8 products"
    return Execution(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=str(torch.__version__),
        tp=stage.parallel_config.tensor_parallel_size,
        ulysses=stage.parallel_config.ulysses_degree,
        precision=f"dit {str(dtype).removeprefix('torch.')}{products}, vae decode {precision}",
        attention=attention,
        load_format=stage.load_format,
    )


def build(comm: RankComm, settings: object, beater: Beater) -> DiffusionRank:
    """Load a diffusion rank; see `shared_runtime.ranks.worker.BuildService`."""
    assert isinstance(settings, DiffusionRankSettings)
    set_up_logging(settings.log_level, comm.spec.name, settings.log_format)
    return DiffusionRank(comm, settings, beater)


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    """Entry of the rank process, named by `diffusion_service.settled`."""
    rank_main(build, spec, settings, end)
