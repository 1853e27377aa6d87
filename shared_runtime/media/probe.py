"""Whether a file may be used as keyframe or reference, and what it holds. Runs in API processes' threads and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil, isfinite
from pathlib import Path
from typing import Any, Literal

from shared_runtime.media.boundary import DEFAULT_CAPS, DEFAULT_RULES, check_bytes, decoding
from shared_runtime.media.container import (
    frames,
    open_container,
    packets,
    picture_stream,
    prepare_pictures,
    seek_back,
)
from shared_runtime.media.formats import Format, kind_of, sniff
from shared_runtime.media.image import decode_image
from shared_runtime.media.sound import measure
from shared_runtime.media.video import TimeLine, View, first_frame, from_nearby
from shared_schema.encode import ReferenceKind
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import MAX_ASPECT, CanvasLimits, MediaCaps, ReferenceLimits, min_side

Role = Literal["keyframe", "reference"]

MAX_START_SECONDS = 600.0
"""Where a reference may begin at the latest: sound before it has to be decoded, for exactness."""
SLACK_SECONDS = 0.005
"""What a container's clock may round a length by."""
TAIL_PIXELS = 500_000_000
"""Decoded at most to reach the last frame; behind a key frame further away it is left to the full decode."""
ARTICLE = {"image": "an image", "video": "a video", "audio": "a sound"}


@dataclass(frozen=True)
class Probe:
    """What a file holds from its start on, measured and not as declared."""

    kind: ReferenceKind
    width: int | None = None
    height: int | None = None
    """Pixels as shown: upright, with square pixels."""
    frames: int | None = None
    """Of the source, before they are put on 24 a second."""
    fps: float | None = None
    """Frames a second on average."""
    seconds: float | None = None
    has_audio: bool = False
    """Whether it is a sound, or a video whose sound comes along."""
    audio_seconds: float | None = None


def probe(
    path: Path,
    *,
    kind: ReferenceKind | None,
    role: Role,
    limits: CanvasLimits,
    param: str,
    caps: MediaCaps = DEFAULT_CAPS,
    rules: ReferenceLimits = DEFAULT_RULES,
    start_seconds: float = 0.0,
    use_audio: bool = True,
) -> Probe:
    """Check one file against every rule that needs it alone. `kind` is what the request says it is, if it says so.

    An image is decoded whole; of a video every packet's time is read and the first and the last frame decoded; sound
    is decoded as far as its limit.

    Raises:
        InvalidRequest: with `param`, and in the message the rule and what was measured.
    """
    found = sniff(path, param)
    is_kind = kind_of(path, found, param)
    if kind is not None and kind != is_kind:
        raise InvalidRequest(f"the file is {ARTICLE[is_kind]}, not {ARTICLE[kind]}", param=param)
    if role == "keyframe" and is_kind != "image":
        raise InvalidRequest(f"a keyframe is an image, the file is {ARTICLE[is_kind]}", param=param)
    if not (isfinite(start_seconds) and 0 <= start_seconds <= MAX_START_SECONDS):
        message = f"a reference begins 0 to {MAX_START_SECONDS:g} seconds into its file, not {start_seconds:g}"
        raise InvalidRequest(message, param=param)
    with decoding(is_kind, param):
        match is_kind:
            case "image":
                return _probe_image(path, role, start_seconds, limits, caps, rules)
            case "video":
                check_bytes(path, caps.video_bytes, "video", param)
                start = Fraction(start_seconds)
                return _probe_video(path, found, start, use_audio, limits, caps, rules)
            case "audio":
                check_bytes(path, caps.audio_bytes, "sound", param)
                return _probe_audio(path, found, Fraction(start_seconds), rules)


def _probe_image(
    path: Path, role: Role, start_seconds: float, limits: CanvasLimits, caps: MediaCaps, rules: ReferenceLimits
) -> Probe:
    if start_seconds:
        raise InvalidRequest("an image has no start")
    height, width, _ = decode_image(path, caps=caps).shape
    _check_size(width, height, MAX_ASPECT if role == "keyframe" else rules.max_aspect, limits, caps)
    return Probe("image", width, height)


def _check_size(width: int, height: int, max_aspect: float, limits: CanvasLimits, caps: MediaCaps) -> None:
    """Sides and ratio of a picture as shown."""
    shortest = min_side(limits)
    if min(width, height) < shortest or max(width, height) > caps.max_side:
        raise InvalidRequest(f"sides are {shortest:g} to {caps.max_side} pixels, the file is {width}x{height}")
    if not 1 / max_aspect <= width / height <= max_aspect:
        span = f"{1 / max_aspect:g} to {max_aspect:g}"
        raise InvalidRequest(f"width / height is {span}, the file is {width}x{height}, {width / height:.3g}")


def _probe_audio(path: Path, found: Format, start: Fraction, rules: ReferenceLimits) -> Probe:
    extent = measure(path, found.readers[0], start + _longest(rules))
    if extent is None:
        raise InvalidRequest("the file holds no sound")
    length = float(extent.end - extent.begin - start)
    _check_length(length, rules, "sound")
    return Probe("audio", seconds=length, has_audio=True, audio_seconds=length)


def _longest(rules: ReferenceLimits) -> Fraction:
    return Fraction(rules.max_seconds) + Fraction(rules.audio_tolerance_seconds)


