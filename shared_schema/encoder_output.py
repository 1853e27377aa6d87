"""The payload between the services: its slots, its packed layout, and the rules it proves about itself.

No torch and no NumPy: shapes, counts and the layout's integers are checked here. What needs the values (roles,
finiteness, checksum) is checked by `shared_runtime.transport.codec`, on the same `EncoderOutput`.
"""

import struct
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from shared_schema.errors import (
    LayoutInvalid,
    RowsMismatch,
    SlotMissing,
    SlotUnexpected,
    WrongBytes,
    WrongDtype,
    WrongShape,
)
from shared_schema.layout import LAYOUT, Block, BlockKind, Layout
from shared_schema.tasks import PATCH

__all__ = [
    "ALIGNMENT",
    "AUDIO",
    "AUDIO_WIDTH",
    "ITEM_BYTES",
    "LAYOUT",
    "ROLES",
    "SLOT_DTYPES",
    "TEXT",
    "TEXT_ONLY_SLOTS",
    "VISUAL",
    "VISUAL_WIDTH",
    "Block",
    "BlockKind",
    "Dtype",
    "EncoderOutput",
    "Layout",
    "Manifest",
    "SlotName",
    "SlotSpec",
    "slot_bytes",
]

SlotName = Literal[
    "hidden_states.output",
    "meta.token_role_ids",
    "embed.embedding",
    "embed.speech_feat",
    "kv_metadata.minimax_h3_encoder_layout",
]
TEXT: SlotName = "hidden_states.output"
ROLES: SlotName = "meta.token_role_ids"
VISUAL: SlotName = "embed.embedding"
AUDIO: SlotName = "embed.speech_feat"

Dtype = Literal["BF16", "F32", "I64"]
"""Names as safetensors writes them."""
ITEM_BYTES: dict[Dtype, int] = {"BF16": 2, "F32": 4, "I64": 8}

SLOT_DTYPES: dict[SlotName, Dtype] = {TEXT: "BF16", ROLES: "I64", VISUAL: "F32", AUDIO: "F32", LAYOUT: "I64"}
"""Every slot in the order in which a payload holds them."""
TEXT_ONLY_SLOTS: tuple[SlotName, ...] = (TEXT, ROLES)
"""The text-only split sends these alone; geometry and media come from the request."""

VISUAL_WIDTH = 24 * PATCH * PATCH
AUDIO_WIDTH = 32
ALIGNMENT = 64
"""Bytes: every slot begins on a cache line of the landing."""


