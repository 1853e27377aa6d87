"""Writes small LoRA files that bind to the tiny transformer: the same bytes every time."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from diffusion_service.adapters.binding import Shape, linears
from shared_runtime.stored import stored_tensors
from shared_schema.deploy.settings import Partition

RANK = 4
ARTIFACT = "minimax_h3_fl2v_turbo_4step_v1.0_768p_bf16.safetensors"
REF_ARTIFACT = "minimax_h3_ref2v_turbo_8step_v1.0_768p_bf16.safetensors"
TURBO_MODULES = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
"""What a published artifact has of every block of both stacks."""

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By module: `(rank, in)` and `(out, rank)`."""


def shapes_of(checkpoint: Path, partition: Partition = "transformer") -> dict[str, Shape]:
    """The linears of a partition, as the service reads them."""
    return linears(stored_tensors(checkpoint, partition))


def turbo_modules(shapes: Mapping[str, Shape]) -> list[str]:
    """Those that an artifact has matrices for."""
    return [name for name in shapes if name.endswith(TURBO_MODULES)]


def made_pairs(
    shapes: Mapping[str, Shape], *, seed: int = 0, rank: int = RANK, spread: float = 0.3, dtype: torch.dtype
) -> Pairs:
    """Matrices of every module in `shapes`, large enough to change what a tiny transformer makes."""
    random = torch.Generator().manual_seed(seed)
    return {
        module: (
            (torch.rand((rank, inputs), generator=random) * 2 * spread - spread).to(dtype),
            (torch.rand((outputs, rank), generator=random) * 2 * spread - spread).to(dtype),
        )
        for module, (outputs, inputs) in shapes.items()
    }


def write_adapter(
    file: Path,
    pairs: Pairs,
    *,
    named: Callable[[str], str] = str,
    endings: tuple[str, str] = ("lora_A.default.weight", "lora_B.default.weight"),
    metadata: Mapping[str, str] | None = None,
    others: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """A file of `pairs` under the names that `named` and `endings` give them; `others` go in as they are."""
    tensors = dict(others or {})
    for module, matrices in pairs.items():
        for ending, matrix in zip(endings, matrices, strict=True):
            tensors[f"{named(module)}.{ending}"] = matrix.contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata=dict(metadata or {}))
    return file


def write_turbo(
    folder: Path,
    checkpoint: Path,
    name: str = ARTIFACT,
    *,
    partition: Partition = "transformer",
    seed: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A stand-in for a published artifact: its modules, its way of naming them, another rank."""
    shapes = shapes_of(checkpoint, partition)
    wanted = {module: shapes[module] for module in turbo_modules(shapes)}
    said = {"key_format": "minimax-h3-diffusers", "alpha": str(RANK)} if metadata is None else metadata
    return write_adapter(folder / name, made_pairs(wanted, seed=seed, dtype=torch.bfloat16), metadata=said)


def peft_config(**values: object) -> str:
    """The text of an `adapter_config.json`."""
    return json.dumps({"r": RANK, "lora_alpha": RANK, "peft_type": "LORA", **values})
