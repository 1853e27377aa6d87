"""A request through an encoder rank: what is done to its files, and how often."""

from collections import Counter
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from PIL import Image

from encoder_service.pipeline import EncoderPipeline
from shared_runtime.conditioning.latents import MediaEncoder
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_processor, load_text_encoder, load_tokenizer
from shared_schema.deploy.load import load_deployment
from shared_schema.encode import EncodeRequest, ReferenceInput
from shared_schema.tasks import Task


@pytest.fixture(scope="module")
def pipeline() -> EncoderPipeline:
    path, cpu = tiny_checkpoint(), torch.device("cpu")
    comm = RankComm(RankSpec("alone", 0, Mesh(), "cpu"), cpu)
    components = {
        "text_encoder": load_text_encoder(path, cpu),
        "tokenizer": load_tokenizer(path),
        "processor": load_processor(path),
    }
    media = MediaEncoder.load(path, comm, "patch", lambda: None, load_deployment("tiny").encoder)
    return EncoderPipeline(path, components, media, comm)


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
    request = EncodeRequest(
        request_id="0" * 32,
        task=Task.REF2VA,
        prompt="a lighthouse",
        height=64,
        width=64,
        num_frames=107,
        references=(ReferenceInput(kind="video"), ReferenceInput(kind="image")),
    )
    encoded = pipeline.encode(request, files, lambda: None, lambda: None, lambda _: None)
    assert encoded is not None
    assert len(encoded.payload.manifest.slots) == 5
    # A video is opened to see what it is, for its pictures, and for its sound.
    assert opened == {"vid_24fps.mp4": 3, "img_quad.png": 1}
