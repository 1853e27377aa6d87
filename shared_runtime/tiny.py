"""The tiny checkpoint: the released layout with small made-up weights; runs in any process, without torch.

`--model tiny` serves it and every test runs on it. Same bytes on every machine. Clips made from it are noise by design.

    python -m shared_runtime.tiny DIR
"""

import argparse
import fcntl
import itertools
import json
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared_runtime import tiny_tensors as t

Json = Mapping[str, object]
"""What a JSON file holds."""

_CONTENT = 3
"""Raise it with every change of a byte: cached folders of older contents are then left aside."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Their ids come after those of the vocabulary, which is 256 bytes here."""


def tiny_checkpoint(cache: Path | None = None) -> Path:
    """The folder of the tiny checkpoint, built on first use.

    Safe against other processes that ask at the same time: one builds, the others wait for it.

    Args:
        cache: folder to keep it in; `~/.cache/minimax-h3-serve` when not given.

    Raises:
        OSError: the folder cannot be written.
    """
    root = cache if cache is not None else Path.home() / ".cache" / "minimax-h3-serve"
    folder = root / f"tiny-{_CONTENT}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with (root / "tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _build_renamed(root, folder)
    return folder


def _build_renamed(root: Path, folder: Path) -> None:
    """Build beside `folder` and rename: whoever sees it sees it whole. The caller holds the lock."""
    for abandoned in root.glob(".tiny-*"):
        shutil.rmtree(abandoned)
    partial = Path(tempfile.mkdtemp(dir=root, prefix=".tiny-"))
    build_tiny(partial)
    partial.chmod(0o755)
    partial.rename(folder)


