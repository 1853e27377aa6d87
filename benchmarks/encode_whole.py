"""The row of `benchmarks.encode` about a whole ref2va encode: a video with sound and two images, files to landing.

Ours is what an encoder rank does with a request, up to the payload in a slab. Stock is diffusers' blocks in FP32 over
the same text encoder (64 layers do not fit beside a second set of everything), up to its tensors.
"""

import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines import PipelineState
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3Ref2VAReferenceEncoderStep,
    MiniMaxH3Ref2VATextEncoderStep,
)
from PIL import Image

from benchmarks.device import Device
from benchmarks.encode_visual import Budget, apart
from encoder_service.outbox import Outbox
from encoder_service.pipeline import EncodedRequest, EncoderPipeline
from encoder_service.text import compile_layers
from encoder_service.vision import batch_vision
from shared_runtime.conditioning.blocks import assemble, run_block
from shared_runtime.conditioning.latents import MediaEncoder
from shared_runtime.conditioning.packing import unpack
from shared_runtime.device_memory import locker_for
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.tensor_float import tensor_float
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.slab import Slab
from shared_runtime.weights import (
    load_audio_vae,
    load_processor,
    load_text_encoder,
    load_tokenizer,
    load_video_vae,
)
from shared_schema.deploy.load import load_deployment
from shared_schema.deploy.model import EncoderStage
from shared_schema.encode import EncodeRequest, ReferenceInput
from shared_schema.encoder_output import EncoderOutput
from shared_schema.tasks import Task
from tests.cases.videos import Recipe, constant, write_video
from tests.end_to_end.clips import Medium
from tests.end_to_end.reference import reference_of

PROMPT = "the lighthouse of the first picture in the weather of the second, as the camera moves in the video"
SLAB_BYTES = 2**30
LEASE_S = 600.0


class WholeBench:
    """One request, again and again, over one text encoder."""

    def __init__(self, device: Device, folder: Path, scratch: Path, *, tiny: bool) -> None:
        self._device, self._folder, self._scratch = device, folder, scratch
        on = device.torch_device
        self._height, self._width, self._frames = (64, 96, 107) if tiny else (768, 1344, 124)
        side = (256, 256) if tiny else (2048, 2048)
        self._files = self._write_media(side)
        self._comm = RankComm(RankSpec("bench", 0, Mesh(), "cpu" if on.type == "cpu" else "0"), on)
        self._text = {
            "text_encoder": load_text_encoder(folder, on, dummy=True),
            "tokenizer": load_tokenizer(folder),
            "processor": load_processor(folder),
        }
        overrides = '{"0": {"load_format": "dummy"}}'
        self._stage: EncoderStage = load_deployment(
            "tiny" if on.type == "cpu" else "minimax_h3_disaggregated", overrides
        ).encoder

    def _write_media(self, side: tuple[int, int]) -> tuple[Path, ...]:
        random = np.random.default_rng(1)
        files = []
        for number in range(2):
            coarse = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            files.append(self._scratch / f"image{number}.png")
            Image.fromarray(coarse).resize(side, Image.Resampling.BICUBIC).save(files[-1])
        video = self._scratch / "video.mp4"
        write_video(
            video, Recipe(constant(24, self._frames / 24), width=max(self._width, 384), height=max(self._height, 256))
        )
        return (video, *files)

    def run(self, budget: Budget) -> dict[str, Any]:
        """Stock once, then ours, for which the text encoder is changed."""
        figures: dict[str, Any] = {"files": [path.name for path in self._files]}
        figures["stock_fp32"], stock = self._stock()
        if self._device.is_gpu:
            batch_vision(self._text["text_encoder"])
            compile_layers(self._text["text_encoder"])
        figures["ours"], ours = self._ours(budget)
        figures["ours"]["of_stock"] = round(figures["ours"]["s"] / figures["stock_fp32"]["s"], 4)
        figures["ours"] |= apart(ours, stock)
        return figures

    def _ours(self, budget: Budget) -> tuple[dict[str, Any], list[torch.Tensor]]:
        media = MediaEncoder.load(self._folder, self._comm, "patch", _nothing, self._stage)
        pipeline = EncoderPipeline(self._folder, self._text, media, self._comm)
        locker = locker_for(self._device.torch_device)
        slab = Slab.create(self._scratch, SLAB_BYTES, "bench")
        outbox = Outbox(ShmSender(self._scratch, on_map=locker.lock if locker else None), None, locker)
        made: list[EncodedRequest] = []
        payloads: list[list[torch.Tensor]] = []
        push: list[float] = []

        def work() -> None:
            request = self._request()
            encoded = pipeline.encode(request, self._files, _nothing, _nothing, lambda _: None)
            assert encoded is not None
            begun = time.perf_counter()
            manifest = outbox.keep(request.request_id, encoded.payload)
            landing = slab.reserve(manifest.nbytes, request.request_id, LEASE_S, time.time())
            outbox.push(request.request_id, landing)
            push.append(time.perf_counter() - begun)
            made[:] = [encoded]
            conditions = unpack(EncoderOutput(manifest=manifest, data=slab.view(landing)))
            payloads[:] = [[each.clone() for each in conditions.visual]]
            slab.release(landing)

        self._device.reset_peak()
        try:
            found = {**budget.measure(self._device, work), **self._device.memory()}
        finally:
            outbox.tidy()
            slab.close()
        stages = {name: round(seconds, 4) for name, seconds in made[0].timings.items()}
        return {**found, "stages_s": {**stages, "keep_and_push": round(push[-1], 4)}}, payloads[0]

    def _request(self) -> EncodeRequest:
        kinds = ("video", "image", "image")
        return EncodeRequest(
            request_id=uuid.uuid4().hex,
            task=Task.REF2VA,
            prompt=PROMPT,
            height=self._height,
            width=self._width,
            num_frames=self._frames,
            references=tuple(ReferenceInput(kind=kind) for kind in kinds),  # type: ignore[arg-type]
        )

    def _stock(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        on = self._device.torch_device
        vae = load_video_vae(self._folder, "encoder", on, dummy=True)
        sound = load_audio_vae(self._folder, "encoder", on, dummy=True)
        blocks = {
            "setup": MiniMaxH3Ref2VASetupStep(),
            "text": MiniMaxH3Ref2VATextEncoderStep(),
            "media": MiniMaxH3Ref2VAReferenceEncoderStep(),
        }
        pipeline = assemble(self._folder, blocks, {**self._text, "vae": vae, "audio_vae": sound}, on)
        stages: dict[str, float] = {}
        latents: list[torch.Tensor] = []

        def work() -> None:
            state = PipelineState()
            begun = time.perf_counter()
            kinds = ("video", "image", "image")
            references = [
                reference_of(Medium("reference", kind, path.name), path)
                for kind, path in zip(kinds, self._files, strict=True)
            ]
            stages["read"] = time.perf_counter() - begun
            given = {"prompt": PROMPT, "height": self._height, "width": self._width, "num_frames": self._frames}
            for name, value in {**given, "references": references}.items():
                state.set(name, value)
            for name, block in blocks.items():
                begun = time.perf_counter()
                run_block(block, pipeline, state)
                stages[name] = time.perf_counter() - begun
            latents[:] = state.get("condition_latents")

        self._device.reset_peak()
        with tensor_float(False):
            (seconds,) = self._device.seconds(work, 1, warm_ups=0)
        return {"s": round(seconds, 4), "stages_s": {name: round(each, 4) for name, each in stages.items()}}, latents


def _nothing() -> None:
    pass
