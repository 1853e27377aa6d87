"""The text-only split through HTTP: payloads are text alone, the diffusion ranks encode the media, clips are equal."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared_runtime.stored import Component, stored_tensors
from tests.end_to_end import processes
from tests.end_to_end.bad_requests import GOOD
from tests.end_to_end.clips import EQUAL_CLIPS, TEXT, Clip
from tests.end_to_end.pair import Pair, make_pair
from tests.end_to_end.test_own_encoder_output import encode

pytestmark = pytest.mark.slow

TEXT_ONLY = """
base_config: tiny
stages:
  - stage_id: 0
    hf_overrides: {minimax_h3_encoder_components: {video_vae: null, audio_vae: null}}
  - stage_id: 1
    model_loaded: {text_encoder: false, vae_encoder: true}
"""
ITEM_BYTES = {"BF16": 2, "F32": 4}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Pair]:
    """A pair whose encoder has no file of any VAE."""
    root = tmp_path_factory.mktemp("text")
    (root / "text.yaml").write_text(TEXT_ONLY)
    bare = root / checkpoint.name
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("vae", "audio_vae", "transformer*"))
    pair = make_pair(root, str(checkpoint), base="text.yaml")
    pair.encoder.arguments[pair.encoder.arguments.index("--model") + 1] = str(bare)
    with pair.running():
        yield pair


@pytest.mark.parametrize("clip", EQUAL_CLIPS, ids=lambda clip: clip.name)
def test_clips_are_those_of_the_full_split(
    pair: Pair, cases: Path, digests: dict[str, dict[str, str]], clip: Clip
) -> None:
    video = pair.completed(pair.submit(clip.fields(), clip.parts(cases)))
    assert {name: video[name] for name in ("frames_sha256", "audio_sha256")} == digests[clip.name]
    references = video["references"]
    assert isinstance(references, list)
    assert [each["index"] for each in references] == list(range(len(clip.media)))
    processes.wait_until(lambda: not pair.unfinished_files(), 10, "the inputs go right after the job")


def test_a_payload_is_text_alone(pair: Pair, cases: Path) -> None:
    mixed = next(clip for clip in EQUAL_CLIPS if clip.name == "ref2va_mixed")
    with httpx.Client(base_url=pair.encoder.url, timeout=60) as encoder:
        blob = encode(encoder, mixed, cases)
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    assert set(header) - {"__metadata__"} == {"hidden_states.output", "meta.token_role_ids"}


def test_the_diffusion_service_has_the_media_encoders_and_says_so(pair: Pair, checkpoint: Path) -> None:
    def stored(*components: Component) -> int:
        return sum(
            ITEM_BYTES[tensor.dtype] * _elements(tensor.shape)
            for component in components
            for tensor in stored_tensors(checkpoint, component).values()
        )

    (encoder,) = httpx.get(f"{pair.encoder.url}/health").json()["ranks"]
    (diffusion,) = httpx.get(f"{pair.diffusion.url}/health").json()["ranks"]
    # Buffers that no file holds are a little on top.
    assert encoder["weight_bytes"] == pytest.approx(stored("text_encoder"), rel=0.01)
    halves: tuple[Component, ...] = ("vae_encoder", "vae_decoder", "audio_vae_encoder", "audio_vae_decoder")
    assert diffusion["weight_bytes"] == pytest.approx(stored("transformer", "transformer_ref", *halves), rel=0.01)
    layout = pair.client.get("/v1/models").json()["data"][0]["layout"]
    assert layout["diffusion"]["split"] == "text-only"
    assert "video_vae" not in layout["encoder"]


def test_a_callers_own_payload_is_refused(pair: Pair) -> None:
    jobs = pair.job_count()
    parts = [("encoder_output", ("mine.safetensors", b"\0" * 64, "application/octet-stream"))]
    answer = pair.post(GOOD, parts)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "encoder_output")
    assert "text-only split" in answer.json()["error"]["message"]
    assert pair.client.get("/v1/limits").json()["bytes"]["max_encoder_output"] == 0
    assert pair.job_count() == jobs


def test_a_cancelled_job_leaves_the_next_one_whole(pair: Pair, cases: Path, digests: dict[str, dict[str, str]]) -> None:
    mixed = next(clip for clip in EQUAL_CLIPS if clip.name == "ref2va_mixed")
    job = pair.submit({**mixed.fields(), "num_inference_steps": "60"}, mixed.parts(cases))
    pair.wait_phase(job, "denoising")
    assert pair.client.post(f"/v1/videos/{job}/cancel").json()["status"] == "cancelled"
    assert pair.completed(pair.submit(TEXT.fields()))["frames_sha256"] == digests[TEXT.name]["frames_sha256"]
    assert httpx.get(f"{pair.diffusion.url}/health").json()["restarts"] == 0


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
