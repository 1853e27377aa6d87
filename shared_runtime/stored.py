"""What lies where in a checkpoint's folder, and what each component needs of it; any process, without torch.

The released layout: one folder a component, weights as safetensors, `modular_model_index.json` beside them. Each
service takes only what it runs: the encoder service half of both VAEs, 50 layers of the text encoder and no head.
"""

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared_schema.errors import DeployError

Component = Literal[
    "text_encoder",
    "tokenizer",
    "processor",
    "vae_encoder",
    "vae_decoder",
    "audio_vae_encoder",
    "audio_vae_decoder",
    "transformer",
    "transformer_ref",
    "scheduler",
    "audio_scheduler",
]

MEDIA_ENCODERS: frozenset[Component] = frozenset({"vae_encoder", "audio_vae_encoder"})
"""The encoder service's in the full split, the diffusion service's in the text-only split."""
INDEX = "modular_model_index.json"
TEXT_LAYERS = 50
"""Decoder layers of the text encoder whose last hidden state the model conditions on; later ones are never run."""

_FOLDERS: dict[Component, str] = {
    "vae_encoder": "vae",
    "vae_decoder": "vae",
    "audio_vae_encoder": "audio_vae",
    "audio_vae_decoder": "audio_vae",
}
_STEMS: dict[Component, str] = {
    "text_encoder": "model",
    "vae_encoder": "diffusion_pytorch_model",
    "vae_decoder": "diffusion_pytorch_model",
    "audio_vae_encoder": "diffusion_pytorch_model",
    "audio_vae_decoder": "diffusion_pytorch_model",
    "transformer": "diffusion_pytorch_model",
    "transformer_ref": "diffusion_pytorch_model",
}
_PARTS: dict[Component, tuple[str, ...]] = {
    "vae_encoder": ("encoder", "quant_conv"),
    "vae_decoder": ("decoder", "post_quant_conv"),
    "audio_vae_encoder": ("encoder", "pre_block", "mean_proj", "logs_proj"),
    "audio_vae_decoder": ("decoder", "dec_in_proj"),
}
"""Modules of a VAE that belong to its half."""
_TEXT_LAYER = re.compile(r"model\.language_model\.layers\.(\d+)\.")
_DESCRIPTIONS: dict[Component, tuple[str, ...]] = {
    "tokenizer": ("tokenizer.json", "vocab.json"),
    "processor": ("processor_config.json", "preprocessor_config.json"),
    "scheduler": ("scheduler_config.json",),
    "audio_scheduler": ("scheduler_config.json",),
}
"""Files of which one must be there; `config.json` for what is not named."""
_LONGEST_HEADER = 64 * 2**20


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies and what it is. `dtype` in safetensors' words, for example `BF16`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    place: slice
    """Its bytes in the file."""


