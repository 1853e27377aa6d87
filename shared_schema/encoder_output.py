"""The payload between the services: its slots, its packed layout, and the rules it proves about itself.

No torch and no NumPy: shapes, counts and the layout's integers are checked here. What needs the values (roles,
finiteness, checksum) is checked by `shared_runtime.transport.codec`, on the same `EncoderOutput`.

The packed layout is vLLM-Omni's: 15 words, then visual shapes, audio lengths, blocks and keyframes. Version 2 lists
conditions grouped as images, videos, audios; version 3 lists them in request order. Both are read; version 2 is
written where the request's order already is that.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from shared_schema.errors import (
    LayoutInvalid,
    RowsMismatch,
    SlotMissing,
    SlotUnexpected,
    UnknownSchema,
    WrongBytes,
    WrongDtype,
    WrongShape,
)
from shared_schema.tasks import (
    AUDIO_CHANNELS,
    CANVAS_MULTIPLE,
    PATCH,
    VAE_RATIO,
    Task,
    audio_latents,
    is_aligned,
    video_latents,
)

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
LAYOUT: SlotName = "kv_metadata.minimax_h3_encoder_layout"

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

_SCHEMA_ID = 1
_TASK_WORDS: dict[Task, int] = {Task.T2VA: 1, Task.FL2VA: 2, Task.REF2VA: 3}
_HEAD = 15


class BlockKind(IntEnum):
    """What one condition is, as the layout's blocks name it."""

    IMAGE = 1
    SILENT_VIDEO = 2
    VIDEO = 3
    AUDIO = 4


_GROUP = {BlockKind.IMAGE: 0, BlockKind.SILENT_VIDEO: 1, BlockKind.VIDEO: 1, BlockKind.AUDIO: 2}


