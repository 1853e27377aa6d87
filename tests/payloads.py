"""Layouts and payloads for tests: every legal layout as a Hypothesis strategy, and small payloads that fit one."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared_runtime.transport.codec import gather
from shared_schema.encoder_output import AUDIO, ROLES, TEXT, VISUAL, EncoderOutput, SlotName
from shared_schema.layout import Block, BlockKind, Layout
from shared_schema.tasks import Task

TEXT_DIM = 8
GOLDEN_T2VA = Layout(Task.T2VA, 768, 1344, 209)
GOLDEN_FL2VA = Layout(Task.FL2VA, 768, 1344, 209, (Block(BlockKind.IMAGE, 0, 0, 48, 84),) * 2, (0, -1))
GOLDEN_REF2VA = Layout(
    Task.REF2VA,
    768,
    1344,
    124,
    (
        Block(BlockKind.IMAGE, 0, 0, 128, 128),
        Block(BlockKind.VIDEO, 207, 37, 48, 84),
        Block(BlockKind.AUDIO, 120),
    ),
)
SMALL_REF2VA = Layout(
    Task.REF2VA,
    64,
    96,
    107,
    (
        Block(BlockKind.AUDIO, 80),
        Block(BlockKind.VIDEO, 80, 7, 4, 6),
        Block(BlockKind.IMAGE, 0, 0, 4, 4),
        Block(BlockKind.SILENT_VIDEO, 0, 12, 2, 4),
    ),
)
"""In an order that only version 3 can say."""

_EVEN = st.integers(1, 4).map(lambda n: 2 * n)
_VIDEO_T = st.integers(1, 4).map(lambda n: 5 * n + 2)
_IMAGES = st.builds(Block, st.just(BlockKind.IMAGE), st.just(0), st.just(0), _EVEN, _EVEN)
_SILENT = st.builds(Block, st.just(BlockKind.SILENT_VIDEO), st.just(0), _VIDEO_T, _EVEN, _EVEN)
_VIDEOS = st.builds(Block, st.just(BlockKind.VIDEO), st.integers(1, 30), _VIDEO_T, _EVEN, _EVEN)
_AUDIOS = st.builds(Block, st.just(BlockKind.AUDIO), st.integers(1, 30))
_SIDES = st.integers(1, 4).map(lambda n: 32 * n)
_FRAMES = st.integers(6, 21).map(lambda n: 17 * n + 5)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any legal layout, small."""
    task, height, width = draw(st.sampled_from(Task)), draw(_SIDES), draw(_SIDES)
    blocks: tuple[Block, ...] = ()
    keyframes: tuple[int, ...] = ()
    match task:
        case Task.FL2VA:
            keyframes = draw(st.sampled_from([(0,), (-1,), (0, -1)]))
            blocks = (Block(BlockKind.IMAGE, 0, 0, height // 16, width // 16),) * len(keyframes)
        case Task.REF2VA:
            some = draw(st.lists(_IMAGES | _SILENT | _VIDEOS | _AUDIOS, max_size=5))
            blocks = tuple(draw(st.permutations([*some, draw(_IMAGES | _SILENT | _VIDEOS)])))
        case Task.T2VA:
            pass
    return Layout(task, height, width, draw(_FRAMES), blocks, keyframes)


def slots_of(layout: Layout, *, tokens: int = 5, seed: int = 0) -> dict[SlotName, NDArray[Any]]:
    """Arrays of the shapes that `layout` implies, finite, different for every seed."""
    draw = np.random.default_rng(seed)
    return {
        TEXT: draw.integers(0, 0x7F80, (tokens, TEXT_DIM)).astype(np.uint16),
        ROLES: draw.integers(0, 2, tokens).astype(np.int64),
        VISUAL: draw.standard_normal((layout.visual_rows, 96)).astype(np.float32),
        AUDIO: draw.standard_normal((layout.audio_rows, 32)).astype(np.float32),
    }


def payload_of(layout: Layout, *, tokens: int = 5, seed: int = 0) -> EncoderOutput:
    """A legal payload for `layout`."""
    return gather(slots_of(layout, tokens=tokens, seed=seed), layout)
