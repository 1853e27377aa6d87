"""What runs in a diffusion rank: load the DiT partitions and the decoders, then make clips. Torch."""

import logging
import socket
from typing import Any

import torch

from diffusion_service.commands import (
    DiffusionEvent,
    DiffusionFacts,
    DiffusionRankSettings,
    Generate,
    Generated,
    PayloadTaken,
)
from diffusion_service.parallel.vae_tiles import video_decoder
from diffusion_service.sampling.decode import Chunks, Precision, VideoDecoder
from diffusion_service.sampling.generate import Generator
from shared_runtime.conditioning.blocks import Pipeline
from shared_runtime.conditioning.packing import unpack
from shared_runtime.logs import set_up_logging
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.worker import Beater, TaskHandle, rank_main
from shared_runtime.transport.codec import check_values
from shared_runtime.transport.shm import SlabReader
from shared_runtime.weights import load_audio_vae, load_scheduler, load_transformer, load_video_vae, weight_bytes
from shared_schema.deploy.model import DiffusionStage
from shared_schema.encoder_output import EncoderOutput
from shared_schema.tasks import Task
from shared_schema.videos import Execution

logger = logging.getLogger(__name__)


class DiffusionRank:
    """The commands of the diffusion service, on one rank."""

    def __init__(self, comm: RankComm, settings: DiffusionRankSettings, beater: Beater) -> None:
        device = comm.device
        components = _load(settings, device, beater)
        precision = _decode_precision(settings.stage, device)
        vae, patch = components.get("vae"), settings.stage.parallel_config.vae_patch_parallel_size

        def decoder(pipeline: Pipeline) -> VideoDecoder:
            chunks = None if vae is None else Chunks(vae, pipeline.pixel_mean, pipeline.pixel_std, precision)
            return video_decoder(chunks, comm, patch)

        self._generator = Generator(settings.checkpoint, settings.tasks, components, comm, decoder)
        self._slabs = SlabReader(settings.slab_folder)
        self.facts = DiffusionFacts(
            device=str(device),
            torch=torch.__version__,
            weight_bytes=sum(weight_bytes(part) for part in components.values() if isinstance(part, torch.nn.Module)),
            execution=_execution(settings.stage, device, precision, components),
        )

    def handle(self, command: object, task: TaskHandle) -> object:
        """Do one command; see `diffusion_service.commands`."""
        match command:
            case Generate():
                return self._generate(command, task)
            case _:
                raise TypeError(f"a diffusion rank does not know {type(command).__name__}")

    def _generate(self, command: Generate, task: TaskHandle) -> Generated:
        payload = EncoderOutput(manifest=command.manifest, data=self._slabs.view(command.landing))
        check_values(payload)
        conditions = unpack(payload)
        layout = payload.layout
        assert layout is not None
        task.report(PayloadTaken())

        def tell(event: DiffusionEvent) -> None:
            task.report(event)
            task.step()

        return self._generator.generate(command, conditions, layout.blocks, layout.keyframes, tell, task.beat)


def _load(settings: DiffusionRankSettings, device: torch.device, beater: Beater) -> dict[str, Any]:
    """Only what this service needs: no tokenizer, no processor, no encoder half, no partition nobody asks for."""
    path = settings.checkpoint
    components: dict[str, Any] = {
        "scheduler": load_scheduler(path, "scheduler"),
        "audio_scheduler": load_scheduler(path, "audio_scheduler"),
        "vae": load_video_vae(path, "decoder", device),
        "audio_vae": load_audio_vae(path, "decoder", device),
    }
    beater.beat()
    if settings.tasks - {Task.REF2VA}:
        components["transformer"] = load_transformer(path, "transformer", device)
        beater.beat()
    if Task.REF2VA in settings.tasks:
        components["transformer_ref"] = load_transformer(path, "transformer_ref", device)
        beater.beat()
    return components


def _decode_precision(stage: DiffusionStage, device: torch.device) -> Precision:
    """The deploy file's choice, else the released reference's autocast on a GPU and FP32 on a CPU."""
    if stage.vae_decode_precision is not None:
        return stage.vae_decode_precision
    return "fp32" if device.type == "cpu" else "fp16"


def _execution(
    stage: DiffusionStage, device: torch.device, precision: Precision, components: dict[str, Any]
) -> Execution:
    transformer = components.get("transformer") or components["transformer_ref"]
    dtype = str(next(transformer.transformer_blocks.parameters()).dtype).removeprefix("torch.")
    return Execution(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        tp=stage.parallel_config.tensor_parallel_size,
        ulysses=stage.parallel_config.ulysses_degree,
        precision=f"dit {dtype}, vae decode {precision}",
        attention="native",
        load_format=stage.load_format,
    )


def build(comm: RankComm, settings: object, beater: Beater) -> DiffusionRank:
    """Load a diffusion rank; see `shared_runtime.ranks.worker.BuildService`."""
    assert isinstance(settings, DiffusionRankSettings)
    set_up_logging(settings.log_level, comm.spec.name)
    return DiffusionRank(comm, settings, beater)


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    """Entry of the rank process, named by `diffusion_service.app`."""
    rank_main(build, spec, settings, end)
