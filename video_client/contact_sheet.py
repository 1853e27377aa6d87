"""A picture of clips: of each what was asked, the files that went with it, some of its frames, and its sound."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from shared_runtime.media.formats import classify
from shared_runtime.media.image import decode_image
from shared_runtime.media.sound import decode_audio
from shared_runtime.media.video import decode_video
from shared_schema.tasks import FPS

FRAMES = 6
"""Of each clip, from its first to its last."""
HIGH, GAP, LINE = 112, 6, 30
"""Pixels of a frame, between two things, and of a line of text."""
WAVE = 28
"""Height of one channel."""
TITLE = 80
"""Width of a clip's name."""
LONGEST = 1000
"""Frames of a clip, and seconds of a sound, that are looked at."""
PAPER, INK, FAINT, LOUD = (232, 234, 238), (30, 30, 30), (100, 100, 105), (40, 110, 170)
QUALITY = 90
Picture = NDArray[np.uint8]


@dataclass(frozen=True)
class Row:
    """One clip and what it was asked with."""

    title: str
    prompt: str
    given: Sequence[Path]
    clip: Path


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Write the sheet, as a JPEG or PNG by its name.

    Raises:
        InvalidRequest: a file cannot be decoded.
    """
    given = [[_thumbnail(path) for path in row.given] for row in rows]
    left = max(sum(each.width + GAP for each in pictures) for pictures in given) + 3 * GAP
    strips = [_row(row, pictures, left) for row, pictures in zip(rows, given, strict=True)]
    sheet = Image.new("RGB", (max(s.width for s in strips), sum(s.height for s in strips)), PAPER)
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    sheet.save(path, quality=QUALITY)
    return path


def _row(row: Row, given: Sequence[Image.Image], left: int) -> Image.Image:
    """What was given, and from `left` on what came of it."""
    clip = decode_video(row.clip, max_frames=LONGEST, use_audio=True)
    chosen = np.linspace(0, len(clip.frames) - 1, FRAMES).round().astype(int)
    shown = [_scaled(clip.frames[index]) for index in chosen]
    width = left + sum(each.width + GAP for each in shown)
    strip = Image.new("RGB", (width, 2 * GAP + LINE + HIGH + LINE + 2 * WAVE), PAPER)
    pen = ImageDraw.Draw(strip)
    pen.text((GAP, GAP), row.title, fill=FAINT, font=_font(21))
    pen.text((TITLE, GAP), row.prompt, fill=INK, font=_font(21))
    top = GAP + LINE
    _beside(strip, given, [path.name for path in row.given], GAP, top)
    _beside(strip, shown, [f"{index / FPS:.1f} s" for index in chosen], left, top)
    if clip.waveform is not None:
        _sound(pen, clip.waveform, left, top + HIGH + LINE - GAP, width - GAP - left)
    return strip


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _scaled(frame: Picture) -> Image.Image:
    height, width = frame.shape[:2]
    return Image.fromarray(frame).resize((round(width * HIGH / height), HIGH), Image.Resampling.BICUBIC)


def _thumbnail(path: Path) -> Image.Image:
    """A picture, an early frame of a video, or a sound as a curve."""
    match classify(path):
        case "image":
            return _scaled(decode_image(path))
        case "video":
            frames = decode_video(path, max_frames=LONGEST, use_audio=False).frames
            return _scaled(frames[len(frames) // 8])
        case _:
            curve = Image.new("RGB", (HIGH, HIGH), (250, 250, 250))
            _sound(ImageDraw.Draw(curve), decode_audio(path, max_seconds=LONGEST), 0, HIGH // 2 - WAVE, HIGH)
            return curve


def _beside(strip: Image.Image, pictures: Sequence[Image.Image], captions: Sequence[str], left: int, top: int) -> None:
    """Paste them from `left` on, each over its caption."""
    pen = ImageDraw.Draw(strip)
    for picture, caption in zip(pictures, captions, strict=True):
        strip.paste(picture, (left, top))
        pen.text((left, top + HIGH + 4), caption, fill=FAINT, font=_font(16))
        left += picture.width + GAP


def _sound(pen: ImageDraw.ImageDraw, waveform: NDArray[np.float32], left: int, top: int, width: int) -> None:
    """The loudest of every pixel's samples: the left channel upwards, the right one down."""
    parts = np.array_split(np.abs(waveform), width, axis=1)
    peaks = np.array([part.max(1) if part.size else np.zeros(2) for part in parts]).clip(0, 1)
    middle = top + WAVE
    for x, (up, down) in enumerate(peaks * WAVE):
        pen.line((left + x, middle - round(up), left + x, middle + round(down)), fill=LOUD)
