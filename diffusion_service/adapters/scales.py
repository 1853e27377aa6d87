"""Rank and alpha of every module of a LoRA file, from where trainers write them. Pure but for one small JSON file.

In this order: an `.alpha` tensor, the PEFT configuration (in the header, or beside the file), the header's `alpha`,
the contract of the artifact, and where nobody says anything alpha is the rank.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shared_schema.errors import AdapterBroken, AdapterNotServed, AdapterUnbound

V = TypeVar("V", int, float)

PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
_IN_HEADER = "lora_adapter_metadata"
_ALPHAS = ("alpha", "lora_alpha", "ss_network_alpha")
_OTHER_METHODS = ("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias")


@dataclass(frozen=True)
class Declared:
    """What a file says of all its modules."""

    alpha: float | None = None
    rank: int | None = None
    alphas: Mapping[str, float] = field(default_factory=dict)
    """By PEFT's pattern of module names."""
    ranks: Mapping[str, int] = field(default_factory=dict)

    def alpha_of(self, module: str) -> float | None:
        """Alpha of a module, by the file's own name for it."""
        return _matched(self.alphas, module, self.alpha)

    def check_rank(self, module: str, rank: int) -> None:
        """Compare what the tensors have with what the configuration says.

        Raises:
            AdapterUnbound: they disagree.
        """
        declared = _matched(self.ranks, module, self.rank)
        if declared is not None and declared != rank:
            raise AdapterUnbound(f"{module} has rank {rank}, and the adapter's configuration says {declared}")


def _matched(patterns: Mapping[str, V], module: str, otherwise: V | None) -> V | None:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def declared_in(file: Path, metadata: Mapping[str, str]) -> Declared:
    """What the header of `file` and the configuration beside it say.

    Raises:
        AdapterBroken: a value that is none.
        AdapterNotServed: the file is of another method than plain LoRA.
    """
    beside = file.with_name(PEFT_CONFIG)
    if _IN_HEADER in metadata:
        return _from_peft(_without_prefix(_json(metadata[_IN_HEADER], file)), file)
    if file.name == PEFT_FILE and beside.is_file():
        return _from_peft(_json(beside.read_text(encoding="utf-8", errors="replace"), beside), beside)
    said = next((metadata[key] for key in _ALPHAS if key in metadata), None)
    return Declared(alpha=None if said is None else _number(said, "alpha", file))


def _json(text: str, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise AdapterBroken(f"{file.name}: its configuration is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise AdapterBroken(f"{file.name}: its configuration is no JSON object")
    return found


def _without_prefix(found: dict[str, Any]) -> dict[str, Any]:
    """Diffusers writes the partition in front of every key."""
    return {key.removeprefix("transformer.").removeprefix("transformer_ref."): value for key, value in found.items()}


def _from_peft(found: dict[str, Any], file: Path) -> Declared:
    for method in _OTHER_METHODS:
        if found.get(method):
            raise AdapterNotServed(f"{file.name} says {method}, which is not served: plain LoRA alone is")
    alphas, ranks = found.get("alpha_pattern") or {}, found.get("rank_pattern") or {}
    if not isinstance(alphas, dict) or not isinstance(ranks, dict):
        raise AdapterBroken(f"{file.name}: alpha_pattern and rank_pattern are objects")
    for pattern in (*alphas, *ranks):
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterBroken(f"{file.name}: {pattern!r} is no pattern of module names: {error}") from error
    alpha, rank = found.get("lora_alpha"), found.get("r")
    return Declared(
        alpha=None if alpha is None else _number(alpha, "lora_alpha", file),
        rank=None if rank is None else int(_number(rank, "r", file)),
        alphas={key: _number(value, "alpha_pattern", file) for key, value in alphas.items()},
        ranks={key: int(_number(value, "rank_pattern", file)) for key, value in ranks.items()},
    )


def _number(value: object, what: str, file: Path) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise AdapterBroken(f"{file.name}: {what} is {value!r}, not a finite number")
    return number
