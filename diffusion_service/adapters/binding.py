"""Strict binding of a LoRA file to a partition: every tensor to one place, or the list of those that have none.

From the headers of both alone: no value is read but alphas. Runs in the API process, without torch.
"""

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diffusion_service.adapters.adapter import Adapter, BoundModule
from diffusion_service.adapters.names import Key, Role, Target, read_key, vocabulary
from diffusion_service.adapters.scales import Declared, declared_in
from shared_runtime.stored import StoredFile, StoredTensor, read_header
from shared_schema.deploy.settings import Partition
from shared_schema.errors import AdapterBroken, AdapterNotServed, AdapterUnbound, DeployError

Shape = tuple[int, ...]

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""What matrices may be stored as."""
_WEIGHT = ".weight"
_NAMED = 5
"""Tensors that an error names before it only counts."""


@dataclass
class _Parts:
    """What was found for one module."""

    named: str
    """As the file calls it."""
    target: Target
    tensors: dict[Role, str] = field(default_factory=dict)


def linears(tensors: Mapping[str, StoredTensor]) -> dict[str, Shape]:
    """The linears of a partition: shape `(out, in)` by module name."""
    matrices = {name: tensor.shape for name, tensor in tensors.items() if len(tensor.shape) == 2}
    return {name.removesuffix(_WEIGHT): shape for name, shape in matrices.items() if name.endswith(_WEIGHT)}


def bind(
    file: Path,
    partition: Partition,
    shapes: Mapping[str, Shape],
    *,
    name: str,
    scale: float,
    alpha: float | None = None,
) -> Adapter:
    """Bind every tensor of `file` to a linear of `partition`.

    Args:
        file: a safetensors file.
        partition: what the adapter is for.
        shapes: its linears, `(out, in)`.
        name: under which the adapter is known.
        scale: what its effect is multiplied by.
        alpha: of all modules where the file declares none. None: each module's rank.

    Raises:
        AdapterBroken: no whole safetensors file, or of a dtype that is not read.
        AdapterNotServed: query, key and value are fused, or it is of another method than plain LoRA.
        AdapterUnbound: a tensor without a place, two for one place, half a pair, or a shape that does not fit.
    """
    header = _header(file)
    found = _collect(file, header, vocabulary(shapes), partition)
    declared = declared_in(file, header.metadata)
    modules = tuple(_bound(file, parts, header, declared, shapes, alpha) for parts in found)
    return Adapter(name, file, scale, partition, modules, file.stat().st_mtime_ns)


def _header(file: Path) -> StoredFile:
    try:
        header = read_header(file)
    except DeployError as error:
        # Who asked by name need not learn where the file lies.
        raise AdapterBroken(error.message.replace(str(file), file.name)) from error
    if not header.tensors:
        raise AdapterBroken(f"{file.name} holds no tensor")
    return header


def _collect(file: Path, header: StoredFile, known: Mapping[str, Target], partition: Partition) -> list[_Parts]:
    found: dict[str, _Parts] = {}
    homeless, twice = [], []
    for name in sorted(header.tensors):
        key = read_key(name)
        if key is not None:
            _check_kind(file, name, key, partition)
        target = None if key is None else known.get(key.module)
        if key is None or target is None:
            homeless.append(name)
            continue
        parts = found.setdefault(target.module, _Parts(key.module, target))
        if key.role in parts.tensors:
            twice.append(name)
        parts.tensors[key.role] = name
    bound = f"{len(header.tensors) - len(homeless)} of {len(header.tensors)} tensors bind"
    _refuse(file, homeless, f"bind to nothing in {partition}; {bound}")
    _refuse(file, twice, "bind where another tensor does already")
    halves = [parts.named for parts in found.values() if not {"down", "up"} <= parts.tensors.keys()]
    _refuse(file, halves, "have one matrix of the two")
    return list(found.values())


def _check_kind(file: Path, name: str, key: Key, partition: Partition) -> None:
    if key.fused:
        why = "its rows may go by heads or one after another, and the file does not say"
        raise AdapterNotServed(f"{file.name}: {name} is of a fused query, key and value, which is not served: {why}")
    if key.for_ref and partition != "transformer_ref":
        raise AdapterUnbound(f"{file.name}: {name} is for transformer_ref, which makes ref2va alone")


def _refuse(file: Path, names: Iterable[str], why: str) -> None:
    listed = sorted(names)
    if listed:
        more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
        raise AdapterUnbound(f"{file.name}: {', '.join(listed[:_NAMED])}{more} {why}")


def _bound(
    file: Path,
    parts: _Parts,
    header: StoredFile,
    declared: Declared,
    shapes: Mapping[str, Shape],
    alpha: float | None,
) -> BoundModule:
    down, up = (header.tensors[parts.tensors[role]] for role in ("down", "up"))
    outputs, inputs = shapes[parts.target.module]
    rank = down.shape[0] if down.shape else 0
    if rank < 1 or down.shape != (rank, inputs) or up.shape != (outputs, rank):
        found = f"{list(up.shape)} x {list(down.shape)}"
        raise AdapterUnbound(
            f"{file.name}: {parts.named} is {found}, and {parts.target.module} takes [{outputs}, r] x [r, {inputs}]"
        )
    for tensor in (down, up):
        _check_bytes(file, parts, tensor)
    declared.check_rank(parts.named, rank)
    own = declared.alpha_of(parts.named)
    if "alpha" in parts.tensors:
        own = _scalar(file, parts.tensors["alpha"], header.tensors[parts.tensors["alpha"]])
    chosen = next(each for each in (own, alpha, float(rank)) if each is not None)
    target = parts.target
    return BoundModule(target.module, parts.tensors["down"], parts.tensors["up"], chosen / rank, target.swapped)


def _check_bytes(file: Path, parts: _Parts, tensor: StoredTensor) -> None:
    if tensor.dtype not in ELEMENT_BYTES:
        raise AdapterBroken(f"{file.name}: {parts.named} is {tensor.dtype}, not {' or '.join(ELEMENT_BYTES)}")
    rows, columns = tensor.shape
    if tensor.place.stop - tensor.place.start != rows * columns * ELEMENT_BYTES[tensor.dtype]:
        raise AdapterBroken(f"{file.name}: {parts.named} has other bytes than its shape {list(tensor.shape)} needs")


def _scalar(file: Path, name: str, tensor: StoredTensor) -> float:
    """The one value of a tensor."""
    formats = {"F64": "<d", "F32": "<f", "F16": "<e", "BF16": "<H"}
    code = formats.get(tensor.dtype, "")
    with file.open("rb") as stream:
        stream.seek(tensor.place.start)
        raw = stream.read(tensor.place.stop - tensor.place.start)
    if not code or len(raw) != struct.calcsize(code):
        raise AdapterBroken(f"{file.name}: {name} is not one number")
    if tensor.dtype == "BF16":
        code, raw = "<f", b"\0\0" + raw
    (value,) = struct.unpack(code, raw)
    if not math.isfinite(value):
        raise AdapterBroken(f"{file.name}: {name} is not a finite number")
    return float(value)
