import pytest

from shared_runtime.transport.header import HEADER_BYTES
from shared_runtime.transport.sizing import largest_payload
from shared_schema.encoder_output import AUDIO, ROLES, TEXT, VISUAL, Manifest
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


def test_the_default_slabs_hold_it() -> None:
    assert largest_payload(RELEASED, 5120) + HEADER_BYTES < 2 * 2**30
    assert largest_payload(TINY, 32) + HEADER_BYTES < 64 * 2**20
