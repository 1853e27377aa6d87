"""Strict loading of a checkpoint's components onto a device, each from only its own tensors. Runs in ranks; torch.

A module is built without memory for its weights, what the service does not run is taken off, and the rest is read
from the files. A tensor that is missing, unexpected, of another shape or another dtype stops the start by name.
With `dummy` no file of weights is opened: values are made up, in the dtypes of the released checkpoint.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import Qwen2TokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from shared_runtime.dummy import DummyTensor
from shared_runtime.sharding import Sharding
from shared_runtime.stored import (
    TEXT_LAYERS,
    Component,
    StoredTensor,
    component_folder,
    read_json,
    stored_tensors,
    tensor_files,
    unneeded_parts,
)
from shared_schema.errors import DeployError

Device = torch.device | str
M = TypeVar("M", bound=nn.Module)

READERS = 4
"""Files that are read at a time, where there are several."""
_NAMED = 5
"""Tensors that an error names before it only counts."""
CACHE_LINE = 64
"""Bytes."""


class TensorReader(Protocol):
    """A stored tensor that has not been read: indexing reads the part that is asked for."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """That part of the tensor, on the reader's device."""


Place = Callable[[str, torch.Tensor], torch.Tensor]
"""Called with the name and the value of every tensor as it is read, on several threads; what it returns is kept, where
it lies."""


class Deltas(Protocol):
    """What is added to stored weights before anything computes with them."""

    def of(self, name: str) -> TensorReader | None:
        """What the tensor `name` gets on top, FP32, of its whole shape; None where nothing."""


def tensor_readers(
    path: Path, component: Component, device: Device
) -> Iterator[tuple[str, StoredTensor, TensorReader]]:
    """Every tensor that `component` needs, file by file, to be read whole or in slices.

    Raises:
        DeployError: a file is missing, broken, or does not hold what its index says.
    """
    for file, held in _by_file(path, component).items():
        yield from _in_file(file, held, device)


def _by_file(path: Path, component: Component) -> dict[Path, dict[str, StoredTensor]]:
    stored = stored_tensors(path, component)
    files: dict[Path, dict[str, StoredTensor]] = {file: {} for file in sorted({each.file for each in stored.values()})}
    for name, tensor in stored.items():
        files[tensor.file][name] = tensor
    return files


def _in_file(
    file: Path, held: Mapping[str, StoredTensor], device: Device
) -> Iterator[tuple[str, StoredTensor, TensorReader]]:
    try:
        opening = safe_open(file, framework="pt", device=str(device))
    except SafetensorError as error:
        raise DeployError(f"{file} is not a whole safetensors file: {error}") from error
    with opening as opened:
        for name, tensor in held.items():
            yield name, tensor, opened.get_slice(name)


def load_text_encoder(path: Path, device: Device, sharding: Sharding | None = None, *, dummy: bool = False) -> Any:
    """Qwen3-VL cut to the 50 layers that are run: no final norm, no head, stored dtype (BF16).

    With `sharding` a rank reads and holds only its part of what the plan cuts.

    Its config still names the full depth, because diffusers' blocks check that it is over 50. `hidden_states[50]` is
    bit-equal to the full model's.

    Raises:
        DeployError: a file or tensor is missing, unexpected, mis-shaped or not BF16, or there are not over 50 layers.
    """
    folder = component_folder(path, "text_encoder")
    read_json(folder / "config.json")
    config = Qwen3VLConfig.from_pretrained(folder, local_files_only=True)
    depth = config.text_config.num_hidden_layers
    if depth <= TEXT_LAYERS:
        raise DeployError(f"{folder} has {depth} layers; the text encoder needs more than {TEXT_LAYERS}")
    if sharding is not None:
        # Fewer key-value heads than query heads, so that both divide where these do.
        sharding.check_heads("the text encoder's keys and values", config.text_config.num_key_value_heads)
    with init_empty_weights(include_buffers=False):
        model = Qwen3VLForConditionalGeneration(config)
    known = model.state_dict().keys()
    language = model.model.language_model
    language.layers = language.layers[:TEXT_LAYERS]
    language.norm = nn.Identity()
    model.lm_head = nn.Identity()
    if dummy:
        return _make_up(model, device, torch.bfloat16, sharding)
    return _fill(model, known, path, "text_encoder", device, frozenset({"BF16"}), sharding)


