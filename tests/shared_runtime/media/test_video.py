"""Videos become upright frames on 24 a second: exactly what PyAV gives where nothing is to be done."""

from math import floor
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from shared_runtime.media import decode_video
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import MediaCaps
from tests.cases.videos import Recipe, constant, read_number, write_video


def plain_frames(path: Path) -> NDArray[np.uint8]:
    """A file's frames through PyAV alone."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def frames_of(path: Path, **options: float) -> NDArray[np.uint8]:
    start = options.get("start_seconds", 0.0)
    return decode_video(
        path, max_frames=int(options.get("max_frames", 362)), use_audio=False, start_seconds=start
    ).frames


def numbers(path: Path, **options: float) -> list[int]:
    return [read_number(frame) for frame in frames_of(path, **options)]


@pytest.mark.parametrize("name", ["vid_24fps.mp4", "vid_bframes.mp4", "vid_quicktime.mov", "vid_webm.webm"])
def test_frames_at_24_a_second_are_what_pyav_decodes(cases: Path, name: str) -> None:
    assert np.array_equal(frames_of(cases / name), plain_frames(cases / name))


@pytest.mark.parametrize("fps", [12, 25, 30, 60])
def test_a_constant_rate_follows_the_slots(cases: Path, fps: int) -> None:
    count = 5 * fps
    slots = [floor(index * 24 / fps + 0.5) for index in range(count + 1)]
    expected = [index for index in range(count) for _ in range(slots[index + 1] - slots[index])]
    assert numbers(cases / f"vid_{fps}fps.mp4") == expected
    assert len(expected) == 120


def test_a_variable_rate_is_honoured(cases: Path) -> None:
    shown = numbers(cases / "vid_vfr.mp4")
    assert shown[:24] == list(range(24))
    moments = [1 + index / 10 for index in range(20)]
    for number, moment in enumerate(moments[1:], 25):
        assert shown[floor(moment * 24 + 0.5)] == number
        assert shown[floor(moment * 24 + 0.5) - 1] == number - 1


def test_a_clock_of_milliseconds_does_not_move_frames(tmp_path: Path) -> None:
    path = tmp_path / "48.webm"
    options = {"deadline": "realtime", "cpu-used": "8"}
    write_video(path, Recipe(constant(48, 1), rate=48, codec="libvpx", sound=None, options=options))
    slots = [floor(index / 2 + 0.5) for index in range(49)]
    assert numbers(path) == [index for index in range(48) for _ in range(slots[index + 1] - slots[index])]


def test_the_display_matrix_is_applied(cases: Path) -> None:  # case 69
    plain = frames_of(cases / "vid_24fps.mp4", max_frames=30)[29]
    turns = {
        "vid_rot90.mp4": np.rot90(plain, -1),
        "vid_rot180.mp4": np.rot90(plain, 2),
        "vid_rot270.mp4": np.rot90(plain),
        "vid_mirrored.mp4": plain[:, ::-1],
    }
    for name, expected in turns.items():
        assert np.array_equal(frames_of(cases / name, max_frames=30)[29], expected), name


def test_pixels_become_square(cases: Path) -> None:
    assert frames_of(cases / "vid_wide_pixels.mp4", max_frames=1).shape == (1, 384, 960, 3)
    assert frames_of(cases / "vid_narrow_pixels.mp4", max_frames=1).shape == (1, 384, 480, 3)
    assert numbers(cases / "vid_wide_pixels.mp4") == list(range(72))


@pytest.mark.parametrize("name", ["vid_24fps.mp4", "vid_broken_middle.mp4"])
def test_decoding_stops_at_the_limit(cases: Path, name: str) -> None:  # case 67
    assert numbers(cases / name, max_frames=10) == list(range(10))


def test_a_start_cuts_what_a_whole_decode_gives(cases: Path) -> None:
    assert numbers(cases / "vid_24fps.mp4", start_seconds=2.0) == list(range(48, 120))
    whole = plain_frames(cases / "vid_bframes.mp4")
    assert np.array_equal(frames_of(cases / "vid_bframes.mp4", start_seconds=1.0), whole[24:])
    assert numbers(cases / "vid_vfr.mp4", start_seconds=1.05)[:2] == [24, 25]
    with pytest.raises(InvalidRequest, match="nothing after"):
        frames_of(cases / "vid_24fps.mp4", start_seconds=9.0)


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", {"x264-params": "open-gop=1:bframes=8:b-adapt=0", "preset": "veryfast"}),
        ("libx265", {"x265-params": "log-level=none:open-gop=1:bframes=8:b-adapt=0:pools=1"}),
    ],
)
def test_a_start_may_lie_between_a_key_frame_and_what_is_shown_before_it(
    tmp_path: Path, codec: str, options: dict[str, str]
) -> None:
    path = tmp_path / "open.mp4"
    write_video(path, Recipe(constant(24, 4), codec=codec, gop=30, sound=None, options=options))
    for first in (27, 28, 29, 30, 59, 60, 64):
        assert numbers(path, start_seconds=first / 24, max_frames=20) == list(range(first, first + 20))


def test_frames_are_fitted_before_they_are_kept(cases: Path) -> None:
    clip = decode_video(cases / "vid_30fps.mp4", max_frames=48, use_audio=False, fit=lambda picture: picture[::4, ::4])
    assert clip.frames.shape == (48, 96, 160, 3)


def test_sound_comes_only_where_it_is_wanted_and_there(cases: Path) -> None:
    assert decode_video(cases / "vid_24fps.mp4", max_frames=9, use_audio=False).waveform is None
    assert decode_video(cases / "vid_noaudio.mp4", max_frames=9, use_audio=True).waveform is None
    silent = decode_video(cases / "vid_silent.mp4", max_frames=24, use_audio=True).waveform
    assert silent is not None
    assert silent.shape == (2, 32_000)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vid_broken_middle.mp4", "cannot be decoded"),
        ("vid_truncated.mp4", "ends early"),
        ("vid_nomoov.mp4", "cannot be decoded"),
        ("vid_hdr_pq.mp4", "HDR video, PQ"),
        ("vid_hdr_hlg.mp4", "HDR video, HLG"),
        ("aud_stereo.m4a", "of kind audio"),
    ],
)
def test_what_cannot_be_used_is_refused(cases: Path, name: str, message: str) -> None:  # case 12
    with pytest.raises(InvalidRequest, match=message) as caught:
        decode_video(cases / name, max_frames=362, use_audio=True, param="input_references")
    assert caught.value.param == "input_references"


def test_too_large_a_side_is_refused(cases: Path) -> None:
    with pytest.raises(InvalidRequest, match="640x384"):
        decode_video(cases / "vid_24fps.mp4", max_frames=9, use_audio=False, caps=MediaCaps(max_side=639))
