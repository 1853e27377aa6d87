"""Strict loading: only what is run, bit-equal to the whole model, and every wrong tensor named."""

import json
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from shared_runtime.tiny import build_tiny
from shared_runtime.weights import (
    load_audio_vae,
    load_processor,
    load_scheduler,
    load_text_encoder,
    load_tokenizer,
    load_transformer,
    load_video_vae,
    tensor_readers,
    weight_bytes,
)
from shared_schema.errors import DeployError

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")

IMAGE_PAD = 262


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(folder)
    return folder


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return shutil.copytree(tiny, tmp_path / "broken")


def test_files_are_read_beside_each_other(tiny: Path) -> None:
    both, seen = threading.Barrier(2, timeout=10), threading.local()

    def place(_name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not hasattr(seen, "began"):
            seen.began = True
            both.wait()
        return tensor

    load_transformer(tiny, "transformer", "cpu", place=place)


@torch.no_grad()
def test_the_text_encoder_equals_the_whole_model_bit_for_bit(tiny: Path) -> None:
    whole = Qwen3VLForConditionalGeneration.from_pretrained(tiny / "text_encoder").eval()
    cut = load_text_encoder(tiny, "cpu")
    processor, tokenizer = load_processor(tiny), load_tokenizer(tiny)
    vision = dict(processor.image_processor(images=[Image.linear_gradient("L").convert("RGB")], return_tensors="pt"))
    pads = int(vision["image_grid_thw"].prod()) // 4
    text = tokenizer("a red kite", add_special_tokens=False)["input_ids"]
    for ids, inputs in ((text, {}), ([259] + [IMAGE_PAD] * pads + [260, *text], vision)):
        expected = get_qwen3vl_prompt_embeds(whole, processor, ids, inputs)
        found = get_qwen3vl_prompt_embeds(cut, processor, ids, inputs)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)


