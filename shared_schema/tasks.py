"""The three tasks and their limits: canvases, frames, latent lengths, references. Pure arithmetic.

Source of the rules: MiniMax-H3's released configuration as diffusers 0.42 reads it
(`resolve_canvas_size`, `align_num_frames`, `audio_latent_num_frames`), widened to 4 and 15 seconds.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

FPS = 24
SAMPLE_RATE = 32_000
"""Hz, of everything the audio VAE reads and writes."""
AUDIO_CHANNELS = 2
AUDIO_LATENTS_PER_SECOND = 40
CANVAS_MULTIPLE = 32
"""Video VAE compression (16) times the DiT's patch (2)."""
VAE_RATIO = 16
PATCH = 2
FRAMES_PER_CHUNK = 17
LATENTS_PER_CHUNK = 5

MIN_FRAMES, MAX_FRAMES = 96, 362
"""Frames that may be asked for, before alignment."""
MIN_SECONDS, MAX_SECONDS = 4.0, 15.0
DEFAULT_FRAMES = 124

MIN_SIGMA_POINTS, MAX_SIGMA_POINTS = 2, 200

MAX_ASPECT = 4.0
"""Widest canvas and keyframe: 4:1; the tallest is 1:4."""
ASPECT_RATIOS: dict[str, tuple[int, int]] = {
    "16:9": (16, 9),
    "9:16": (9, 16),
    "1:1": (1, 1),
    "4:3": (4, 3),
    "3:4": (3, 4),
    "21:9": (21, 9),
    "auto": (16, 9),
    "adaptive": (16, 9),
}
OPENAI_SIZES = frozenset({(1280, 720), (720, 1280), (1792, 1024), (1024, 1792)})
"""Width x height that the OpenAI API knows; mapped onto the nearest legal canvas of that ratio."""

MAX_PROMPT_TOKENS = 10_000


class Task(StrEnum):
    """What a clip is made from: text, first and last frames, or references."""

    T2VA = "t2va"
    FL2VA = "fl2va"
    REF2VA = "ref2va"


@dataclass(frozen=True)
class Canvas:
    """A picture size in pixels, height first as the model has it."""

    height: int
    width: int

    def __str__(self) -> str:
        """`WIDTHxHEIGHT`, the way the public API writes a size."""
        return f"{self.width}x{self.height}"


@dataclass(frozen=True)
class CanvasLimits:
    """The geometry a checkpoint was made for, from its `modular_model_index.json`. Pixels."""

    short_edge: int = 768
    max_pixels: int = 768 * 1344
    reference_short_edge: int = 2048


@dataclass(frozen=True)
class ReferenceLimits:
    """How many references of each kind `ref2va` reads, and how long they may be, each and together."""

    images: int = 9
    videos: int = 3
    audios: int = 3
    total: int = 12
    min_seconds: float = 2.0
    max_seconds: float = 15.0
    audio_tolerance_seconds: float = 1024 / SAMPLE_RATE
    """One AAC frame: encoders round a clip's sound up to it."""
    min_fps: float = 5.0
    max_fps: float = 120.0
    max_aspect: float = 2.5


@dataclass(frozen=True)
class MediaCaps:
    """Bytes and pixels of one file, whatever its task."""

    image_bytes: int = 30 * 2**20
    video_bytes: int = 50 * 2**20
    audio_bytes: int = 15 * 2**20
    image_pixels: int = 50_000_000
    max_side: int = 5760


def min_side(limits: CanvasLimits) -> float:
    """Shortest side, in pixels, that an image or video may have: 256 on the released checkpoint."""
    return 256 * limits.short_edge / 768


def align_frames(frames: int) -> int:
    """The smallest `17n + 5` that is at least `frames`."""
    return frames + (LATENTS_PER_CHUNK - frames) % FRAMES_PER_CHUNK


def frames_for_seconds(seconds: float) -> int:
    """Aligned frame count of a clip of `seconds`.

    Raises:
        ValueError: not 4 to 15 s, and not a duration whose rounding is 362 frames.
    """
    frames = round(seconds * FPS) if isfinite(seconds) else 0
    if not (MIN_SECONDS <= seconds <= MAX_SECONDS or frames == MAX_FRAMES):
        raise ValueError(f"a clip lasts {MIN_SECONDS:g} to {MAX_SECONDS:g} seconds, not {seconds:g}")
    return align_frames(frames)


def frames_for_count(frames: int) -> int:
    """Aligned frame count of a clip asked for by number.

    Raises:
        ValueError: outside 96 to 362.
    """
    if not MIN_FRAMES <= frames <= MAX_FRAMES:
        raise ValueError(f"a clip has {MIN_FRAMES} to {MAX_FRAMES} frames, not {frames}")
    return align_frames(frames)


def is_aligned(frames: int) -> bool:
    """Whether the video VAE can decode exactly this many frames, and the API can ask for them."""
    return frames % FRAMES_PER_CHUNK == LATENTS_PER_CHUNK and align_frames(MIN_FRAMES) <= frames <= MAX_FRAMES


def video_latents(frames: int) -> int:
    """Latent frames of `17n + 5` frames: `5n + 2`."""
    return (frames - LATENTS_PER_CHUNK) // FRAMES_PER_CHUNK * LATENTS_PER_CHUNK + 2


