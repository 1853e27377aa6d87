import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_schema import tasks
from shared_schema.tasks import Canvas, CanvasLimits

RELEASED = CanvasLimits()
TINY = CanvasLimits(short_edge=64, max_pixels=8192, reference_short_edge=64)
BOTH = pytest.mark.parametrize("limits", [RELEASED, TINY], ids=["released", "tiny"])


@pytest.mark.parametrize(
    ("seconds", "frames"),
    [(4, 107), (5, 124), (8, 192), (8.7, 209), (10, 243), (12, 294), (14.375, 345), (15, 362), (15.083, 362)],
)
def test_seconds_become_aligned_frames(seconds: float, frames: int) -> None:
    assert tasks.frames_for_seconds(seconds) == frames


@pytest.mark.parametrize("seconds", [0, -4, 3.99, 15.05, 15.11, 1e300, math.inf, -math.inf, math.nan])
def test_other_seconds_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds"):
        tasks.frames_for_seconds(seconds)


@given(st.integers(96, 362))
def test_a_frame_count_is_aligned_upwards_and_stays(frames: int) -> None:
    aligned = tasks.frames_for_count(frames)
    assert frames <= aligned < frames + 17
    assert aligned % 17 == 5
    assert tasks.is_aligned(aligned)
    assert tasks.frames_for_count(aligned) == aligned
    assert tasks.frames_for_seconds(float(f"{aligned / 24:.3f}")) == aligned  # what a job reports can be sent back


@pytest.mark.parametrize("frames", [-1, 0, 95, 363])
def test_other_frame_counts_are_refused(frames: int) -> None:
    with pytest.raises(ValueError, match="frames"):
        tasks.frames_for_count(frames)


@pytest.mark.parametrize("frames", [5, 22, 90, 106, 108, 361, 379])  # case 59
def test_counts_off_the_grid_are_not_aligned(frames: int) -> None:
    assert not tasks.is_aligned(frames)


@pytest.mark.parametrize(
    ("frames", "video", "audio"), [(5, 2, 8), (107, 32, 178), (124, 37, 207), (209, 62, 348), (362, 107, 603)]
)
def test_latent_lengths(frames: int, video: int, audio: int) -> None:
    assert (tasks.video_latents(frames), tasks.audio_latents(frames)) == (video, audio)


@pytest.mark.parametrize(
    ("ratio", "canvas"),
    [
        ("16:9", (768, 1344)),
        ("9:16", (1344, 768)),
        ("1:1", (768, 768)),
        ("4:3", (768, 1024)),
        ("3:4", (1024, 768)),
        ("21:9", (672, 1536)),
        ("auto", (768, 1344)),
        ("Adaptive", (768, 1344)),
        ("1.0", (768, 768)),
        ("2:1", (704, 1440)),
        ("8:4", (704, 1440)),
        ("4:1", (512, 2016)),
        ("1:4", (2016, 512)),
    ],
)
def test_a_ratio_has_its_canvas(ratio: str, canvas: tuple[int, int]) -> None:
    assert tasks.canvas_for_ratio(*tasks.aspect_ratio(ratio), RELEASED) == Canvas(*canvas)


@pytest.mark.parametrize("text", ["", "wide", "16/9", "5:1", "1:5", "0:1", "1:0", "-1:-1", "nan", "inf:inf", "1:2:3"])
def test_other_ratios_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ratio"):
        tasks.aspect_ratio(text)


@BOTH
@given(st.floats(0.25, 4.0))
def test_what_the_ratio_rule_yields_is_legal_explicitly(limits: CanvasLimits, ratio: float) -> None:
    canvas = tasks.canvas_for_ratio(ratio, 1.0, limits)
    assert tasks.is_legal_canvas(canvas, limits)
    assert tasks.canvas_for_size(canvas.width, canvas.height, limits) == canvas
    assert canvas.height * canvas.width <= (lambda c: c.height * c.width)(tasks.largest_canvas(limits))


@BOTH
def test_a_canvas_past_the_area_is_legal_only_where_a_ratio_yields_it(limits: CanvasLimits) -> None:
    steps = 20_000
    yielded = {tasks.canvas_for_ratio(0.25 * 16 ** (i / steps), 1.0, limits) for i in range(steps + 1)}
    sides = range(32, 2200, 32)
    canvases = (Canvas(h, w) for h in sides for w in sides if h * w > limits.max_pixels)
    assert {c for c in canvases if tasks.is_legal_canvas(c, limits)} <= yielded


@pytest.mark.parametrize(
    "size", [(1408, 768), (16, 16), (1000, 560), (1344, 0), (99999, 99999), (2048, 256), (256, 2048), (-32, 32)]
)
def test_other_sizes_are_refused(size: tuple[int, int]) -> None:  # case 19
    with pytest.raises(ValueError, match=r"picture|width and height"):
        tasks.canvas_for_size(*size, RELEASED)


@pytest.mark.parametrize(
    ("size", "canvas"),
    [
        ((1280, 720), (768, 1344)),
        ((720, 1280), (1344, 768)),
        ((1792, 1024), (768, 1344)),
        ((1024, 1792), (1344, 768)),
        ((1344, 768), (768, 1344)),
        ((32, 128), (128, 32)),
        ((128, 32), (32, 128)),
        ((1152, 896), (896, 1152)),  # the whole area, and no ratio's canvas
    ],
)
def test_a_size_has_its_canvas(size: tuple[int, int], canvas: tuple[int, int]) -> None:
    assert tasks.canvas_for_size(*size, RELEASED) == Canvas(*canvas)


@pytest.mark.parametrize(
    ("limits", "size", "encoded"),
    [
        (RELEASED, (3000, 1500), (4096, 2048)),
        (RELEASED, (300, 750), (2048, 5120)),
        (TINY, (500, 500), (64, 64)),
    ],
)
def test_a_reference_keeps_its_shape_at_the_checkpoints_short_edge(
    limits: CanvasLimits, size: tuple[int, int], encoded: tuple[int, int]
) -> None:
    assert tasks.reference_size(*size, limits) == encoded


def test_a_canvas_reads_width_first() -> None:
    assert str(Canvas(768, 1344)) == "1344x768"


def test_the_shortest_side_follows_the_checkpoint() -> None:
    assert (tasks.min_side(RELEASED), round(tasks.min_side(TINY), 2)) == (256, 21.33)


def test_a_size_a_little_past_the_area_is_legal_where_a_ratio_yields_it() -> None:
    assert tasks.canvas_for_ratio(1.8, 1, RELEASED) == tasks.canvas_for_size(1376, 768, RELEASED) == Canvas(768, 1376)
