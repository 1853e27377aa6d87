"""Fixture videos: frame n shows n as ten bars and flashes each second with a click; and files that must be refused."""

import struct
from collections.abc import Container
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
from numpy.typing import NDArray

RATE = 32_000
TICKS = 60_000
"""Video clock of the fixtures, ticks a second."""
SMPTE2084, ARIB_STD_B67, BT2020 = 16, 18, 9
"""Codes of ITU-T H.273: PQ, HLG, and the BT.2020 primaries and matrix."""
SHOW_FRAME = 0x10
"""In the first byte of a VP8 frame."""


@dataclass(frozen=True)
class Recipe:
    """How one fixture video is made."""

    times: list[float]
    """When each frame is shown, seconds."""
    rate: int = 24
    width: int = 640
    height: int = 384
    codec: str = "libx264"
    pixels: str = "yuv420p"
    gop: int | None = None
    aspect: Fraction | None = None
    transfer: int | None = None
    sound: Literal["click", "silence"] | None = "click"
    sound_codec: str = "aac"
    sound_rate: int = RATE
    sound_layout: str = "stereo"
    sound_seconds: float | None = None
    sound_start: float = 0.0
    options: dict[str, str] = field(default_factory=lambda: {"crf": "18", "bf": "0", "preset": "veryfast"})


def constant(fps: float, seconds: float) -> list[float]:
    """Times of a constant frame rate."""
    return [number / fps for number in range(round(fps * seconds))]