def load_video_vae(path: Path, half: Literal["encoder", "decoder"], device: Device, *, dummy: bool = False) -> Any:
    """One half of the video VAE in FP32: `encode` or `decode` works, the other half does not exist.

    Raises:
        DeployError: a file or tensor is missing, unexpected, mis-shaped or not FP32.
    """
    component: Component = "vae_encoder" if half == "encoder" else "vae_decoder"
    return _load_half(AutoencoderKLMiniMaxH3, path, component, device, dummy)


def load_audio_vae(path: Path, half: Literal["encoder", "decoder"], device: Device, *, dummy: bool = False) -> Any:
    """One half of the audio VAE in FP32; see `load_video_vae`."""
    component: Component = "audio_vae_encoder" if half == "encoder" else "audio_vae_decoder"
    return _load_half(AutoencoderKLMiniMaxH3Audio, path, component, device, dummy)


def load_transformer(
    path: Path,
    partition: Literal["transformer", "transformer_ref"],
    device: Device,
    sharding: Sharding | None = None,
    *,
    dummy: bool = False,
    deltas: Deltas | None = None,
    place: Place | None = None,
) -> Any:
    """One partition of the DiT, every tensor in its stored dtype (released: BF16 with FP32 parts).

    With `sharding` a rank reads and holds only its part of what the plan cuts, and adds only that part of `deltas`.
    With `place` it keeps what that makes of it.

    Raises:
        DeployError: a file or tensor is missing, unexpected or mis-shaped.
    """
    model = _build(MiniMaxH3Transformer3DModel, path, partition)
    if dummy:
        return _make_up(model, device, torch.bfloat16, sharding, place)
    known, dtypes = model.state_dict().keys(), frozenset({"BF16", "F32"})
    return _fill(model, known, path, partition, device, dtypes, sharding, deltas, place)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer. A prompt's `<|image_pad|>` is text to it; `convert_tokens_to_ids` still knows the special token.

    Raises:
        DeployError: the folder holds no tokenizer.
    """
    folder = component_folder(path, "tokenizer")
    try:
        return Qwen2TokenizerFast.from_pretrained(folder, local_files_only=True, split_special_tokens=True)
    except (OSError, ValueError) as error:
        raise DeployError(f"{folder} holds no tokenizer: {error}") from error


def load_processor(path: Path) -> Any:
    """Qwen3-VL's processor, with the same tokens for a video under every version of transformers.

    Raises:
        DeployError: the folder holds no processor.
    """
    folder = component_folder(path, "processor")
    try:
        processor = Qwen3VLProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DeployError(f"{folder} holds no processor: {error}") from error
    # Versions differ in its default, and the ones before it ignore the attribute.
    processor.video_processor.cap_pixels_per_frame = False
    return processor


def load_scheduler(path: Path, name: Literal["scheduler", "audio_scheduler"]) -> MiniMaxH3Scheduler:
    """A scheduler with the checkpoint's own shift.

    Raises:
        DeployError: the folder holds no such scheduler.
    """
    file = component_folder(path, name) / "scheduler_config.json"
    config = read_json(file)
    _check_class(MiniMaxH3Scheduler, config, file)
    return MiniMaxH3Scheduler.from_config(config)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def _load_half(kind: type[M], path: Path, component: Component, device: Device, dummy: bool) -> M:
    model = _build(kind, path, component)
    known = model.state_dict().keys()
    for part in unneeded_parts(component):
        delattr(model, part)
    if dummy:
        return _make_up(model, device, torch.float32, None)
    return _fill(model, known, path, component, device, frozenset({"F32"}))


def _build(kind: type[M], path: Path, component: Component) -> M:
    """The module of a diffusers config, its parameters on the meta device."""
    file = component_folder(path, component) / "config.json"
    config = read_json(file)
    _check_class(kind, config, file)
    with warnings.catch_warnings(), init_empty_weights(include_buffers=False):
        warnings.filterwarnings("ignore", "`?torch.nn.utils.weight_norm", FutureWarning)
        model: M = kind.from_config(config)  # type: ignore[attr-defined]
    return model


def _check_class(kind: type, config: dict[str, Any], file: Path) -> None:
    found = config.get("_class_name")
    if found != kind.__name__:
        raise DeployError(f"{file} is of a {found}, not of a {kind.__name__}: not a MiniMax-H3 checkpoint")


def _fill(
    model: M,
    known: Set[str],
    path: Path,
    component: Component,
    device: Device,
    dtypes: frozenset[str],
    sharding: Sharding | None = None,
    deltas: Deltas | None = None,
    place: Place | None = None,
) -> M:
    """Read the parameters of `model`, cut to what runs. `known`: the names that the whole model has."""
    _check_names(model, known, path, component)
    wanted = model.state_dict()
    if sharding is not None:
        sharding.apply(model)

    def read(file: Path, held: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        kept = {}
        for name, stored, reader in _in_file(file, held, device):
            _check_tensor(name, stored, tuple(wanted[name].shape), dtypes)
            tensor = read_weight(name, stored, reader, torch.device(device), sharding, deltas)
            kept[name] = tensor if place is None else place(name, tensor)
        return kept

    tensors: dict[str, torch.Tensor] = {}
    files = _by_file(path, component)
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as pool:
        for kept in pool.map(read, files, files.values()):
            tensors |= kept
    return _keep(model, tensors, device)


def _check_tensor(name: str, stored: StoredTensor, shape: tuple[int, ...], dtypes: frozenset[str]) -> None:
    if stored.shape != shape:
        raise DeployError(f"tensor {name} in {stored.file} has shape {list(stored.shape)}, not {list(shape)}")
    if stored.dtype not in dtypes:
        raise DeployError(f"tensor {name} in {stored.file} is {stored.dtype}, not {' or '.join(sorted(dtypes))}")


def _keep(model: M, tensors: dict[str, torch.Tensor], device: Device) -> M:
    """Parameters as they are given; buffers, which are computed and not read, on the device."""
    model.load_state_dict(tensors, strict=True, assign=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model.eval().requires_grad_(False)


def read_weight(
    name: str,
    stored: StoredTensor,
    reader: TensorReader,
    device: torch.device,
    sharding: Sharding | None,
    deltas: Deltas | None,
) -> torch.Tensor:
    """A rank's part of one stored tensor and of what is added to it: in FP32, and rounded once."""

    def part(of: TensorReader) -> torch.Tensor:
        return of[...] if sharding is None else sharding.read(name, stored.shape, of)

    tensor = _off_file(part(reader)) if device.type == "cpu" else part(reader)
    delta = None if deltas is None else deltas.of(name)
    return tensor if delta is None else tensor.copy_(tensor.float() + part(delta))