def audio_latents(frames: int) -> int:
    """Audio latents of one channel that cover `frames` frames."""
    return round(frames / FPS * AUDIO_LATENTS_PER_SECOND)


def aspect_ratio(text: str) -> tuple[float, float]:
    """Width and height of a ratio: one of the six names, `auto`, `adaptive`, `w:h`, or a number.

    Raises:
        ValueError: not a ratio, or outside 1:4 to 4:1.
    """
    known = ASPECT_RATIOS.get(text.strip().lower())
    if known is not None:
        return known
    left, colon, right = text.partition(":")
    try:
        width, height = float(left), float(right) if colon else 1.0
    except ValueError:
        names = ", ".join(ASPECT_RATIOS)
        raise ValueError(f"an aspect ratio is one of {names}, w:h or a number, not {text!r}") from None
    if not (height > 0 and 1 / MAX_ASPECT <= width / height <= MAX_ASPECT):
        raise ValueError(f"an aspect ratio is between 1:4 and 4:1, not {text!r}")
    return width, height


def canvas_for_ratio(width: float, height: float, limits: CanvasLimits) -> Canvas:
    """The canvas of a ratio: short edge first, area capped, both sides to the nearest 32 (half to even).

    Raises:
        ValueError: the ratio is outside 1:4 to 4:1.
    """
    ratio = width / height
    if not 1 / MAX_ASPECT <= ratio <= MAX_ASPECT:
        raise ValueError(f"a picture is between 1:4 and 4:1, not {width:g}:{height:g}")
    if ratio >= 1.0:
        wide, high = limits.short_edge * ratio, float(limits.short_edge)
    else:
        wide, high = float(limits.short_edge), limits.short_edge / ratio
    if wide * high > limits.max_pixels:
        scale = (limits.max_pixels / (wide * high)) ** 0.5
        wide, high = wide * scale, high * scale
    return Canvas(_to_multiple(high), _to_multiple(wide))


def reference_size(width: float, height: float, limits: CanvasLimits) -> tuple[int, int]:
    """Width and height that a reference picture is encoded at: its short edge as the checkpoint says, no area cap."""
    scale = limits.reference_short_edge / min(width, height)
    return _to_multiple(width * scale), _to_multiple(height * scale)


def _to_multiple(side: float) -> int:
    return max(CANVAS_MULTIPLE, round(side / CANVAS_MULTIPLE) * CANVAS_MULTIPLE)


def is_legal_canvas(canvas: Canvas, limits: CanvasLimits) -> bool:
    """Whether a clip may have this size: within the limits, or a size that the ratio rule itself yields."""
    if canvas.height <= 0 or canvas.width <= 0 or canvas.height % CANVAS_MULTIPLE or canvas.width % CANVAS_MULTIPLE:
        return False
    in_shape = 1 / MAX_ASPECT <= canvas.width / canvas.height <= MAX_ASPECT
    return (in_shape and canvas.height * canvas.width <= limits.max_pixels) or _rule_yields(canvas, limits)


def _rule_yields(canvas: Canvas, limits: CanvasLimits) -> bool:
    """Whether some ratio resolves to `canvas`: the rule is constant over an interval of ratios, so three decide."""
    half, area = CANVAS_MULTIPLE / 2, limits.max_pixels
    low = max((canvas.width - half) ** 2 / area, area / (canvas.height + half) ** 2, 1 / MAX_ASPECT)
    high = min((canvas.width + half) ** 2 / area, area / (canvas.height - half) ** 2, MAX_ASPECT)
    capped = [low, (low + high) / 2, high] if low <= high else []
    uncapped = min(max(canvas.width / canvas.height, 1 / MAX_ASPECT), MAX_ASPECT)
    return any(canvas_for_ratio(ratio, 1, limits) == canvas for ratio in [*capped, uncapped])


def largest_canvas(limits: CanvasLimits) -> Canvas:
    """The largest legal canvas by area, for sizing memory; at most some 4 % past `max_pixels`."""
    longest = int((limits.max_pixels * MAX_ASPECT) ** 0.5) + CANVAS_MULTIPLE
    sides = range(CANVAS_MULTIPLE, longest + 1, CANVAS_MULTIPLE)
    legal = (c for h in sides for w in sides if is_legal_canvas(c := Canvas(h, w), limits))
    return max(legal, key=lambda c: c.height * c.width)


def canvas_for_size(width: int, height: int, limits: CanvasLimits) -> Canvas:
    """The canvas of an explicit size; the four sizes of the OpenAI API go to the nearest legal one.

    Raises:
        ValueError: not a multiple of 32, past 1:4 to 4:1, or too many pixels.
    """
    canvas = Canvas(height, width)
    if is_legal_canvas(canvas, limits):
        return canvas
    if (width, height) in OPENAI_SIZES:
        return canvas_for_ratio(width, height, limits)
    if height <= 0 or width <= 0 or height % CANVAS_MULTIPLE or width % CANVAS_MULTIPLE:
        raise ValueError(f"width and height are positive multiples of {CANVAS_MULTIPLE}, not {canvas}")
    if not 1 / MAX_ASPECT <= width / height <= MAX_ASPECT:
        raise ValueError(f"a picture is between 1:4 and 4:1, not {canvas}")
    raise ValueError(f"a picture has at most {limits.max_pixels} pixels, {canvas} has {width * height}")