@dataclass(frozen=True)
class StoredFile:
    """What the header of a safetensors file says."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def component_folder(path: Path, component: Component) -> Path:
    """The folder that `component` lies in."""
    return path / _FOLDERS.get(component, component)


def has_weights(component: Component) -> bool:
    """Whether a component is a module with tensors."""
    return component in _STEMS


def needs_tensor(component: Component, name: str) -> bool:
    """Whether `component` runs the tensor `name` of its folder."""
    if component in _PARTS:
        return name.split(".", 1)[0] in _PARTS[component]
    if component == "text_encoder":
        layer = _TEXT_LAYER.match(name)
        if layer is not None:
            return int(layer[1]) < TEXT_LAYERS
        return not name.startswith(("lm_head.", "model.language_model.norm."))
    return True


def unneeded_parts(component: Component) -> tuple[str, ...]:
    """Top-level modules of the other half of a VAE, which need not exist."""
    other: dict[Component, Component] = {
        "vae_encoder": "vae_decoder",
        "vae_decoder": "vae_encoder",
        "audio_vae_encoder": "audio_vae_decoder",
        "audio_vae_decoder": "audio_vae_encoder",
    }
    return _PARTS[other[component]]


def tensor_files(path: Path, component: Component) -> dict[str, Path]:
    """Every tensor that the component's index names, by the file it lies in; without an index, its single file's.

    Raises:
        DeployError: the component has no weights here, or its index is not one.
    """
    folder, stem = component_folder(path, component), _STEMS[component]
    index = folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in _weight_map(index).items()}
    single = folder / f"{stem}.safetensors"
    if not single.is_file():
        raise DeployError(f"{single} is missing, and so is {index.name}")
    return dict.fromkeys(_header(single), single)


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(
        isinstance(file, str) and file == Path(file).name and file.endswith(".safetensors") for file in found.values()
    ):
        raise DeployError(f"{index} has no weight_map from tensors to safetensors files beside it")
    return found


def missing_files(path: Path, needs: frozenset[Component], *, weights: bool = True) -> list[str]:
    """Files that the components of `needs` lack in `path`, relative to it, sorted; without `weights` only the others.

    Raises:
        DeployError: an index of weights cannot be read.
    """
    missing = set() if (path / INDEX).is_file() else {INDEX}
    for component in needs:
        folder = component_folder(path, component)
        names = _DESCRIPTIONS.get(component, ("config.json",))
        if not any((folder / name).is_file() for name in names):
            missing.add(f"{folder.name}/{names[0]}")
        if weights and has_weights(component):
            files = needed_weight_files(path, component)
            missing.update(f"{folder.name}/{name}" for name in files if not (folder / name).is_file())
    return sorted(missing)


def needed_weight_files(path: Path, component: Component) -> list[str]:
    """Names of the files that hold the tensors `component` needs; without an index, the name of its single file.

    Raises:
        DeployError: the index cannot be read.
    """
    index = component_folder(path, component) / f"{_STEMS[component]}.safetensors.index.json"
    if not index.is_file():
        return [f"{_STEMS[component]}.safetensors"]
    return sorted({file for name, file in _weight_map(index).items() if needs_tensor(component, name)})


def stored_tensors(path: Path, component: Component) -> dict[str, StoredTensor]:
    """The tensors that `component` needs, from the headers of their files; no weight is read.

    Raises:
        DeployError: a file is missing or is no safetensors file, or does not hold what the index says.
    """
    files = {name: file for name, file in tensor_files(path, component).items() if needs_tensor(component, name)}
    headers = {file: _header(file) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in headers[file]:
            raise DeployError(f"tensor {name} is missing from {file}, where its index says it lies")
    return {name: headers[file][name] for name, file in files.items()}


def _header(file: Path) -> dict[str, StoredTensor]:
    return read_header(file).tensors


def read_header(file: Path) -> StoredFile:
    """Tensors and metadata of a safetensors file; no value is read.

    Raises:
        DeployError: no such file, it cannot be read, or it is not whole.
    """
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _LONGEST_HEADER:
                raise ValueError(f"a header of {size} bytes")
            entries: dict[str, Any] = json.loads(stream.read(size))
        metadata = dict(entries.pop("__metadata__", {}))
        end = 8 + size + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if file.stat().st_size != end:
            raise ValueError(f"{file.stat().st_size} bytes where its header says {end}")
        tensors = {
            name: StoredTensor(
                file, entry["dtype"], tuple(entry["shape"]), slice(*(8 + size + at for at in entry["data_offsets"]))
            )
            for name, entry in entries.items()
        }
        return StoredFile(tensors, metadata)
    except FileNotFoundError as error:
        raise DeployError(f"{file} is missing") from error
    except OSError as error:
        raise DeployError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise DeployError(f"{file} is not a whole safetensors file: {error}; delete it and fetch it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint.

    Raises:
        DeployError: no such file, or no JSON object in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DeployError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise DeployError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise DeployError(f"{path} holds no JSON object")
    return content
