"""What a payload conditions on, and the packed int64 words that say it. Pure; runs in every process.

The words are vLLM-Omni's: 15, then visual shapes, audio lengths, blocks and keyframes. Version 2 lists conditions
grouped as images, videos, audios; version 3 lists them in request order. Both are read; version 2 is written where the
request's order already is that.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Self

from shared_schema.errors import LayoutInvalid, UnknownSchema
from shared_schema.tasks import (
    AUDIO_CHANNELS,
    CANVAS_MULTIPLE,
    LATENTS_PER_CHUNK,
    PATCH,
    VAE_RATIO,
    Task,
    audio_latents,
    is_aligned,
    video_latents,
)

LAYOUT: Literal["kv_metadata.minimax_h3_encoder_layout"] = "kv_metadata.minimax_h3_encoder_layout"
"""Name of the slot that holds the words."""

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
_MEDIA: tuple[Literal["image", "video", "audio"], ...] = ("image", "video", "audio")
"""By group."""


@dataclass(frozen=True)
class Block:
    """One condition: its kind and its latent geometry (per channel for sound, before patching for pictures)."""

    kind: BlockKind
    audio_t: int = 0
    latent_t: int = 0
    latent_h: int = 0
    latent_w: int = 0

    @property
    def medium(self) -> Literal["image", "video", "audio"]:
        """What kind of file it came from."""
        return _MEDIA[_GROUP[self.kind]]

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
        if not image and self.latent_t % LATENTS_PER_CHUNK != 2:
            raise LayoutInvalid(f"a video has 5n + 2 latent frames, not {self.latent_t}", slot=LAYOUT)


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