def _check_length(length: float, rules: ReferenceLimits, what: str) -> None:
    too_long = length > _longest(rules) + Fraction(1, 1_000_000)
    if too_long or length < rules.min_seconds - SLACK_SECONDS:
        span = f"{rules.min_seconds:g} to {rules.max_seconds:g} seconds"
        raise InvalidRequest(f"a reference {what} lasts {span}, this one {length:.3f}")


@dataclass(frozen=True)
class _Scan:
    """The times of a stream's packets, in ticks."""

    count: int
    last: int
    """When the last frame is shown."""
    end: int
    """When its showing ends."""


def _probe_video(
    path: Path,
    found: Format,
    start: Fraction,
    use_audio: bool,
    limits: CanvasLimits,
    caps: MediaCaps,
    rules: ReferenceLimits,
) -> Probe:
    with open_container(path, found.readers[0]) as container:
        stream = prepare_pictures(picture_stream(container))
        first, _ = first_frame(container, stream)
        view, line = View.of(first, stream, caps), TimeLine.of(first, stream, start)
        width, height = view.size
        _check_size(width, height, rules.max_aspect, limits, caps)
        view.picture(first)
    with open_container(path, found.readers[0]) as container:
        scan = _scan(container, picture_stream(container), line, rules)
        length = float((scan.end - line.first) * line.tick - start)
        _check_length(length, rules, "video")
        fps = scan.count / length
        if not rules.min_fps - SLACK_SECONDS <= fps <= rules.max_fps + SLACK_SECONDS:
            span = f"{rules.min_fps:g} to {rules.max_fps:g}"
            raise InvalidRequest(f"a reference video has {span} frames a second, this one {fps:.2f}")
    earliest = scan.last - ceil(1 / fps / line.tick)
    from_nearby(partial(_check_last_frame, path, found, earliest, view))
    audio_seconds = _own_sound(path, found, line, rules) if use_audio else None
    return Probe("video", width, height, scan.count, fps, length, audio_seconds is not None, audio_seconds)


def _scan(container: Any, stream: Any, line: TimeLine, rules: ReferenceLimits) -> _Scan:
    """Read the times of all packets; a stream that goes on past every limit is not read to its end."""
    start = line.first + int(line.start / line.tick)
    stop = start + int((_longest(rules) + 1) / line.tick)
    too_many = int(rules.max_fps * float(line.start + _longest(rules) + 1))
    count, read, last, end = 0, 0, line.first, line.first
    for packet in packets(container, stream):
        ticks = packet.dts if packet.pts is None else packet.pts
        if ticks is None or not packet.size or packet.is_discard:
            continue
        read += 1
        finish = ticks + line.duration(packet.duration)
        count += finish > start
        last, end = max(last, ticks), max(end, finish)
        if read > too_many:
            raise InvalidRequest(f"a reference video has at most {rules.max_fps:g} frames a second, this one has more")
        if end > stop:
            break
    declared = line.first + stream.duration if stream.duration else end
    return _Scan(count, last, max(end, declared) if end > stop else end)


def _check_last_frame(path: Path, found: Format, earliest: int, view: View, *, nearby: bool) -> None:
    """Decode to the end, as far as that is cheap; the last frame is shown at `earliest` ticks or later.

    Packets may hold frames that are not to be shown, and a cut may end in one of them, but no film in a row of them.
    """
    with open_container(path, found.readers[0]) as container:
        stream = prepare_pictures(picture_stream(container))
        if nearby:
            seek_back(container, stream, earliest)
        budget, final = TAIL_PIXELS, None
        for frame in frames(container, stream, whole=False):
            final = frame
            budget -= frame.width * frame.height
            if budget < 0:
                return
        if final is None or final.is_corrupt or (final.pts or 0) < earliest:
            raise InvalidRequest("the last frame cannot be decoded")
        view.picture(final)


def _own_sound(path: Path, found: Format, line: TimeLine, rules: ReferenceLimits) -> float | None:
    """Seconds of a video's own sound on the video's time line, silence before it included; None without any."""
    extent = measure(path, found.readers[0], line.start + _longest(rules) + 1)
    if extent is None:
        return None
    length = float(extent.end - line.origin - line.start)
    if length <= 0:
        return None
    if length > _longest(rules):
        raise InvalidRequest(f"a video's sound lasts at most {rules.max_seconds:g} seconds, this one {length:.3f}")
    return length


def check_totals(probes: Sequence[tuple[str, Probe]], rules: ReferenceLimits = DEFAULT_RULES) -> None:
    """Check what references last together: videos, their own sounds and audios, each kind on its own budget.

    `probes` are `(param, probe)` in request order; a video probed with `use_audio=False` has no sound to count.

    Raises:
        InvalidRequest: with the `param` of the reference that went over, and the total.
    """
    budgets = {
        "videos": [(param, p.seconds) for param, p in probes if p.kind == "video"],
        "sounds of the videos": [(param, p.audio_seconds) for param, p in probes if p.kind == "video" and p.has_audio],
        "sounds": [(param, p.seconds) for param, p in probes if p.kind == "audio"],
    }
    for what, lengths in budgets.items():
        total = 0.0
        for count, (param, length) in enumerate(lengths, 1):
            total += length or 0.0
            if total > rules.max_seconds + count * rules.audio_tolerance_seconds:
                limit = f"the {what} last at most {rules.max_seconds:g} seconds together"
                raise InvalidRequest(f"{limit}, up to this one {total:.3f}", param=param)