@dataclass(frozen=True)
class Block:
    """One condition: its kind and its latent geometry (per channel for sound, before patching for pictures)."""

    kind: BlockKind
    audio_t: int = 0
    latent_t: int = 0
    latent_h: int = 0
    latent_w: int = 0

    @property
    def visual_shape(self) -> tuple[int, int, int] | None:
        """(T, H, W) of the latents, or None for sound."""
        if self.kind is BlockKind.AUDIO:
            return None
        return (self.latent_t or 1, self.latent_h, self.latent_w)

    @property
    def visual_rows(self) -> int:
        """Rows of `embed.embedding` that this block fills."""
        shape = self.visual_shape
        return 0 if shape is None else shape[0] * (shape[1] // PATCH) * (shape[2] // PATCH)

    @property
    def has_sound(self) -> bool:
        """Whether audio rows belong to this block."""
        return self.kind in (BlockKind.VIDEO, BlockKind.AUDIO)

    def check(self) -> None:
        """Raise `LayoutInvalid` where the numbers cannot belong to the kind."""
        image = self.kind is BlockKind.IMAGE
        if self.has_sound != (self.audio_t > 0) or self.audio_t < 0:
            raise LayoutInvalid(f"block {self.kind.name} has audio length {self.audio_t}", slot=LAYOUT)
        if self.kind is BlockKind.AUDIO:
            if (self.latent_t, self.latent_h, self.latent_w) != (0, 0, 0):
                raise LayoutInvalid("an audio block has no latent picture", slot=LAYOUT)
            return
        if self.latent_h <= 0 or self.latent_w <= 0 or self.latent_h % PATCH or self.latent_w % PATCH:
            raise LayoutInvalid(f"latent sides {self.latent_h}x{self.latent_w} are not positive and even", slot=LAYOUT)
        if image != (self.latent_t == 0) or self.latent_t < 0:
            raise LayoutInvalid(f"block {self.kind.name} has {self.latent_t} latent frames", slot=LAYOUT)


@dataclass(frozen=True)
class Layout:
    """What a payload conditions on: task, geometry, and one block per condition in the order of the rows."""

    task: Task
    height: int
    width: int
    num_frames: int
    blocks: tuple[Block, ...] = ()
    keyframes: tuple[int, ...] = ()
    """For `fl2va`: 0 or -1 for every block."""

    @property
    def visual_rows(self) -> int:
        """Rows of `embed.embedding`."""
        return sum(block.visual_rows for block in self.blocks)

    @property
    def audio_rows(self) -> int:
        """Rows of `embed.speech_feat`: both channels of every sound."""
        return AUDIO_CHANNELS * sum(block.audio_t for block in self.blocks)

    @property
    def version(self) -> int:
        """2 where the blocks are grouped as images, videos, audios; 3 where the request mixed them."""
        groups = [_GROUP[block.kind] for block in self.blocks]
        return 2 if groups == sorted(groups) else 3

    def check(self) -> None:
        """Raise `LayoutInvalid` where the layout breaks a rule of the model."""
        for side in (self.height, self.width):
            if side <= 0 or side % CANVAS_MULTIPLE:
                raise LayoutInvalid(f"a canvas side is a multiple of {CANVAS_MULTIPLE}, not {side}", slot=LAYOUT)
        if not is_aligned(self.num_frames):
            raise LayoutInvalid(f"{self.num_frames} frames are not 17n + 5 within the limits", slot=LAYOUT)
        for block in self.blocks:
            block.check()
        match self.task:
            case Task.T2VA:
                self._check_text()
            case Task.FL2VA:
                self._check_keyframes()
            case Task.REF2VA:
                self._check_references()

    def _check_text(self) -> None:
        if self.blocks or self.keyframes:
            raise LayoutInvalid("a t2va layout carries no condition", slot=LAYOUT)

    def _check_keyframes(self) -> None:
        size = (self.height // VAE_RATIO, self.width // VAE_RATIO)
        if self.keyframes not in ((0,), (-1,), (0, -1)) or len(self.blocks) != len(self.keyframes):
            raise LayoutInvalid(f"keyframes {self.keyframes} with {len(self.blocks)} blocks", slot=LAYOUT)
        if any(b.kind is not BlockKind.IMAGE or (b.latent_h, b.latent_w) != size for b in self.blocks):
            raise LayoutInvalid("a keyframe is an image of the canvas' size", slot=LAYOUT)

    def _check_references(self) -> None:
        if self.keyframes:
            raise LayoutInvalid("a ref2va layout has no keyframes", slot=LAYOUT)
        if all(block.kind is BlockKind.AUDIO for block in self.blocks):
            raise LayoutInvalid("a ref2va layout has at least one image or video", slot=LAYOUT)

    def pack(self) -> tuple[int, ...]:
        """The layout's words."""
        shapes = [block.visual_shape for block in self.blocks if block.visual_shape is not None]
        lengths = [block.audio_t for block in self.blocks if block.has_sound]
        head = [
            _SCHEMA_ID,
            self.version,
            _TASK_WORDS[self.task],
            self.height,
            self.width,
            self.num_frames,
            video_latents(self.num_frames),
            audio_latents(self.num_frames),
            len(shapes),
            len(lengths),
            len(self.blocks),
            len(self.keyframes),
            0,
            0,
            0,
        ]
        words = [word for shape in shapes for word in shape] + lengths
        for b in self.blocks:
            words += [int(b.kind), b.audio_t, b.latent_t, b.latent_h, b.latent_w]
        return (*head, *words, *self.keyframes)

    @classmethod
    def unpack(cls, words: tuple[int, ...]) -> Self:
        """Read and check the words of a layout.

        Raises:
            UnknownSchema: schema id or version is not read here.
            LayoutInvalid: the words contradict each other or a rule of the model.
        """
        if len(words) < _HEAD:
            raise LayoutInvalid(f"a layout has at least {_HEAD} words, not {len(words)}", slot=LAYOUT)
        if words[0] != _SCHEMA_ID or words[1] not in (2, 3):
            raise UnknownSchema(f"layout schema {words[0]} version {words[1]} is not read here", slot=LAYOUT)
        counts = words[8:12]
        shapes, lengths, block_count, keyframe_count = counts
        length = _HEAD + 3 * shapes + lengths + 5 * block_count + keyframe_count
        if min(counts) < 0 or length != len(words) or words[12:_HEAD] != (0, 0, 0):
            raise LayoutInvalid(f"{len(words)} words do not fit the counts {counts} and edit words 0", slot=LAYOUT)
        start = _HEAD + 3 * shapes + lengths
        layout = cls(
            task=_task_of(words[2]),
            height=words[3],
            width=words[4],
            num_frames=words[5],
            blocks=tuple(_block_of(words[i : i + 5]) for i in range(start, start + 5 * block_count, 5)),
            keyframes=words[len(words) - keyframe_count :],
        )
        layout.check()
        if (words[1], *layout.pack()[2:]) != (words[1], *words[2:]) or layout.version > words[1]:
            raise LayoutInvalid("shapes, lengths and latent counts do not follow from the blocks", slot=LAYOUT)
        return layout


def _task_of(word: int) -> Task:
    for task, number in _TASK_WORDS.items():
        if number == word:
            return task
    raise LayoutInvalid(f"task {word} is not 1, 2 or 3", slot=LAYOUT)


def _block_of(words: tuple[int, ...]) -> Block:
    if words[0] not in tuple(BlockKind):
        raise LayoutInvalid(f"block kind {words[0]} is not 1 to 4", slot=LAYOUT)
    return Block(BlockKind(words[0]), *words[1:])


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
    def plan(cls, shapes: dict[SlotName, tuple[int, ...]], layout: Layout | None) -> Self:
        """Place slots one after the other, each on an `ALIGNMENT` boundary, in the schema's order.

        `shapes` names every slot but the layout's own, whose shape follows from `layout` (None: text only).
        """
        words = () if layout is None else layout.pack()
        names = TEXT_ONLY_SLOTS if layout is None else tuple(SLOT_DTYPES)
        specs, cursor = [], 0
        for name in names:
            shape = (len(words),) if name == LAYOUT else shapes[name]
            nbytes = slot_bytes(SLOT_DTYPES[name], shape)
            specs.append(SlotSpec(name=name, dtype=SLOT_DTYPES[name], shape=shape, offset=cursor, nbytes=nbytes))
            cursor += -(-nbytes // ALIGNMENT) * ALIGNMENT
        manifest = cls(
            slots=tuple(specs), nbytes=cursor, layout=words, text_dim=shapes[TEXT][-1], text_only=layout is None
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
        for spec in sorted(self.slots, key=lambda s: (s.offset, s.nbytes)):
            if spec.offset < cursor or spec.offset % ALIGNMENT or spec.offset + spec.nbytes > self.nbytes:
                raise WrongBytes(f"slot {spec.name} does not fit its place in the payload", slot=spec.name)
            cursor = spec.offset + spec.nbytes

    def _check_rows(self) -> None:
        layout = Layout.unpack(self.layout)
        if self.slot(VISUAL).shape[0] != layout.visual_rows:
            found = self.slot(VISUAL).shape[0]
            raise RowsMismatch(f"{found} visual rows where the layout has {layout.visual_rows}", slot=VISUAL)
        if self.slot(AUDIO).shape[0] != layout.audio_rows:
            found = self.slot(AUDIO).shape[0]
            raise RowsMismatch(f"{found} audio rows where the layout has {layout.audio_rows}", slot=AUDIO)


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
