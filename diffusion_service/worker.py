"""What runs in a diffusion rank: load the DiT partitions and the decoders, then make clips. Torch."""

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffusion_service.commands import (
    DiffusionEvent,
    DiffusionFacts,
    DiffusionRankSettings,
    Generate,
    PayloadTaken,
)
from diffusion_service.fitting import Fitter, held, load
from diffusion_service.model.attention import choose
from diffusion_service.model.compile import compile_blocks
from diffusion_service.model.turns import Turns
from diffusion_service.model.wardrobe import Wardrobe
from diffusion_service.parallel.tensor import DIT_PLAN
from diffusion_service.parallel.vae_tiles import video_decoder
from diffusion_service.sampling.decode import Chunks, VideoDecoder
from diffusion_service.sampling.generate import Generator, Timings
from diffusion_service.sampling.media import MediaConditioner
from shared_runtime.compiling import compile_now
from shared_runtime.conditioning.blocks import Pipeline
from shared_runtime.conditioning.latents import MediaEncoder
from shared_runtime.conditioning.packing import Conditions, unpack
from shared_runtime.conditioning.vae_tiles import Mode
from shared_runtime.device_memory import locker_for
from shared_runtime.logs import set_up_logging
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.worker import Beater, Rest, TaskHandle, rank_main
from shared_runtime.sharding import Sharding
from shared_runtime.transport.codec import check_values
from shared_runtime.transport.shm import SlabReader
from shared_schema.deploy.model import AttentionBackend, DiffusionStage
from shared_schema.deploy.settings import PARTITION_TASKS, Partition, partition_of
from shared_schema.encoder_output import EncoderOutput
from shared_schema.errors import H3Error, TransportError
from shared_schema.layout import Layout
from shared_schema.videos import Execution

logger = logging.getLogger(__name__)


class DiffusionRank:
    """The commands of the diffusion service, on one rank."""

    def __init__(self, comm: RankComm, settings: DiffusionRankSettings, beater: Beater) -> None:
        device, stage = comm.device, settings.stage
        self._comm = comm
        self._locker = locker_for(device)
        components = load(settings, comm, beater)
        transformers: dict[Partition, Any] = {name: components[name] for name in PARTITION_TASKS if name in components}
        dtype = next(next(iter(transformers.values())).transformer_blocks.parameters()).dtype
        attention = choose(stage.diffusion_attention_backend, device, dtype)
        turns = Turns()
        fitter = Fitter(stage, attention, comm, self._locker, turns)
        dits = {name: fitter.fit(name, each) for name, each in transformers.items()}
        beater.beat()
        sharding = Sharding(DIT_PLAN, comm)
        self._wardrobes = {name: Wardrobe(settings.checkpoint, name, dit, sharding, comm) for name, dit in dits.items()}
        decoder = self._decoder(stage, components, beater)
        self._generator = Generator(
            settings.checkpoint, settings.tasks, components, dits, comm, decoder, stage.x264, turns
        )
        fitter.park_decoders(components)
        for name, dit in dits.items():
            fitter.compile(name, dit, beater)
        media = self._media_encoder(settings, beater)
        self._media = None if media is None else MediaConditioner(settings.checkpoint, media, comm)
        self._slabs = SlabReader(settings.slab_folder, self._locker.lock if self._locker else None)
        holdings = held(components, dits, turns)
        self._all_read = not comm.any(not self._can_read(settings.slab))
        self.facts = DiffusionFacts(
            device=str(device),
            weight_bytes=holdings.resident + (0 if media is None else media.weight_bytes),
            offloaded_bytes=holdings.offloaded,
            load_format=stage.load_format,
            execution=_execution(settings, device, dtype, attention),
        )
        if device.type == "cuda":
            # What loading took is nobody's peak, and on a shared GPU others need it.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    def _decoder(
        self, stage: DiffusionStage, components: dict[str, Any], beater: Beater
    ) -> Callable[[Pipeline], VideoDecoder]:
        """What makes the video decoder once a pipeline says what pixels mean."""
        vae, patch = components.get("vae"), stage.parallel_config.vae_patch_parallel_size
        compiled = self._comm.device.type == "cuda" and not stage.enforce_eager

        def decoder(pipeline: Pipeline) -> VideoDecoder:
            pixels = pipeline.pixel_mean, pipeline.pixel_std
            chunks = None if vae is None else Chunks(vae, *pixels, stage.decode_precision)
            if chunks is not None and compiled:
                compile_blocks(chunks.vae.decoder.transformer_blocks)
                compile_now("the video decoder", chunks.warm_up, stage, beater.beat)
            return video_decoder(chunks, self._comm, patch)

        return decoder

    def _media_encoder(self, settings: DiffusionRankSettings, beater: Beater) -> MediaEncoder | None:
        """The text-only split's."""
        stage = settings.stage
        if not stage.text_only:
            return None
        mode: Mode = "patch" if stage.parallel_config.vae_patch_parallel_size > 1 else "leader"
        return MediaEncoder.load(settings.checkpoint, self._comm, mode, beater.beat, stage)

    def handle(self, command: object, task: TaskHandle) -> object:
        """Do one command; see `diffusion_service.commands`."""
        match command:
            case Generate():
                return self._generate(command, task)
            case _:
                raise TypeError(f"a diffusion rank does not know {type(command).__name__}")

    def _generate(self, command: Generate, task: TaskHandle) -> Rest | None:
        conditions, layout = self._receive(command)
        task.report(PayloadTaken())
        timings = Timings({})
        if command.media is not None:
            assert self._media is not None
            completed = self._media.complete(conditions, command.media, task.go_on, task.beat)
            conditions, layout, timings = completed.conditions, completed.layout, Timings(completed.timings)
        assert layout is not None

        def tell(event: DiffusionEvent) -> None:
            task.report(event)
            task.go_on()

        self._wardrobes[partition_of(command.task)].wear(command.adapter, task.beat)
        return self._generator.generate(command, conditions, layout.blocks, layout.keyframes, timings, tell, task.beat)

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


def _execution(
    settings: DiffusionRankSettings, device: torch.device, dtype: torch.dtype, attention: AttentionBackend
) -> Execution:
    stage = settings.stage
    vae = f"vae encode {settings.encode_precision}, vae decode {stage.decode_precision}"
    return Execution(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=str(torch.__version__),
        tp=stage.parallel_config.tensor_parallel_size,
        ulysses=stage.parallel_config.ulysses_degree,
        precision=f"dit {str(dtype).removeprefix('torch.')}{_products(stage)}, {vae}",
        attention=attention,
        load_format=stage.load_format,
    )


def _products(stage: DiffusionStage) -> str:
    """What is quantized, and what of that is left as it is."""
    quantization = stage.diffusion_quantization_config
    if quantization is None:
        return ""
    ignored = ", ".join(quantization.transformer.ignored_layers)
    return f" with fp8 products{f' but in {ignored}' if ignored else ''}"


def build(comm: RankComm, settings: object, beater: Beater) -> DiffusionRank:
    """Load a diffusion rank; see `shared_runtime.ranks.worker.BuildService`."""
    assert isinstance(settings, DiffusionRankSettings)
    set_up_logging(settings.log_level, comm.spec.name, settings.log_format)
    return DiffusionRank(comm, settings, beater)


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    """Entry of the rank process, named by `diffusion_service.settled`."""
    rank_main(build, spec, settings, end)
