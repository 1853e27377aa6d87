"""A request through an encoder rank: what is done to its files, and how often."""

import gc
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from PIL import Image

from encoder_service.pipeline import EncoderPipeline
from shared_runtime.conditioning import decode_ahead
from shared_runtime.conditioning.latents import MediaEncoder
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_processor, load_text_encoder, load_tokenizer
from shared_schema.deploy.load import load_deployment
from shared_schema.encode import EncodeProgress, EncodeRequest, ReferenceInput, ReferenceKind
from shared_schema.tasks import Task


@pytest.fixture(scope="module")
def pipeline() -> EncoderPipeline:
    return made(with_vae=True)


@pytest.fixture(scope="module")
def text_alone() -> EncoderPipeline:
    return made(with_vae=False)


def made(*, with_vae: bool) -> EncoderPipeline:
    path, cpu = tiny_checkpoint(), torch.device("cpu")
    comm = RankComm(RankSpec("alone", 0, Mesh(), "cpu"), cpu)
    components = {
        "text_encoder": load_text_encoder(path, cpu),
        "tokenizer": load_tokenizer(path),
        "processor": load_processor(path),
    }
    stage = load_deployment("tiny").encoder
    media = MediaEncoder.load(path, comm, "patch", lambda: None, stage) if with_vae else None
    return EncoderPipeline(path, components, media, comm)


def request_of(*kinds: ReferenceKind, sound: bool = False) -> EncodeRequest:
    return EncodeRequest(
        request_id="0" * 32,
        task=Task.REF2VA,
        prompt="a lighthouse",
        height=64,
        width=64,
        num_frames=124,
        references=tuple(ReferenceInput(kind=kind, use_audio=sound) for kind in kinds),
    )


def test_text_and_vae_encoders_read_the_same_decoded_files(
    pipeline: EncoderPipeline, cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Counter[str] = Counter()
    open_video, open_image = av.open, Image.open

    def count(name: object) -> None:
        opened[str(name).rpartition("/")[2]] += 1

    def video(name: Any, *more: Any, **options: Any) -> Any:
        count(name)
        return open_video(name, *more, **options)

    def image(name: Any, *more: Any, **options: Any) -> Any:
        count(name)
        return open_image(name, *more, **options)

    monkeypatch.setattr(av, "open", video)
    monkeypatch.setattr(Image, "open", image)
    files = (cases / "vid_24fps.mp4", cases / "img_quad.png")
    encoded = pipeline.encode(
        request_of("video", "image", sound=True), files, lambda: None, lambda: None, lambda _: None
    )
    assert encoded is not None
    assert len(encoded.payload.manifest.slots) == 5
    # A video is opened for its size, to see what it is, for its pictures and its sound; a picture for its size, too.
    assert opened == {"vid_24fps.mp4": 4, "img_quad.png": 2}


class Held:
    """Bytes of numpy's arrays and Python's objects while a request is encoded, as Python accounts for them.

    Frames are such arrays, also where a tensor of a CPU rank has them; what torch and Pillow take is not seen.
    """

    def __init__(self, pipeline: EncoderPipeline, *files: Path) -> None:
        self.at: list[tuple[str, int]] = []
        """After every part that was told."""
        gc.collect()
        tracemalloc.start()
        try:
            pipeline.encode(request_of(*["video"] * len(files)), files, nothing, nothing, self._tell)  # type: ignore[list-item]
            _, self.most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    def _tell(self, part: EncodeProgress) -> None:
        now, _ = tracemalloc.get_traced_memory()
        self.at.append((part.stage, now))


def nothing() -> None:
    pass


FRAMES = 124 * 64 * 96 * 3
"""Bytes of the fixture's video on its canvas."""


@pytest.mark.steady
def test_of_several_videos_no_more_frames_are_on_the_host_than_of_the_largest(
    text_alone: EncoderPipeline, cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a VAE, as where the VAE has a GPU, nothing but the text encoder's two frames a second stays on the host.
    monkeypatch.setattr(decode_ahead, "SMALL_BYTES", 0)
    video = cases / "vid_24fps.mp4"
    Held(text_alone, video)
    alone, three = Held(text_alone, video), Held(text_alone, video, video, video)
    assert alone.most > FRAMES
    assert three.most < alone.most + FRAMES / 4


@pytest.mark.steady
def test_where_frames_wait_on_the_host_for_the_vae_each_goes_when_it_is_encoded(
    pipeline: EncoderPipeline, cases: Path
) -> None:
    held = Held(pipeline, *(cases / "vid_24fps.mp4",) * 3)
    tiles = [now for stage, now in held.at if stage == "vae"]
    assert tiles[0] > 3 * 0.9 * FRAMES
    assert tiles[-1] < 1.5 * FRAMES
