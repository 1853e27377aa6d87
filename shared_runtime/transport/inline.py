"""A payload as one safetensors file: for callers that hold a finished `encoder_output`, and for tests. No torch.

Runs in the encoder's API process or leader (writing) and in the diffusion service's API process (reading, in a worker
thread). Tensor names are the slots' names. The header of a file from outside is proved before memory is set aside.
"""

import json
import struct
from dataclasses import dataclass
from typing import Any, TypeGuard

from shared_schema.encoder_output import (
    LAYOUT,
    SLOT_DTYPES,
    TEXT,
    TEXT_ONLY_SLOTS,
    EncoderOutput,
    Manifest,
    SlotName,
    slot_bytes,
)
from shared_schema.errors import (
    SlotMissing,
    SlotUnexpected,
    WrongBytes,
    WrongDtype,
    WrongShape,
)

MAX_BYTES = 2**30
"""Of a file that is read here."""
_MAX_HEADER = 2**16
_MAX_WORDS = 4096
_MAX_EXTENT = 2**40
"""More than any shape within `MAX_BYTES` has; keeps products small."""


@dataclass(frozen=True)
class _Tensor:
    name: SlotName
    shape: tuple[int, ...]
    begin: int
    end: int


def to_safetensors(payload: EncoderOutput) -> bytes:
    """The payload as a safetensors file, slots without padding between them."""
    header: dict[str, Any] = {}
    cursor = 0
    for spec in payload.manifest.slots:
        end = cursor + spec.nbytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    slots = [payload.data[spec.offset : spec.offset + spec.nbytes] for spec in payload.manifest.slots]
    return b"".join([struct.pack("<Q", len(text)), text, *slots])


def from_safetensors(blob: bytes | memoryview, *, text_only: bool = False) -> EncoderOutput:
    """Read a payload; its bytes are copied once, after everything but the values has been proved.

    `text_only` says which of the two sets of slots is expected. Values (roles, finiteness) are left to
    `codec.check_values`.

    Raises:
        PayloadError: no safetensors file, or not a legal payload; the subclass and `slot` say which rule.
    """
    view = memoryview(blob).cast("B")
    if view.nbytes > MAX_BYTES:
        raise WrongBytes(f"an encoder_output has at most {MAX_BYTES} bytes, not {view.nbytes}")
    header, body = _split(view)
    expected = TEXT_ONLY_SLOTS if text_only else tuple(SLOT_DTYPES)
    tensors = _read_tensors(header, expected)
    _check_cover(tensors, body.nbytes)
    manifest = _plan(tensors, body, text_only=text_only)
    data = bytearray(manifest.nbytes)
    for tensor in tensors.values():
        start = manifest.slot(tensor.name).offset
        data[start : start + tensor.end - tensor.begin] = body[tensor.begin : tensor.end]
    return EncoderOutput(manifest=manifest, data=memoryview(data))


def _split(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    if view.nbytes < 8:
        raise WrongBytes("an encoder_output is a safetensors file, this has less than 8 bytes")
    (length,) = struct.unpack_from("<Q", view)
    if length > min(_MAX_HEADER, view.nbytes - 8):
        raise WrongBytes(f"an encoder_output is a safetensors file, this says its header has {length} bytes")
    try:
        header = json.loads(bytes(view[8 : 8 + length]), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise WrongBytes("an encoder_output is a safetensors file, its header is JSON") from error
    if not isinstance(header, dict):
        raise WrongBytes("the header of a safetensors file is a JSON object")
    header.pop("__metadata__", None)
    return header, view[8 + length :]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _read_tensors(header: dict[str, Any], expected: tuple[SlotName, ...]) -> dict[SlotName, _Tensor]:
    for name in expected:
        if name not in header:
            raise SlotMissing(f"slot {name} is missing", slot=name)
    if extra := sorted(set(header) - set(expected)):
        raise SlotUnexpected(f"slot {extra[0][:80]} is not expected", slot=extra[0][:80])
    return {name: _read_tensor(name, header[name]) for name in expected}


def _read_tensor(name: SlotName, entry: object) -> _Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end], **rest} if not rest:
            pass
        case _:
            raise WrongBytes(f"slot {name} has no dtype, shape and data_offsets", slot=name)
    if dtype != SLOT_DTYPES[name]:
        raise WrongDtype(f"slot {name} is {dtype[:16]}, not {SLOT_DTYPES[name]}", slot=name)
    if len(shape) > 2 or not all(_is_count(extent) for extent in shape):
        raise WrongShape(f"slot {name} has an impossible shape", slot=name)
    if not _is_count(begin) or not _is_count(end) or end - begin != slot_bytes(SLOT_DTYPES[name], tuple(shape)):
        raise WrongBytes(f"the data_offsets of slot {name} do not fit its shape {shape}", slot=name)
    return _Tensor(name, tuple(shape), begin, end)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_EXTENT


def _check_cover(tensors: dict[SlotName, _Tensor], nbytes: int) -> None:
    cursor = 0
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin != cursor:
            raise WrongBytes(f"slot {tensor.name} begins at byte {tensor.begin}, not {cursor}", slot=tensor.name)
        cursor = tensor.end
    if cursor != nbytes:
        raise WrongBytes(f"the slots take {cursor} bytes of the file, {nbytes} are there")


def _plan(tensors: dict[SlotName, _Tensor], body: memoryview, *, text_only: bool) -> Manifest:
    if len(tensors[TEXT].shape) != 2:
        raise WrongShape(f"slot {TEXT} has shape {list(tensors[TEXT].shape)}", slot=TEXT)
    shapes: dict[SlotName, tuple[int, ...]] = {
        name: _normal(name, tensor.shape) for name, tensor in tensors.items() if name != LAYOUT
    }
    return Manifest.place(shapes, None if text_only else _words(tensors[LAYOUT], body))


def _normal(name: SlotName, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`[0, 96]` and `[0, 32]` mean the same as the schema's `[0]`."""
    empty_rows = len(shape) == 2 and shape[0] == 0 and name not in TEXT_ONLY_SLOTS
    return (0,) if empty_rows else shape


def _words(tensor: _Tensor, body: memoryview) -> tuple[int, ...]:
    if len(tensor.shape) != 1 or tensor.shape[0] > _MAX_WORDS:
        raise WrongShape(f"slot {LAYOUT} has shape {list(tensor.shape)}", slot=LAYOUT)
    return struct.unpack(f"<{tensor.shape[0]}q", body[tensor.begin : tensor.end])