def build_tiny(folder: Path) -> None:
    """Write the whole checkpoint into `folder`, which is made if need be; files of the same name are replaced."""
    write_json(folder / "modular_model_index.json", index(64, 8192))
    write_json(folder / "scheduler" / "scheduler_config.json", {"_class_name": "MiniMaxH3Scheduler", "shift": 12.0})
    write_json(
        folder / "audio_scheduler" / "scheduler_config.json", {"_class_name": "MiniMaxH3Scheduler", "shift": 3.0}
    )
    for name in ("tokenizer", "processor"):
        write_json(folder / name / "tokenizer.json", tokenizer(byte_vocabulary(), []))
        write_json(folder / name / "tokenizer_config.json", tokenizer_config())
    write_json(folder / "processor" / "processor_config.json", processor_config())
    _write_text_encoder(folder / "text_encoder")
    for partition in ("transformer", "transformer_ref"):
        write_json(folder / partition / "config.json", _transformer_config())
        tensors = t.tensors(partition, t.transformer(), "F32")
        _write_shards(folder / partition, "diffusion_pytorch_model", tensors, (len(tensors) // 2,))
    for vae, config, names in (("vae", _video_config(), t.video_vae()), ("audio_vae", _audio_config(), t.audio_vae())):
        write_json(folder / vae / "config.json", config)
        _write_safetensors(folder / vae / "diffusion_pytorch_model.safetensors", t.tensors(vae, names, "F32"))


def _write_text_encoder(folder: Path) -> None:
    write_json(folder / "config.json", _text_encoder_config())
    tensors = t.tensors("text_encoder", t.text_encoder(), "BF16")
    # The last file holds nothing but layers that are never run, as the released one's last files do.
    names = [tensor.name for tensor in tensors]
    cuts = tuple(names.index(f"model.language_model.layers.{layer}.self_attn.q_proj.weight") for layer in (25, 50))
    _write_shards(folder, "model", tensors, cuts)


def write_json(path: Path, content: Json) -> None:
    """A JSON file as checkpoints have them; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_shards(folder: Path, stem: str, tensors: Sequence[t.Tensor], cuts: tuple[int, ...]) -> None:
    """Several files, cut before the tensors numbered `cuts`, and their index: the form of what is too large for one."""
    bounds = (0, *cuts, len(tensors))
    weight_map: dict[str, str] = {}
    for number, (start, end) in enumerate(itertools.pairwise(bounds), 1):
        file = f"{stem}-{number:05d}-of-{len(bounds) - 1:05d}.safetensors"
        _write_safetensors(folder / file, tensors[start:end])
        weight_map.update({tensor.name: file for tensor in tensors[start:end]})
    total = sum(len(tensor.data) for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / f"{stem}.safetensors.index.json", index)


def _write_safetensors(path: Path, tensors: Sequence[t.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + len(tensor.data)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join((struct.pack("<Q", len(text)), text, *(tensor.data for tensor in tensors))))


def index(short_edge: int, max_pixels: int) -> Json:
    """The file that names a checkpoint's components and the canvases that it was made for."""
    classes = {
        "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
        "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        "processor": ("transformers", "Qwen3VLProcessor"),
        "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
        "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
        "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
        "transformer_ref": ("diffusers", "MiniMaxH3Transformer3DModel"),
        "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
        "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    }
    sources = {"pretrained_model_name_or_path": None, "revision": None, "variant": None}
    components = {
        name: [None, None, {**sources, "subfolder": name, "type_hint": list(kind)}] for name, kind in classes.items()
    }
    return {
        "_blocks_class_name": "MiniMaxH3Blocks",
        "_class_name": "MiniMaxH3ModularPipeline",
        "canvas_short_edge": short_edge,
        "canvas_max_pixels": max_pixels,
        "reference_image_short_edge": short_edge,
        **components,
    }


def special_id(token: str, words: int = 256) -> int:
    """Id of one of `SPECIAL_TOKENS`, which come after a vocabulary of so many."""
    return words + SPECIAL_TOKENS.index(token)


def _text_encoder_config() -> Json:
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": special_id("<|image_pad|>"),
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "video_token_id": special_id("<|video_pad|>"),
        "vision_start_token_id": special_id("<|vision_start|>"),
        "vision_end_token_id": special_id("<|vision_end|>"),
        "text_config": _language_tower(),
        "vision_config": _vision_tower(),
    }


def _language_tower() -> Json:
    return {
        "dtype": "bfloat16",
        "head_dim": t.TEXT_HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": t.TEXT_HIDDEN,
        "intermediate_size": t.TEXT_FFN,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": t.TEXT_HEADS,
        "num_hidden_layers": t.TEXT_LAYERS,
        "num_key_value_heads": t.TEXT_KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
            "rope_theta": 5000000.0,
            "rope_type": "default",
        },
        "vocab_size": t.VOCABULARY,
    }


def _vision_tower() -> Json:
    return {
        "deepstack_visual_indexes": list(range(t.VISION_DEPTH)),
        "depth": t.VISION_DEPTH,
        "dtype": "bfloat16",
        "hidden_size": t.VISION_HIDDEN,
        "intermediate_size": t.VISION_FFN,
        "model_type": "qwen3_vl_vision",
        "num_heads": 2,
        "num_position_embeddings": t.VISION_POSITIONS,
        "out_hidden_size": t.TEXT_HIDDEN,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def tokenizer(vocabulary: dict[str, int], merges: list[list[str]]) -> Json:
    """A byte-level tokenizer. Without merges every byte of a text is a token."""
    added = [
        {
            "id": special_id(token, len(vocabulary)),
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        "normalizer": {"type": "NFC"},
        "padding": None,
        "post_processor": None,
        "pre_tokenizer": level,
        "truncation": None,
    }


def byte_vocabulary() -> dict[str, int]:
    """Byte by its character in a byte-level vocabulary: printable ones are themselves, the others go from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}


def tokenizer_config() -> Json:
    """Of the tokenizer, and of the processor that holds one."""
    return {
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3VLProcessor",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": "<|endoftext|>",
    }


def processor_config() -> Json:
    """How Qwen3-VL's processor makes patches of pictures."""
    vision = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "resample": 3,
        "temporal_patch_size": 2,
    }
    image = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"longest_edge": 65536, "shortest_edge": 4096}}
    video = {
        "cap_pixels_per_frame": False,
        "do_sample_frames": True,
        "fps": 2,
        "max_frames": 768,
        "min_frames": 4,
        "size": {"longest_edge": 786432, "shortest_edge": 4096},
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    return {
        "image_processor": {**vision, **image},
        "processor_class": "Qwen3VLProcessor",
        "video_processor": {**vision, **video},
    }


def _transformer_config() -> Json:
    return {
        "_class_name": "MiniMaxH3Transformer3DModel",
        "attention_head_dim": t.DIT_HEAD_DIM,
        "audio_in_channels": t.AUDIO_LATENT,
        "ffn_dim": t.DIT_FFN,
        "freq_dim": t.DIT_FREQ,
        "hidden_size": t.DIT_HIDDEN,
        "in_channels": t.VIDEO_LATENT,
        "num_attention_heads": t.DIT_HEADS,
        "num_layers": t.DIT_LAYERS,
        "num_refiner_layers": 1,
        "patch_size": [1, 2, 2],
        "rope_freq_dim": 2,
        "text_dim": t.TEXT_HIDDEN,
        "time_embed_dim": t.DIT_TIME,
        "time_embed_hidden_dim": t.DIT_HIDDEN,
    }


def _video_config() -> Json:
    return {
        "_class_name": "AutoencoderKLMiniMaxH3",
        "block_out_channels": [t.VIDEO_CHANNELS] * t.VIDEO_LEVELS,
        "decoder_attention_head_dim": 8,
        "decoder_num_attention_heads": t.VIDEO_DECODER // 8,
        "decoder_num_layers": t.VIDEO_DECODER_LAYERS,
        "decoder_num_register_tokens": t.REGISTERS,
        "latent_channels": t.VIDEO_LATENT,
        "latents_mean": [(i % 5 - 2) / 16 for i in range(t.VIDEO_LATENT)],
        "latents_std": [1 + (i % 7 - 3) / 16 for i in range(t.VIDEO_LATENT)],
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }


def _audio_config() -> Json:
    return {
        "_class_name": "AutoencoderKLMiniMaxH3Audio",
        "decoder_dim": t.AUDIO_DECODER,
        "decoder_kernel_sizes": list(t.AUDIO_DECODER_KERNELS),
        "encoder_dim": t.AUDIO_WIDTH,
        "encoder_rates": list(t.AUDIO_ENCODER_RATES),
        "latent_channels": t.AUDIO_LATENT,
        "latent_dim": t.AUDIO_TRUNK,
        "latents_mean": [(i % 3 - 1) / 16 for i in range(t.AUDIO_LATENT)],
        "latents_std": [1 + (i % 5 - 2) / 16 for i in range(t.AUDIO_LATENT)],
        "resblock_dilation_sizes": [[1]],
        "resblock_kernel_sizes": [3],
        "sampling_rate": 32000,
    }


def main() -> None:
    """Write the checkpoint into the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Write the tiny checkpoint.")
    parser.add_argument("folder", type=Path)
    build_tiny(parser.parse_args().folder)


if __name__ == "__main__":
    main()
