from pathlib import Path

import pytest

from shared_runtime.transport.sizing import largest_payload, least_payload, picture_rows, slab_for_two
from shared_runtime.transport.slab import Slab
from shared_schema.encoder_output import AUDIO, ROLES, TEXT, VISUAL, Manifest
from shared_schema.errors import SlabFull
from shared_schema.layout import Block, BlockKind, Layout
from shared_schema.tasks import CanvasLimits, Task, largest_canvas

RELEASED, TINY = CanvasLimits(), CanvasLimits(short_edge=64, max_pixels=8192, reference_short_edge=64)


def heaviest(limits: CanvasLimits, text_dim: int) -> int:
    """A payload near the limit, as the model counts: nine widest images, a 15 s video with sound, 15 s audio."""
    short, wide = limits.reference_short_edge, int(limits.reference_short_edge * 2.5) // 32 * 32
    canvas = largest_canvas(limits)
    image = Block(BlockKind.IMAGE, 0, 0, short // 16, wide // 16)
    video = Block(BlockKind.VIDEO, 603, 107, canvas.height // 16, canvas.width // 16)
    layout = Layout(Task.REF2VA, canvas.height, canvas.width, 362, (*[image] * 9, video, Block(BlockKind.AUDIO, 603)))
    tokens = 10_000 + 9 * (image.visual_rows + 16) + 16 * (canvas.height * canvas.width // 1024 + 16)
    rows = {
        TEXT: (tokens, text_dim),
        ROLES: (tokens,),
        VISUAL: (layout.visual_rows, 96),
        AUDIO: (layout.audio_rows, 32),
    }
    return Manifest.plan(rows, layout).nbytes


@pytest.mark.parametrize(("limits", "text_dim"), [(RELEASED, 5120), (TINY, 32)], ids=["released", "tiny"])
def test_the_bound_holds_for_a_payload_near_the_limit_and_is_no_more_than_twice_it(
    limits: CanvasLimits, text_dim: int
) -> None:
    assert heaviest(limits, text_dim) <= largest_payload(limits, text_dim) <= 2 * heaviest(limits, text_dim)


def test_the_default_slab_holds_two_of_the_largest_whatever_came_before(folder: Path) -> None:
    largest = largest_payload(TINY, 32)
    slab = Slab.create(folder, slab_for_two(largest), "test")
    first, small = slab.reserve(largest, "1" * 32, 5.0, 0.0), slab.reserve(1, "2" * 32, 5.0, 0.0)
    with pytest.raises(SlabFull):
        slab.reserve(largest, "3" * 32, 5.0, 0.0)
    slab.release(small)
    second = slab.reserve(largest, "4" * 32, 5.0, 0.0)
    assert first.offset != second.offset
    slab.close()


def test_the_tiny_presets_slab_holds_many_and_the_released_models_default_is_less_than_three_gib() -> None:
    assert 20 * largest_payload(TINY, 32) < 64 * 2**20
    assert 2 * 2**30 < slab_for_two(largest_payload(RELEASED, 5120)) < 3 * 2**30


def test_the_least_of_a_payload_is_never_more_than_what_it_really_has() -> None:
    layout = Layout(Task.REF2VA, 768, 1344, 124, (Block(BlockKind.IMAGE, 0, 0, 128, 128),))
    shapes = {TEXT: (4096 + 20, 5120), ROLES: (4096 + 20,), VISUAL: (layout.visual_rows, 96), AUDIO: (0,)}
    real = Manifest.plan(shapes, layout).nbytes
    rows = picture_rows(3000, 3000, RELEASED)
    assert rows == layout.visual_rows == 4096
    assert 0.99 * real < least_payload(5120, rows, rows) <= real


@pytest.mark.parametrize(
    ("width", "height", "rows"), [(3000, 1500, 64 * 128), (900, 900, 4096), (1000, 2500, 64 * 160)]
)
def test_a_pictures_rows_follow_its_own_shape(width: int, height: int, rows: int) -> None:
    assert picture_rows(width, height, RELEASED) == rows