def _make_up(model: M, device: Device, dtype: torch.dtype, sharding: Sharding | None, place: Place | None = None) -> M:
    """Fill the parameters of `model`, cut to what runs, with made-up values of `dtype`, or FP32 where it keeps that."""
    wanted = model.state_dict()
    if sharding is not None:
        sharding.apply(model)
    exact = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    tensors = {}
    for name, tensor in wanted.items():
        kept = torch.float32 if any(part in name for part in exact) else dtype
        reader = DummyTensor(name, tuple(tensor.shape), kept, torch.device(device))
        tensor = reader[...] if sharding is None else sharding.read(name, reader.shape, reader)
        tensors[name] = tensor if place is None else place(name, tensor)
    return _keep(model, tensors, device)


def _off_file(mapped: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that is a view of a file, which somebody may cut or replace.

    It begins at the same place within a cache line: the order of a CPU's sums, and so their last bits, depend on that,
    and diffusers computes on the view.
    """
    bytes_ = mapped.numel() * mapped.element_size()
    room = torch.empty(bytes_ + CACHE_LINE, dtype=torch.uint8)
    begin = (mapped.data_ptr() - room.data_ptr()) % CACHE_LINE
    return room[begin : begin + bytes_].view(mapped.dtype).reshape(mapped.shape).copy_(mapped)


def _check_names(model: nn.Module, known: Set[str], path: Path, component: Component) -> None:
    folder, found = component_folder(path, component), tensor_files(path, component).keys()
    missing = sorted(model.state_dict().keys() - found)
    unexpected = sorted(found - known)
    for names, what in ((missing, "missing from"), (unexpected, "not expected in")):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise DeployError(f"{', '.join(names[:_NAMED])}{more}: tensors {what} {folder}")
