"""Every rule about a file that can be checked before a job exists, and the budgets of several together."""

import time
from pathlib import Path

import pytest

from shared_runtime.media import Probe, check_totals, probe
from shared_runtime.media.probe import Role
from shared_schema.encode import ReferenceKind
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import CanvasLimits, MediaCaps, ReferenceLimits
from tests.cases.sounds import RATE, tone, write_wav
from tests.cases.videos import Recipe, constant, hide_frames, write_video

TINY = CanvasLimits(short_edge=64, max_pixels=8192, reference_short_edge=64)


def look(
    path: Path,
    role: Role = "reference",
    *,
    kind: ReferenceKind | None = None,
    start: float = 0.0,
    use_audio: bool = True,
    limits: CanvasLimits | None = None,
    caps: MediaCaps | None = None,
) -> Probe:
    return probe(
        path,
        kind=kind,
        role=role,
        limits=limits or CanvasLimits(),
        param="input_references[1]",
        caps=caps or MediaCaps(),
        start_seconds=start,
        use_audio=use_audio,
    )


def refusal(path: Path, role: Role = "reference", **options: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        look(path, role, **options)  # type: ignore[arg-type]
    assert caught.value.param == "input_references[1]"
    assert str(path.parent) not in caught.value.message
    return caught.value.message


def test_what_is_found_in_each_kind(cases: Path) -> None:
    assert look(cases / "img_exif6.jpg") == Probe("image", 1344, 768)
    video = look(cases / "vid_rot90.mp4")
    assert video == Probe("video", 384, 640, 120, 24.0, 5.0, True, 5.0)  # case 28
    assert look(cases / "aud_15s.wav") == Probe("audio", seconds=15.0, has_audio=True, audio_seconds=15.0)


def test_a_rate_or_a_number_of_channels_that_no_sound_has_is_refused_before_a_job_exists(tmp_path: Path) -> None:
    write_wav(tmp_path / "slow.wav", tone(5, 1000), 1000)
    assert "2000 to 768000 samples a second, not 1000" in refusal(tmp_path / "slow.wav")
    write_wav(tmp_path / "many.wav", tone(5, RATE, (440,) * 17), RATE)
    assert "1 to 16 channels, not 17" in refusal(tmp_path / "many.wav")


def test_a_video_without_its_sound(cases: Path) -> None:
    quiet = look(cases / "vid_24fps.mp4", use_audio=False)
    assert (quiet.has_audio, quiet.audio_seconds) == (False, None)
    assert not look(cases / "vid_noaudio.mp4").has_audio
    assert look(cases / "vid_late_sound.mp4").audio_seconds == pytest.approx(3.0)


@pytest.mark.parametrize(
    "name", ["vid_12fps.mp4", "vid_60fps.mp4", "vid_vfr.mp4", "vid_webm.webm", "vid_quicktime.mov", "vid_15s.mp4"]
)
def test_good_videos_pass(cases: Path, name: str) -> None:
    assert look(cases / name).kind == "video"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vid_3f.mp4", "lasts 2 to 15 seconds, this one 0.125"),
        ("vid_16s.mp4", "lasts 2 to 15 seconds, this one 16.000"),
        ("vid_4fps.mp4", "5 to 120 frames a second, this one 4.00"),
        ("vid_long_sound.mp4", "16.000"),
        ("vid_hdr_pq.mp4", "HDR"),
        ("vid_truncated.mp4", "ends early"),
        ("vid_nomoov.mp4", "cannot be decoded"),
        ("vid_4h.mp4", "2x2"),
        ("aud_15s5.wav", "lasts 2 to 15 seconds, this one 15.500"),
        ("aud_1s.wav", "this one 1.000"),
        ("aud_2h.flac", "this one 7200.000"),
        ("aud_broken_middle.mp3", "cannot be decoded"),
        ("img_6to1.png", "0.4 to 2.5"),
        ("img_tiny.png", "256 to 5760 pixels, the file is 16x16"),
        ("img_bomb.png", "900000000 pixels"),
        ("img_trunc.jpg", "truncated"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_what_was_measured(cases: Path, name: str, message: str) -> None:
    assert message in refusal(cases / name)  # case 11, 12, 63, 67


@pytest.mark.parametrize("name", ["vid_4h.mp4", "aud_2h.flac", "img_bomb.png"])
def test_bombs_are_refused_at_once(cases: Path, name: str) -> None:  # case 67
    began = time.process_time()
    refusal(cases / name, limits=CanvasLimits(short_edge=3))
    assert time.process_time() - began < 2


def test_a_long_video_is_not_read_to_its_end(cases: Path) -> None:  # case 67
    assert "this one 14400.000" in refusal(cases / "vid_4h.mp4", limits=CanvasLimits(short_edge=3))


def test_the_checkpoint_decides_the_shortest_side(cases: Path) -> None:
    assert look(cases / "img_quad.png", limits=TINY).width == 1344
    assert "21.3333 to 5760" in refusal(cases / "img_tiny.png", limits=TINY)


def test_a_keyframe_is_an_image_up_to_four_to_one(cases: Path) -> None:
    assert "a keyframe is an image" in refusal(cases / "vid_24fps.mp4", "keyframe")
    assert "0.25 to 4" in refusal(cases / "img_6to1.png", "keyframe")


def test_what_the_request_says_has_to_be_so(cases: Path) -> None:
    assert "is an image, not a video" in refusal(cases / "img_quad.png", kind="video")
    assert look(cases / "img_quad.png", kind="image").kind == "image"


def test_a_start_counts_from_the_file_and_shortens(cases: Path) -> None:
    video = look(cases / "vid_16s.mp4", start=2.0)
    assert (video.seconds, video.frames, video.audio_seconds) == (14.0, 336, 14.0)
    assert look(cases / "aud_15s5.wav", start=0.5).seconds == 15.0
    assert "this one 1.000" in refusal(cases / "vid_24fps.mp4", start=4.0)
    assert "0 to 600 seconds" in refusal(cases / "vid_24fps.mp4", start=float("nan"))
    assert "no start" in refusal(cases / "img_quad.png", start=1.0)


def test_bytes_are_capped_by_kind(cases: Path) -> None:
    for name, caps in {
        "img_quad.png": MediaCaps(image_bytes=9),
        "vid_3f.mp4": MediaCaps(video_bytes=9),
        "aud_1s.wav": MediaCaps(audio_bytes=9),
    }.items():
        assert "at most 9 are read" in refusal(cases / name, caps=caps)


def test_what_fails_in_the_middle_passes_here(cases: Path) -> None:  # case 12
    assert look(cases / "vid_broken_middle.mp4").frames == 120


def test_frames_that_are_not_shown_do_not_make_a_video_long(cases: Path, tmp_path: Path) -> None:
    path = tmp_path / "hidden.webm"
    hide_frames(cases / "vid_webm.webm", path, {0, 14})
    assert "the last frame cannot be decoded" in refusal(path)


def test_a_cut_may_end_in_a_frame_that_is_not_shown(cases: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.webm"
    hide_frames(cases / "vid_webm.webm", path, range(71))
    assert look(path).frames == 72


def test_what_only_a_decode_from_the_beginning_reads_passes(tmp_path: Path) -> None:
    path = tmp_path / "open.mp4"
    options = {"x264-params": "open-gop=1:bframes=8:b-adapt=0", "preset": "veryfast"}
    write_video(path, Recipe(constant(24, 4), gop=30, sound=None, options=options))
    assert look(path).frames == 96


def totals(*probes: Probe) -> None:
    check_totals([(f"input_references[{index}]", probe) for index, probe in enumerate(probes)], ReferenceLimits())


def test_budgets_are_separate_with_one_coded_frame_to_spare(cases: Path) -> None:  # case 63
    five, fifteen = look(cases / "vid_5s.mp4"), look(cases / "vid_15s.mp4")
    sound = look(cases / "aud_15s.wav")
    totals(five, sound)
    totals(fifteen, sound)
    totals(five, five, five)
    with pytest.raises(InvalidRequest, match=r"videos.* 20\.000") as caught:
        totals(five, sound, five, five, five)
    assert caught.value.param == "input_references[4]"
    with pytest.raises(InvalidRequest, match=r"sounds last .* 30\.000") as caught:
        totals(sound, five, sound)
    assert caught.value.param == "input_references[2]"


def test_sounds_of_videos_have_a_budget_of_their_own() -> None:
    video = Probe("video", 640, 384, 48, 24.0, 2.0, True, 10.0)
    with pytest.raises(InvalidRequest, match="sounds of the videos"):
        totals(video, video)
    totals(video, Probe("video", 640, 384, 48, 24.0, 2.0, False, None))
