"""The values of a payload: gathering, copying, checksums, and the checks that need them. NumPy, no torch.

Runs in the encoder's leader (gather, check, copy, checksum), in the diffusion service's API process (check, checksum)
and wherever a client's own `encoder_output` is read. BF16 travels as its 16 raw bits.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shared_schema.encoder_output import (
    AUDIO,
    ITEM_BYTES,
    LAYOUT,
    ROLES,
    SLOT_DTYPES,
    TEXT,
    VISUAL,
    Dtype,
    EncoderOutput,
    Layout,
    Manifest,
    SlotName,
)
from shared_schema.errors import BadRoles, NotFinite, SlotMissing, SlotUnexpected, WrongDtype, WrongShape

_CHUNK = 2**20
"""Elements looked at in one go: scratch memory stays at a few MiB."""
_ARRAY_TYPES: dict[Dtype, tuple[str, ...]] = {"BF16": ("<u2", "<i2"), "F32": ("<f4",), "I64": ("<i8",)}


def checksum(view: memoryview) -> str:
    """xxh3-64 of the bytes, 16 hex digits. Other threads run meanwhile."""
    digest: str = xxhash.xxh3_64_hexdigest(view)
    return digest


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes of equal length with one memcpy. Other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def check_values(payload: EncoderOutput) -> None:
    """Prove what the manifest cannot: roles are 0 or 1, and every number is finite.

    Raises:
        BadRoles: a token role is neither.
        NotFinite: a NaN or an infinity; the slot is named.
    """
    _check_roles(np.frombuffer(payload.view(ROLES), "<i8"))
    _check_finite(np.frombuffer(payload.view(TEXT), "<u2"), 0x7F80, TEXT)
    if not payload.manifest.text_only:
        _check_finite(np.frombuffer(payload.view(VISUAL), "<u4"), 0x7F800000, VISUAL)
        _check_finite(np.frombuffer(payload.view(AUDIO), "<u4"), 0x7F800000, AUDIO)


def _check_roles(roles: NDArray[np.int64]) -> None:
    wrong = np.flatnonzero((roles != 0) & (roles != 1))
    if wrong.size:
        first = int(wrong[0])
        raise BadRoles(f"token {first} has role {int(roles[first])}, not 0 or 1", slot=ROLES)


def _check_finite(bits: NDArray[Any], exponent: int, slot: SlotName) -> None:
    mask = bits.dtype.type(exponent)
    for start in range(0, bits.size, _CHUNK):
        wrong = np.flatnonzero((bits[start : start + _CHUNK] & mask) == mask)
        if wrong.size:
            raise NotFinite(f"element {start + int(wrong[0])} of slot {slot} is not finite", slot=slot)


def gather(slots: Mapping[SlotName, NDArray[Any]], layout: Layout | None) -> EncoderOutput:
    """One contiguous payload out of separate arrays, each copied once; padding is zero.

    `slots` holds every slot but the layout's own: BF16 as uint16 or int16 bits, shapes as the schema has them; an
    empty slot may have any shape without elements. `layout` None makes the text-only payload.

    Raises:
        PayloadError: the subclass says which rule of the schema is broken.
    """
    names = [name for name in SLOT_DTYPES if name != LAYOUT] if layout is not None else [TEXT, ROLES]
    for name in names:
        _check_array(name, slots.get(name))
    if extra := set(slots) - set(names):
        raise SlotUnexpected(f"slot {min(extra)} is not expected", slot=min(extra))
    shapes: dict[SlotName, tuple[int, ...]] = {name: slots[name].shape if slots[name].size else (0,) for name in names}
    if len(shapes[TEXT]) != 2:
        raise WrongShape(f"slot {TEXT} has shape {list(slots[TEXT].shape)}", slot=TEXT)
    manifest = Manifest.plan(shapes, layout)
    data = bytearray(manifest.nbytes)
    for name in names:
        _place(data, manifest, name, slots[name])
    if layout is not None:
        _place(data, manifest, LAYOUT, np.array(manifest.layout, "<i8"))
    return EncoderOutput(manifest=manifest, data=memoryview(data))


def _check_array(name: SlotName, array: NDArray[Any] | None) -> None:
    if array is None:
        raise SlotMissing(f"slot {name} is missing", slot=name)
    dtype = SLOT_DTYPES[name]
    if array.dtype.str not in _ARRAY_TYPES[dtype]:
        raise WrongDtype(f"slot {name} is {array.dtype}, not the bits of {dtype}", slot=name)


def _place(data: bytearray, manifest: Manifest, name: SlotName, array: NDArray[Any]) -> None:
    spec = manifest.slot(name)
    if array.size:
        count = spec.nbytes // ITEM_BYTES[SLOT_DTYPES[name]]
        target = np.frombuffer(data, array.dtype, count=count, offset=spec.offset)
        np.copyto(target.reshape(array.shape), array)