def test_the_text_encoder_holds_fifty_layers_and_says_its_full_depth(tiny: Path) -> None:
    cut = load_text_encoder(tiny, "cpu")
    assert len(cut.model.language_model.layers) == 50
    assert cut.config.text_config.num_hidden_layers == 52
    names = [name for name, _ in cut.named_parameters()]
    assert not [name for name in names if "lm_head" in name or name.startswith("model.language_model.norm")]
    assert {p.dtype for p in cut.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_the_video_encoder_half_encodes_as_the_whole_does(tiny: Path) -> None:
    whole, half = AutoencoderKLMiniMaxH3.from_pretrained(tiny / "vae").eval(), load_video_vae(tiny, "encoder", "cpu")
    pixels = torch.linspace(-1, 1, 3 * 22 * 64 * 64).reshape(1, 3, 22, 64, 64)
    moments = [vae.encode(pixels).latent_dist.parameters for vae in (whole, half)]
    assert torch.equal(*moments)


@torch.no_grad()
def test_the_video_decoder_half_decodes_as_the_whole_does(tiny: Path) -> None:
    whole, half = AutoencoderKLMiniMaxH3.from_pretrained(tiny / "vae").eval(), load_video_vae(tiny, "decoder", "cpu")
    latents = torch.linspace(-2, 2, 24 * 7 * 4 * 4).reshape(1, 24, 7, 4, 4)
    assert torch.equal(whole.decode(latents).sample, half.decode(latents).sample)


@torch.no_grad()
def test_the_audio_halves_equal_the_whole(tiny: Path) -> None:
    whole = AutoencoderKLMiniMaxH3Audio.from_pretrained(tiny / "audio_vae").eval()
    wave = torch.linspace(-40, 40, 16000).sin().reshape(2, 1, 8000)
    latents = whole.encode(wave).latent_dist.mode()
    assert torch.equal(load_audio_vae(tiny, "encoder", "cpu").encode(wave).latent_dist.mode(), latents)
    assert torch.equal(load_audio_vae(tiny, "decoder", "cpu").decode(latents).sample, whole.decode(latents).sample)


@pytest.mark.parametrize("load", [load_video_vae, load_audio_vae])
def test_the_other_half_of_a_vae_does_not_exist(tiny: Path, load: Callable[..., Any]) -> None:
    for half, other in (("encoder", "decoder"), ("decoder", "encoder")):
        vae = load(tiny, half, "cpu")
        assert not hasattr(vae, other)
        assert {p.dtype for p in vae.parameters()} == {torch.float32}
        assert type(vae).__name__.startswith("AutoencoderKLMiniMaxH3")
        assert vae.config.latents_mean


@pytest.mark.parametrize("partition", ["transformer", "transformer_ref"])
def test_a_partition_holds_what_its_files_hold(
    tiny: Path, partition: Literal["transformer", "transformer_ref"]
) -> None:
    loaded = load_transformer(tiny, partition, "cpu")
    whole = MiniMaxH3Transformer3DModel.from_pretrained(tiny / partition)
    expected = whole.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert torch.equal(loaded.rope.inv_freq, whole.rope.inv_freq)
    assert not loaded.training


def test_a_partition_keeps_mixed_dtypes(broken: Path) -> None:
    for file in (broken / "transformer").glob("*.safetensors"):
        fp32 = ("proj_in", "proj_out", "time_embedder")
        mixed = {n: t if any(part in n for part in fp32) else t.bfloat16() for n, t in load_file(file).items()}
        save_file(mixed, file, metadata={"format": "pt"})
    loaded = load_transformer(broken, "transformer", "cpu")
    assert loaded.proj_in.weight.dtype == torch.float32
    assert loaded.transformer_blocks[0].attn.to_q.weight.dtype == torch.bfloat16


def test_nothing_is_left_without_memory(tiny: Path) -> None:
    for module in (load_text_encoder(tiny, "cpu"), load_audio_vae(tiny, "decoder", "cpu")):
        assert not [name for name, value in (*module.named_parameters(), *module.named_buffers()) if value.is_meta]
        assert weight_bytes(module) > 0


def test_a_weight_outlives_its_file(broken: Path) -> None:
    loaded = load_video_vae(broken, "decoder", "cpu")
    before = loaded.decoder.proj_in.weight.clone()
    file = broken / "vae" / "diffusion_pytorch_model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    assert torch.equal(loaded.decoder.proj_in.weight, before)


def test_readers_give_slices(tiny: Path) -> None:
    readers = {name: (stored, reader[:2]) for name, stored, reader in tensor_readers(tiny, "transformer", "cpu")}
    stored, part = readers["transformer_blocks.0.attn.to_q.weight"]
    assert stored.shape == (64, 64)
    assert part.shape == (2, 64)


def change_vae(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_missing_tensor_is_named(broken: Path) -> None:
    change_vae(broken, lambda tensors: tensors.pop("decoder.proj_in.weight"))
    with pytest.raises(DeployError, match=r"decoder\.proj_in\.weight: tensors missing from"):
        load_video_vae(broken, "decoder", "cpu")
    load_video_vae(broken, "encoder", "cpu")


def test_an_unexpected_tensor_is_named(broken: Path) -> None:
    change_vae(broken, lambda tensors: tensors.update({"decoder.extra.weight": torch.zeros(2)}))
    for half in ("encoder", "decoder"):
        with pytest.raises(DeployError, match=r"decoder\.extra\.weight: tensors not expected in"):
            load_video_vae(broken, half, "cpu")


def test_a_mis_shaped_tensor_is_named(broken: Path) -> None:
    change_vae(broken, lambda tensors: tensors.update({"quant_conv.bias": torch.zeros(47)}))
    with pytest.raises(DeployError, match=r"quant_conv\.bias in .* has shape \[47\], not \[48\]"):
        load_video_vae(broken, "encoder", "cpu")
    load_video_vae(broken, "decoder", "cpu")


def test_a_file_whose_tensors_overlap_is_named(broken: Path) -> None:
    file = broken / "vae" / "diffusion_pytorch_model.safetensors"
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    first, second, *_ = sorted(
        (each for each in header if each != "__metadata__"), key=lambda n: header[n]["data_offsets"]
    )
    begin, end = header[second]["data_offsets"]
    header[second]["data_offsets"] = [begin - 4, end - 4]
    assert header[first]["data_offsets"][1] == begin
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    with pytest.raises(DeployError, match=rf"{file.name} is not a whole safetensors file"):
        load_video_vae(broken, "encoder", "cpu")


def test_a_tensor_of_another_dtype_is_named(broken: Path) -> None:
    change_vae(broken, lambda tensors: tensors.update({"quant_conv.bias": torch.zeros(48, dtype=torch.float16)}))
    with pytest.raises(DeployError, match=r"quant_conv\.bias in .* is F16, not F32"):
        load_video_vae(broken, "encoder", "cpu")


def test_a_missing_text_layer_is_named(broken: Path) -> None:
    file = broken / "text_encoder" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"]["model.language_model.layers.49.mlp.up_proj.weight"]
    file.write_text(json.dumps(index))
    with pytest.raises(DeployError, match=r"layers\.49\.mlp\.up_proj\.weight: tensors missing"):
        load_text_encoder(broken, "cpu")


def test_a_shallow_text_encoder_is_refused(broken: Path) -> None:
    file = broken / "text_encoder" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["num_hidden_layers"] = 50
    file.write_text(json.dumps(config))
    with pytest.raises(DeployError, match="has 50 layers; the text encoder needs more than 50"):
        load_text_encoder(broken, "cpu")


def test_a_config_of_another_class_is_refused(broken: Path) -> None:
    (broken / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    with pytest.raises(DeployError, match="not a MiniMax-H3 checkpoint"):
        load_video_vae(broken, "encoder", "cpu")


def test_special_tokens_in_a_prompt_are_text(tiny: Path) -> None:  # case 71
    tokenizer = load_tokenizer(tiny)
    for text in ("<|image_pad|>", "<|im_end|>", "<|vision_start|>"):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == list(text.encode())
        assert tokenizer.convert_tokens_to_ids(text) >= 256


def test_the_processor_never_caps_pixels_per_frame(tiny: Path) -> None:
    assert load_processor(tiny).video_processor.cap_pixels_per_frame is False


def test_each_scheduler_keeps_its_shift(tiny: Path) -> None:
    assert load_scheduler(tiny, "scheduler").shift == 12.0
    assert load_scheduler(tiny, "audio_scheduler").shift == 3.0


@pytest.mark.parametrize("load", [load_tokenizer, load_processor])
def test_a_folder_without_files_is_named(load: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(DeployError, match=str(tmp_path)):
        load(tmp_path)
