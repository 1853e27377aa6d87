"""How large an `encoder_output` can become, to check a slab's size at start. Pure; runs in the diffusion API process.

An upper bound: every term is the most that the rules of `shared_schema.tasks` and the model's own resizing allow, so
that what passes the start-up check can never meet a payload that does not fit.
"""

from math import ceil

from shared_runtime.transport.header import LANDING_OVERHEAD, PAGE
from shared_schema.encoder_output import ALIGNMENT, AUDIO_WIDTH, ITEM_BYTES, VISUAL_WIDTH
from shared_schema.tasks import (
    AUDIO_CHANNELS,
    AUDIO_LATENTS_PER_SECOND,
    CANVAS_MULTIPLE,
    FPS,
    FRAMES_PER_CHUNK,
    LATENTS_PER_CHUNK,
    MAX_FRAMES,
    MAX_PROMPT_TOKENS,
    CanvasLimits,
    ReferenceLimits,
    largest_canvas,
    reference_size,
)

_ROW_PIXELS = CANVAS_MULTIPLE**2
"""One conditioning row, and one vision token, stands for 32 x 32 pixels."""
_LEAST_VISION_TOKENS = 256
"""Small pictures are enlarged before the text encoder sees them; never past this."""
_LABEL_TOKENS = 18
"""`<Picture 12>: ` or a time stamp, byte by byte, with vision start and end."""
_FRAMES_PER_BLOCK = FPS
"""A video is read twice a second, in pairs."""


def largest_payload(limits: CanvasLimits, text_dim: int) -> int:
    """Bytes of the largest legal payload: longest prompt, all references, each as large and long as may be."""
    rules = ReferenceLimits()
    canvas = largest_canvas(limits)
    canvas_rows = canvas.height * canvas.width // _ROW_PIXELS
    picture_rows = _picture_rows(limits, rules)
    tokens = (
        MAX_PROMPT_TOKENS
        + rules.images * (max(picture_rows, _LEAST_VISION_TOKENS) + _LABEL_TOKENS)
        + _video_blocks(rules) * (max(canvas_rows, _LEAST_VISION_TOKENS) + _LABEL_TOKENS)
        + (2 * rules.videos + rules.audios) * _LABEL_TOKENS
    )
    visual = rules.images * picture_rows + _video_latents(rules) * canvas_rows
    words = 15 + 9 * rules.total + rules.videos
    slots = (
        tokens * text_dim * ITEM_BYTES["BF16"],
        tokens * ITEM_BYTES["I64"],
        visual * VISUAL_WIDTH * ITEM_BYTES["F32"],
        _audio_rows(rules) * AUDIO_WIDTH * ITEM_BYTES["F32"],
        words * ITEM_BYTES["I64"],
    )
    return sum(ceil(nbytes / ALIGNMENT) * ALIGNMENT for nbytes in slots)


def slab_for_two(payload: int) -> int:
    """Bytes of a slab in which two payloads of that size have room beside each other, however they come and go."""
    return 2 * ceil((payload + LANDING_OVERHEAD) / PAGE) * PAGE


def least_payload(text_dim: int, vision_tokens: int, visual_rows: int) -> int:
    """Bytes that a request's payload has at least: one token of prompt, and what its pictures and videos alone need."""
    text = (1 + vision_tokens) * (text_dim * ITEM_BYTES["BF16"] + ITEM_BYTES["I64"])
    return text + visual_rows * VISUAL_WIDTH * ITEM_BYTES["F32"]


def picture_rows(width: int, height: int, limits: CanvasLimits) -> int:
    """Rows of a reference picture, scaled to the reference short edge; the text encoder reads as many tokens."""
    wide, high = reference_size(width, height, limits)
    return wide // CANVAS_MULTIPLE * (high // CANVAS_MULTIPLE)


def _picture_rows(limits: CanvasLimits, rules: ReferenceLimits) -> int:
    short = ceil(limits.reference_short_edge / CANVAS_MULTIPLE)
    return short * ceil(limits.reference_short_edge * rules.max_aspect / CANVAS_MULTIPLE)


def _video_frames(rules: ReferenceLimits) -> int:
    """Frames of all reference videos together: their joint limit, each rounded up on its own."""
    return max(MAX_FRAMES, ceil(rules.max_seconds * FPS)) + rules.videos


def _video_blocks(rules: ReferenceLimits) -> int:
    return ceil(_video_frames(rules) / _FRAMES_PER_BLOCK) + 2 * rules.videos


def _video_latents(rules: ReferenceLimits) -> int:
    return ceil(_video_frames(rules) / FRAMES_PER_CHUNK) * LATENTS_PER_CHUNK + 2 * rules.videos


def _audio_rows(rules: ReferenceLimits) -> int:
    """The videos' own sound and the separate audios have one budget each."""
    longest = max(rules.max_seconds, MAX_FRAMES / FPS) + rules.audio_tolerance_seconds
    latents = 2 * ceil(longest * AUDIO_LATENTS_PER_SECOND) + rules.videos + rules.audios
    return AUDIO_CHANNELS * latents
