"""Fixture LoRA files for the tiny model, written without the safetensors library so that broken ones can be made."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HIDDEN = 64
"""Width of the tiny DiT."""
RANK = 4
TARGETS = tuple(f"blocks.{block}.attn.out_proj" for block in range(2))

Tensors = dict[str, NDArray[np.float32]]


def write(folder: Path) -> None:
    """Write all adapters."""
    _peft(folder / "lora_ok", _pairs(TARGETS))
    _peft(folder / "lora_nomatch", _pairs(["nope.layer"]))
    _peft(folder / "lora_partial", {**_pairs(TARGETS[:1]), **_pairs(["nope.layer"])})
    _peft(folder / "lora_nan", {name: np.full_like(value, np.nan) for name, value in _pairs(TARGETS).items()})
    (folder / "lora_empty").mkdir(exist_ok=True)
    kohya = ["lora_unet_" + target.replace(".", "_") for target in TARGETS]
    _save(folder / "lora_kohya" / "x.safetensors", _pairs(kohya, "lora_down.weight", "lora_up.weight"))
    _save(folder / "lora_prefixed" / "x.safetensors", _pairs([f"diffusion_model.{target}" for target in TARGETS]))
    whole = (folder / "lora_ok" / "adapter_model.safetensors").read_bytes()
    (folder / "lora_trunc.safetensors").write_bytes(whole[:300])


def _pairs(targets: Iterable[str], down: str = "lora_A.weight", up: str = "lora_B.weight") -> Tensors:
    random = np.random.default_rng(0)
    tensors: Tensors = {}
    for target in targets:
        tensors[f"{target}.{down}"] = (random.normal(size=(RANK, HIDDEN)) * 0.02).astype(np.float32)
        tensors[f"{target}.{up}"] = (random.normal(size=(HIDDEN, RANK)) * 0.02).astype(np.float32)
    return tensors


def _peft(folder: Path, tensors: Tensors) -> None:
    _save(folder / "adapter_model.safetensors", tensors)
    config = {"r": RANK, "lora_alpha": RANK, "target_modules": ["out_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _save(path: Path, tensors: Tensors) -> None:
    header: dict[str, object] = {}
    blob = b""
    for name, value in tensors.items():
        offsets = [len(blob), len(blob) + value.nbytes]
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": offsets}
        blob += value.tobytes()
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)