def picture(number: int, width: int, height: int, flash: bool) -> NDArray[np.uint8]:
    """Frame `number`: grey, or white in a flash, under ten bars that spell the number in binary."""
    pixels = np.full((height, width, 3), 255 if flash else 40, np.uint8)
    for bit in range(10):
        pixels[: height // 4, bit * width // 10 : (bit + 1) * width // 10] = 255 * (number >> (9 - bit) & 1)
    return pixels


def read_number(pixels: NDArray[np.uint8]) -> int:
    """The number that a decoded frame spells."""
    height, width = pixels.shape[:2]
    middles = [(2 * bit + 1) * width // 20 for bit in range(10)]
    return sum(int(pixels[height // 8, middle].mean() > 128) << (9 - bit) for bit, middle in enumerate(middles))


def write_video(path: Path, recipe: Recipe) -> None:
    """Make one video."""
    with av.open(str(path), "w") as container:
        video = _video_stream(container, recipe)
        sound = container.add_stream(recipe.sound_codec, rate=recipe.sound_rate) if recipe.sound else None
        if sound is not None:
            sound.layout = recipe.sound_layout
        for number, time in enumerate(recipe.times):
            flash = abs(time - round(time)) < 1e-3
            pixels = picture(number, recipe.width, recipe.height, flash)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(time * TICKS), Fraction(1, TICKS)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if sound is not None:
            _mux_sound(container, sound, recipe)


def _video_stream(container: Any, recipe: Recipe) -> Any:
    stream = container.add_stream(recipe.codec, rate=recipe.rate)
    stream.width, stream.height, stream.pix_fmt = recipe.width, recipe.height, recipe.pixels
    stream.time_base = stream.codec_context.time_base = Fraction(1, TICKS)
    stream.options = recipe.options
    if recipe.gop is not None:
        stream.gop_size = recipe.gop
    if recipe.aspect is not None:
        stream.codec_context.sample_aspect_ratio = recipe.aspect
    if recipe.transfer is not None:
        stream.codec_context.color_trc = recipe.transfer
        stream.codec_context.color_primaries = stream.codec_context.colorspace = BT2020
    return stream


def _mux_sound(container: Any, stream: Any, recipe: Recipe) -> None:
    rate, layout = recipe.sound_rate, recipe.sound_layout
    count = int((recipe.sound_seconds or recipe.times[-1] + 1 / recipe.rate) * rate)
    channels = av.AudioLayout(layout).nb_channels
    samples = np.zeros((channels, count), np.float32)
    if recipe.sound == "click":
        for second in range(count // rate + 1):
            samples[:, second * rate : second * rate + rate // 100] = 0.8
    resampler = av.AudioResampler(format=stream.format.name, layout=layout, rate=rate)
    for start in range(0, count, 960):
        part = np.ascontiguousarray(samples[:, start : start + 960].T).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(part, format="flt", layout=layout)
        frame.sample_rate = rate
        for ready in resampler.resample(frame):
            ready.pts = start + int(recipe.sound_start * rate)
            container.mux(stream.encode(ready))
    container.mux(stream.encode(None))


def hide_frames(source_path: Path, path: Path, shown: Container[int]) -> None:
    """Copy a VP8 video, without its sound, of whose frames only some are meant to be shown."""
    with av.open(str(source_path)) as source, av.open(str(path), "w") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(p for p in source.demux(video=0) if p.size):
            data = bytearray(bytes(packet))
            if number not in shown:
                data[0] &= ~SHOW_FRAME
            hidden = av.Packet(bytes(data))
            hidden.stream, hidden.time_base, hidden.is_keyframe = stream, packet.time_base, packet.is_keyframe
            hidden.pts, hidden.dts, hidden.duration = packet.pts, packet.dts, packet.duration
            container.mux(hidden)


def write(folder: Path) -> None:
    """Write all videos."""
    _plain(folder)
    _unusual(folder)
    _rotated(folder)
    _long(folder)
    _broken(folder)


def _plain(folder: Path) -> None:
    five = Recipe(constant(24, 5))
    for fps in (12, 24, 25, 30, 60):
        write_video(folder / f"vid_{fps}fps.mp4", Recipe(constant(fps, 5), rate=fps))
    write_video(folder / "vid_noaudio.mp4", replace(five, sound=None))
    write_video(folder / "vid_silent.mp4", replace(five, sound="silence"))
    write_video(folder / "vid_portrait.mp4", replace(five, width=384, height=640))
    write_video(folder / "vid_3f.mp4", Recipe(constant(24, 3 / 24)))
    write_video(folder / "vid_15s.mp4", Recipe(constant(24, 15), sound_seconds=15.008))
    write_video(folder / "vid_16s.mp4", Recipe(constant(24, 16)))
    write_video(folder / "vid_5s.mp4", five)


def _unusual(folder: Path) -> None:
    three = Recipe(constant(24, 3))
    realtime = {"deadline": "realtime", "cpu-used": "8"}
    webm = replace(three, codec="libvpx", sound_codec="libopus", sound_rate=48_000, options=realtime)
    write_video(folder / "vid_webm.webm", webm)
    write_video(folder / "vid_quicktime.mov", replace(three, sound_codec="pcm_s16le"))
    write_video(folder / "vid_bframes.mp4", replace(three, options={"crf": "18", "bf": "3", "preset": "veryfast"}))
    write_video(folder / "vid_wide_pixels.mp4", replace(three, aspect=Fraction(3, 2), sound=None))
    write_video(folder / "vid_narrow_pixels.mp4", replace(three, aspect=Fraction(3, 4), sound=None))
    write_video(folder / "vid_vfr.mp4", replace(three, times=[*constant(24, 1), *(1 + t for t in constant(10, 2))]))
    write_video(folder / "vid_late_sound.mp4", replace(three, sound_start=1.0, sound_seconds=2.0))
    write_video(folder / "vid_mono.mp4", replace(three, sound_layout="mono"))
    write_video(folder / "vid_5_1.mp4", replace(three, sound_layout="5.1", sound_rate=48_000))
    write_video(folder / "vid_44k.mp4", replace(three, sound_rate=44_100))
    write_video(folder / "vid_long_sound.mp4", replace(three, sound_seconds=16.0))
    write_video(folder / "vid_4fps.mp4", Recipe(constant(4, 5), rate=4))
    for name, transfer in (("pq", SMPTE2084), ("hlg", ARIB_STD_B67)):
        hdr = replace(three, codec="libx265", pixels="yuv420p10le", transfer=transfer, sound=None, options={})
        write_video(
            folder / f"vid_hdr_{name}.mp4",
            replace(hdr, options={"x265-params": "log-level=none", "preset": "ultrafast"}),
        )


def _rotated(folder: Path) -> None:
    """`vid_24fps.mp4` with display matrices; the picture is to be shown turned or mirrored."""
    one = 1 << 16
    matrices = {
        "vid_rot90.mp4": (0, one, 0, -one, 0, 0, 384 * one, 0, 1 << 30),
        "vid_rot180.mp4": (-one, 0, 0, 0, -one, 0, 640 * one, 384 * one, 1 << 30),
        "vid_rot270.mp4": (0, -one, 0, one, 0, 0, 0, 640 * one, 1 << 30),
        "vid_mirrored.mp4": (-one, 0, 0, 0, one, 0, 640 * one, 0, 1 << 30),
    }
    plain = (folder / "vid_24fps.mp4").read_bytes()
    header = plain.index(b"tkhd")
    matrix = header + 4 + (52 if plain[header + 4] else 40)
    for name, values in matrices.items():
        turned = bytearray(plain)
        turned[matrix : matrix + 36] = struct.pack(">9i", *values)
        (folder / name).write_bytes(turned)


def _long(folder: Path) -> None:
    """Four hours of 2x2 pixels: the same second again and again, without encoding it anew."""
    second, path = folder / "vid_4h.part.mp4", folder / "vid_4h.mp4"
    write_video(second, Recipe(constant(5, 1), rate=5, width=2, height=2, sound=None))
    with av.open(str(second)) as source, av.open(str(path), "w") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        packets = [
            (bytes(p), p.pts, p.dts, p.duration, p.is_keyframe, p.time_base) for p in source.demux(video=0) if p.size
        ]
        for shift in range(4 * 3600):
            for data, pts, dts, duration, key, base in packets:
                packet = av.Packet(data)
                packet.stream, packet.time_base, packet.duration, packet.is_keyframe = stream, base, duration, key
                packet.pts, packet.dts = pts + round(shift / base), dts + round(shift / base)
                container.mux(packet)
    second.unlink()


def _broken(folder: Path) -> None:
    plain = (folder / "vid_24fps.mp4").read_bytes()
    (folder / "vid_nomoov.mp4").write_bytes(plain[: len(plain) // 2])
    source_path, fast_path = str(folder / "vid_24fps.mp4"), str(folder / "vid_faststart.mp4")
    with av.open(source_path) as source, av.open(fast_path, "w", options={"movflags": "faststart"}) as container:
        streams = {stream.index: container.add_stream_from_template(stream) for stream in source.streams}
        for packet in source.demux():
            if packet.dts is not None:
                packet.stream = streams[packet.stream.index]
                container.mux(packet)
    whole = (folder / "vid_faststart.mp4").read_bytes()
    (folder / "vid_truncated.mp4").write_bytes(whole[: len(whole) * 3 // 4])
    seconds = folder / "vid_broken_middle.mp4"
    write_video(seconds, Recipe(constant(24, 5), gop=24, sound=None))
    with av.open(str(seconds)) as source:
        packets = [packet for packet in source.demux(video=0) if packet.size]
        first, last = packets[50].pos, packets[56].pos
    data = bytearray(seconds.read_bytes())
    data[first + 8 : last] = np.random.default_rng(2).bytes(last - first - 8)
    seconds.write_bytes(data)
