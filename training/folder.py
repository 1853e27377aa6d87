"""The checkpoint's folder: what the strict loaders of both services read, from trained modules. Torch."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Scheduler
from safetensors.torch import load_file, save_file

from shared_runtime.tiny import index, processor_config, tokenizer_config, write_json
from training import geometry, words

WEIGHTS = "diffusion_pytorch_model.safetensors"
POLL_S = 0.5
VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
PARTITIONS = ("transformer", "transformer_ref")
MAKERS = {
    "vae": geometry.video_vae,
    "audio_vae": geometry.audio_vae,
    "transformer": geometry.transformer,
    "transformer_ref": geometry.transformer,
}
"""Of the components that are trained, how each is made before its training."""


def write_frame(folder: Path, seed: int) -> None:
    """Everything that is not trained: index, schedulers, tokenizer, processor and the text encoder."""
    write_json(folder / "modular_model_index.json", index(geometry.CANVAS_SHORT_EDGE, geometry.CANVAS_MAX_PIXELS))
    for name, shift in (("scheduler", VIDEO_SHIFT), ("audio_scheduler", AUDIO_SHIFT)):
        write_json(
            folder / name / "scheduler_config.json", {"_class_name": MiniMaxH3Scheduler.__name__, "shift": shift}
        )
    for name in ("tokenizer", "processor"):
        write_json(folder / name / "tokenizer.json", words.demo_tokenizer())
        write_json(folder / name / "tokenizer_config.json", tokenizer_config())
    write_json(folder / "processor" / "processor_config.json", processor_config())
    encoder = geometry.text_encoder(seed)
    write_json(folder / "text_encoder" / "config.json", json.loads(encoder.config.to_json_string()))
    save_file(geometry.weights_of(encoder), folder / "text_encoder" / "model.safetensors", metadata={"format": "pt"})


def write_component(folder: Path, name: str, module: Any, weights: dict[str, torch.Tensor] | None = None) -> None:
    """One trained component, in the dtypes that the released checkpoint has.

    Args:
        folder: the checkpoint's.
        name: one of `MAKERS`.
        module: the component, for its configuration.
        weights: its values, where not the module's own; averaged ones for example.
    """
    stored = geometry.weights_of(module) if weights is None else weights
    if name in PARTITIONS:
        exact = tuple(module._keep_in_fp32_modules)
        stored = {
            key: value.float() if any(part in key for part in exact) else value.to(torch.bfloat16)
            for key, value in stored.items()
        }
    config = {key: value for key, value in dict(module.config).items() if not key.startswith("_")}
    write_json(folder / name / "config.json", {"_class_name": type(module).__name__, **config})
    # Whole, or not there: another stage may be waiting for it.
    partial = folder / name / f"{WEIGHTS}.part"
    save_file(stored, partial, metadata={"format": "pt"})
    partial.replace(folder / name / WEIGHTS)


def wait_for(component: Path) -> None:
    """Until a component's folder has its weights."""
    while not (component / WEIGHTS).is_file():
        time.sleep(POLL_S)


def begun(name: str, weights: Path | None) -> Any:
    """A component that is about to learn, in FP32: new, or with the weights in a component's folder.

    Raises:
        FileNotFoundError: there are none.
    """
    module = MAKERS[name]()
    if weights is not None:
        module.load_state_dict({key: value.float() for key, value in load_file(weights / WEIGHTS).items()})
    return module


def read_component(folder: Path, name: str) -> Any:
    """A component as `write_component` left it, in FP32.

    Raises:
        FileNotFoundError: it is not there: its stage has not run.
    """
    module = begun(name, folder / name)
    config = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
    known = {key: config[key] for key in ("latents_mean", "latents_std") if key in config}
    module.register_to_config(**known)
    return module


def megabytes(folder: Path) -> float:
    """Of all safetensors files, in millions of bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors")) / 1e6