class SlotSpec(BaseModel):
    """Type, shape and place of one slot. Offsets are bytes from the start of the payload."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Manifest(BaseModel):
    """A payload without its bytes: what a receiver checks before it reserves a landing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slots: tuple[SlotSpec, ...]
    nbytes: int
    """Of the whole payload, padding between slots included."""
    layout: tuple[int, ...]
    """The layout's words again, so that a receiver can prove the rows before any byte moves. Empty: text only."""
    text_dim: int
    text_only: bool = False

    @classmethod
    def plan(cls, shapes: Mapping[SlotName, tuple[int, ...]], layout: Layout | None) -> Self:
        """Place slots one after the other, each on an `ALIGNMENT` boundary, in the schema's order.

        `shapes` names every slot but the layout's own, whose shape follows from `layout` (None: text only).
        """
        return cls.place(shapes, None if layout is None else layout.pack())

    @classmethod
    def place(cls, shapes: Mapping[SlotName, tuple[int, ...]], words: tuple[int, ...] | None) -> Self:
        """`plan` for a layout that exists as words already, which are kept as they are."""
        specs, cursor = [], 0
        for name in TEXT_ONLY_SLOTS if words is None else tuple(SLOT_DTYPES):
            shape = (len(words or ()),) if name == LAYOUT else shapes[name]
            nbytes = slot_bytes(SLOT_DTYPES[name], shape)
            specs.append(SlotSpec(name=name, dtype=SLOT_DTYPES[name], shape=shape, offset=cursor, nbytes=nbytes))
            cursor += _padded(nbytes)
        manifest = cls(
            slots=tuple(specs), nbytes=cursor, layout=words or (), text_dim=shapes[TEXT][-1], text_only=words is None
        )
        manifest.check()
        return manifest

    def slot(self, name: SlotName) -> SlotSpec:
        """The slot of that name.

        Raises:
            SlotMissing: the payload has none.
        """
        for spec in self.slots:
            if spec.name == name:
                return spec
        raise SlotMissing(f"slot {name} is missing", slot=name)

    def check(self) -> None:
        """Prove names, dtypes, shapes, bytes and row counts against the schema and the layout.

        Raises:
            PayloadError: the subclass says which rule is broken.
        """
        expected = TEXT_ONLY_SLOTS if self.text_only else tuple(SLOT_DTYPES)
        self._check_names(expected)
        for name in expected:
            self._check_slot(name)
        self._check_places()
        tokens = self.slot(TEXT).shape[0]
        if tokens < 1:
            raise RowsMismatch("a prompt has at least one token", slot=TEXT)
        if self.slot(ROLES).shape[0] != tokens:
            raise RowsMismatch(f"{self.slot(ROLES).shape[0]} roles for {tokens} tokens", slot=ROLES)
        if not self.text_only:
            self._check_rows()
        elif self.layout:
            raise LayoutInvalid("a text-only payload carries no layout", slot=LAYOUT)

    def _check_names(self, expected: tuple[SlotName, ...]) -> None:
        names = [spec.name for spec in self.slots]
        for missing in (name for name in expected if name not in names):
            raise SlotMissing(f"slot {missing} is missing", slot=missing)
        for name in names:
            if name not in expected or names.count(name) > 1:
                raise SlotUnexpected(f"slot {name} is not expected", slot=name)

    def _check_slot(self, name: SlotName) -> None:
        spec = self.slot(name)
        if spec.dtype != SLOT_DTYPES[name]:
            raise WrongDtype(f"slot {name} is {spec.dtype}, not {SLOT_DTYPES[name]}", slot=name)
        if not self._shape_fits(name, spec.shape):
            raise WrongShape(f"slot {name} has shape {list(spec.shape)}", slot=name)
        if spec.nbytes != slot_bytes(SLOT_DTYPES[name], spec.shape):
            raise WrongBytes(f"slot {name} has {spec.nbytes} bytes for shape {list(spec.shape)}", slot=name)

    def _shape_fits(self, name: SlotName, shape: tuple[int, ...]) -> bool:
        if any(extent < 0 for extent in shape):
            return False
        match name:
            case "hidden_states.output":
                return len(shape) == 2 and shape[1] == self.text_dim > 0
            case "meta.token_role_ids":
                return len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)
            case "embed.embedding":
                return shape == (0,) or (len(shape) == 2 and shape[0] > 0 and shape[1] == VISUAL_WIDTH)
            case "embed.speech_feat":
                return shape == (0,) or (len(shape) == 2 and shape[0] > 0 and shape[1] == AUDIO_WIDTH)
            case "kv_metadata.minimax_h3_encoder_layout":
                return shape == (len(self.layout),)

    def _check_places(self) -> None:
        cursor = 0
        for name in TEXT_ONLY_SLOTS if self.text_only else tuple(SLOT_DTYPES):
            spec = self.slot(name)
            if spec.offset != cursor:
                raise WrongBytes(f"slot {name} is at byte {spec.offset} of the payload, not {cursor}", slot=name)
            cursor += _padded(spec.nbytes)
        if cursor != self.nbytes:
            raise WrongBytes(f"the slots take {cursor} bytes, the manifest says {self.nbytes}")

    def _check_rows(self) -> None:
        layout = Layout.unpack(self.layout)
        if self.slot(VISUAL).shape[0] != layout.visual_rows:
            found = self.slot(VISUAL).shape[0]
            raise RowsMismatch(f"{found} visual rows where the layout has {layout.visual_rows}", slot=VISUAL)
        if self.slot(AUDIO).shape[0] != layout.audio_rows:
            found = self.slot(AUDIO).shape[0]
            raise RowsMismatch(f"{found} audio rows where the layout has {layout.audio_rows}", slot=AUDIO)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slot_bytes(dtype: Dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor."""
    count = 1
    for extent in shape:
        count *= extent
    return count * ITEM_BYTES[dtype]


class EncoderOutput(BaseModel):
    """A whole payload: its manifest and its bytes, proved to fit each other when built.

    `data` is a view, not a copy: it lives as long as the landing it points into.

    Raises (when built):
        PayloadError: the subclass says which rule is broken.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    manifest: Manifest
    data: memoryview

    @model_validator(mode="after")
    def _prove(self) -> Self:
        self.manifest.check()
        if self.data.nbytes < self.manifest.nbytes or self.data.itemsize != 1 or not self.data.contiguous:
            raise WrongBytes(f"{self.data.nbytes} bytes where the manifest has {self.manifest.nbytes}")
        if not self.manifest.text_only and self._words() != self.manifest.layout:
            raise LayoutInvalid("the layout slot is not the manifest's layout", slot=LAYOUT)
        return self

    def _words(self) -> tuple[int, ...]:
        view = self.view(LAYOUT)
        return struct.unpack(f"<{view.nbytes // 8}q", view)

    def view(self, name: SlotName) -> memoryview:
        """The bytes of one slot, little-endian and contiguous."""
        spec = self.manifest.slot(name)
        return self.data[spec.offset : spec.offset + spec.nbytes]

    @property
    def layout(self) -> Layout | None:
        """The layout, or None in the text-only split."""
        return None if self.manifest.text_only else Layout.unpack(self.manifest.layout)
