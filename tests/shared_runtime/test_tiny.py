"""The tiny checkpoint: same bytes everywhere, built once, and a model that the released pipeline runs."""

import hashlib
import json
import multiprocessing
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference
from PIL import Image

from shared_runtime.tiny import SPECIAL_TOKENS, build_tiny, tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")

DIGEST = "1fcc745b2a8050e5db55cb87d7ccec17d04f793894d4ccb0e054d464a14e3d4f"
"""Of the whole folder. It changes only together with the content number in `tiny.py`."""

PROMPT = "a red kite over the sea"


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    loaded = ModularPipeline.from_pretrained(str(folder))
    loaded.load_components()
    loaded.set_progress_bar_config(disable=True)
    return loaded


def clip(pipeline: Any, prompt: str = PROMPT, **media: Any) -> tuple[Any, Any]:
    state = pipeline(
        prompt=prompt,
        num_frames=124,
        height=64,
        width=96,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
        **media,
    )
    return np.asarray(state.get("videos"))[0], np.asarray(state.get("audio"))[0]


def test_every_build_has_the_same_bytes(folder: Path) -> None:
    assert digest(folder) == DIGEST


def test_a_build_is_small_and_quick(tmp_path: Path) -> None:
    begin = time.process_time()
    build_tiny(tmp_path / "new")
    assert time.process_time() - begin < 5
    assert sum(p.stat().st_size for p in (tmp_path / "new").rglob("*")) < 10_000_000


def test_processes_that_build_at_once_share_one_folder(tmp_path: Path) -> None:
    (tmp_path / ".tiny-abandoned").mkdir()
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        folders = pool.map(tiny_checkpoint, [tmp_path] * 3)
    assert len(set(folders)) == 1
    assert digest(folders[0]) == DIGEST
    assert not list(tmp_path.glob(".tiny-*"))


def test_no_config_names_a_version(folder: Path) -> None:
    for path in folder.rglob("*.json"):
        assert "_version" not in path.read_text(), path


def test_the_partitions_differ_in_every_tensor(folder: Path) -> None:
    one, other = (tensors(folder / name) for name in ("transformer", "transformer_ref"))
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] == other[name]] == []


def tensors(component: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in component.glob("*.safetensors"):
        content = path.read_bytes()
        data = content[8 + len(header(content)) :]
        for name, entry in json.loads(header(content)).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found[name] = data[start:end]
    return found


def test_the_text_encoder_is_stored_in_bf16_and_the_rest_in_fp32(folder: Path) -> None:
    assert dtypes(folder / "text_encoder") == {"BF16"}
    for name in ("transformer", "transformer_ref", "vae", "audio_vae"):
        assert dtypes(folder / name) == {"F32"}, name


def dtypes(component: Path) -> set[str]:
    headers = (json.loads(header(path.read_bytes())) for path in component.glob("*.safetensors"))
    return {entry["dtype"] for each in headers for name, entry in each.items() if name != "__metadata__"}


def header(content: bytes) -> bytes:
    return content[8 : 8 + struct.unpack("<Q", content[:8])[0]]


def test_the_geometry_is_tiny(pipeline: Any) -> None:
    config = pipeline.config
    limits = (config.canvas_short_edge, config.canvas_max_pixels, config.reference_image_short_edge)
    assert limits == (64, 8192, 64)


def test_every_byte_is_a_token_and_specials_follow(pipeline: Any) -> None:
    text = "aé\n 漢<"
    assert pipeline.tokenizer(text, add_special_tokens=False)["input_ids"] == list(text.encode())
    assert pipeline.tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(256, 264))


def test_a_clip_has_a_moving_picture_and_a_sound(pipeline: Any) -> None:
    frames, sound = clip(pipeline)
    assert frames.shape == (124, 64, 96, 3)
    assert sound.shape == (2, 165600)
    assert np.isfinite(frames).all()
    assert np.isfinite(sound).all()
    assert frames.std(axis=(1, 2)).min() > 0.05
    assert frames.std(axis=0).min() > 0.01
    assert ((frames == 0) | (frames == 1)).mean() < 0.05
    assert sound.std(axis=1).min() > 0.05
    assert (np.abs(sound) >= 1).mean() < 1e-3
    assert np.abs(sound[0] - sound[1]).max() > 0.01


def test_two_hundred_steps_stay_moderate(pipeline: Any) -> None:
    state = pipeline(prompt=PROMPT, num_frames=124, height=64, width=64, num_inference_steps=200)
    for name in ("latents", "audio_latents"):
        assert state.get(name).abs().max() < 40, name


def test_one_letter_of_the_prompt_changes_the_clip(pipeline: Any) -> None:
    (frames, sound), (other_frames, other_sound) = clip(pipeline), clip(pipeline, prompt=PROMPT[:-1] + "t")
    assert np.abs(frames - other_frames).max() > 2 / 255
    assert np.abs(sound - other_sound).max() > 0.01


def test_keyframes_and_references_condition_the_clip(pipeline: Any) -> None:
    red, blue = Image.new("RGB", (96, 64), "red"), Image.new("RGB", (96, 64), "blue")
    for of in (lambda image: {"image": image}, lambda image: {"references": [MiniMaxH3ImageReference(image)]}):
        first, second = clip(pipeline, **of(red)), clip(pipeline, **of(blue))
        assert np.isfinite(first[0]).all()
        assert np.abs(first[0] - second[0]).max() > 2 / 255
        assert np.abs(first[1] - second[1]).max() > 0.01
