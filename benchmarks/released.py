"""A folder of configs with the released sizes and no weights: what `load_format: dummy` takes.

    python -m benchmarks.released DIR

The transformers, VAEs and schedulers are diffusers' defaults, which are the released geometry; the text encoder is
Qwen3-VL 32B. Tokenizer and processor are the tiny checkpoint's: a byte is a token.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from shared_runtime.tiny import build_tiny, tiny_checkpoint

SOUND = {"latents_mean": [0.0] * 32, "latents_std": [1.0] * 32}
CANVAS = {"canvas_short_edge": 768, "canvas_max_pixels": 768 * 1344, "reference_image_short_edge": 2048}
TEXT: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}
MROPE = [24, 20, 20]
VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 5120,
}


def write_released(folder: Path, layers: int | None = None) -> None:
    """Write the configs into `folder`.

    Args:
        folder: made if need be.
        layers: of the transformers, where fewer than the released 50 are wanted.
    """
    with tempfile.TemporaryDirectory() as scratch:
        build_tiny(Path(scratch))
        shutil.copytree(scratch, folder, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    depth = {} if layers is None else {"num_layers": layers}
    for partition in ("transformer", "transformer_ref"):
        wide = {"_class_name": "MiniMaxH3Transformer3DModel", "text_dim": TEXT["hidden_size"]}
        _write(folder / partition / "config.json", {**wide, **depth})
    _write(folder / "vae" / "config.json", {"_class_name": "AutoencoderKLMiniMaxH3"})
    sound = {"_class_name": "AutoencoderKLMiniMaxH3Audio", **SOUND}
    _write(folder / "audio_vae" / "config.json", sound)
    index = json.loads((folder / "modular_model_index.json").read_text())
    _write(folder / "modular_model_index.json", {**index, **CANVAS})
    text = json.loads((folder / "text_encoder" / "config.json").read_text())
    text["text_config"].update(TEXT)
    text["text_config"]["rope_parameters"]["mrope_section"] = MROPE
    text["vision_config"].update(VISION)
    _write(folder / "text_encoder" / "config.json", text)


def checkpoint(folder: Path, layers: int | None = None, *, tiny: bool) -> Path:
    """The tiny checkpoint, or else `folder` with the released configs."""
    if tiny:
        return tiny_checkpoint()
    write_released(folder, layers)
    return folder


def _write(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a folder of configs with the released sizes.")
    parser.add_argument("folder", type=Path)
    write_released(parser.parse_args().folder)
