"""The judge says yes to clips that are right, however encoded or spoiled, and no to each kind of wrong one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shared_runtime.demo.scene import HERTZ, Motion, Pitch, Scene, Shape, Speed
from shared_runtime.demo.world import contacts, coverage, frames, paint, palette, sound, track
from shared_schema.tasks import FPS, SAMPLE_RATE
from tests.meaning.accuracy import rate
from tests.meaning.judge import judge, judge_decoded
from tests.meaning.seeing import see
from video_client.scenes import write_clip, write_scene

SIZE = (107, 64, 96)
MOVING = Scene(Shape.DISC, "red", "black", Motion.RIGHT, Speed.SLOW, Pitch.LOW, 0.4, 0.2)
BOUNCING = Scene(Shape.SQUARE, "blue", "white", Motion.BOUNCE, Speed.FAST, Pitch.HIGH, 0.3, 0.6)


def wrong(scene: Scene, pictures: np.ndarray, waveform: np.ndarray) -> set[str]:
    return {aspect for aspect, right in judge_decoded(pictures, waveform).agrees(scene).items() if not right}


@pytest.mark.parametrize("decibel", [None, pytest.param(25.0, marks=pytest.mark.slow)])
def test_right_clips_are_judged_right(tmp_path: Path, decibel: float | None) -> None:
    """`python -m tests.meaning.accuracy` does it with hundreds."""
    score = rate(10, decibel, 3, tmp_path)
    assert not score.notes


@pytest.mark.parametrize(
    ("aspect", "other"),
    [
        ("colour", {"colour": "orange"}),
        ("shape", {"shape": Shape.TRIANGLE}),
        ("background", {"background": "grey"}),
        ("motion", {"motion": Motion.LEFT}),
        ("speed", {"speed": Speed.FAST}),
        ("pitch", {"pitch": Pitch.MIDDLE}),
    ],
)
def test_a_clip_of_another_scene_is_not_taken_for_this_one(
    tmp_path: Path, aspect: str, other: dict[str, object]
) -> None:
    made = replace(MOVING, **other)  # type: ignore[arg-type]
    agreed = judge(write_scene(tmp_path / "clip.mp4", made)).agrees(MOVING)
    assert not agreed[aspect]
    assert agreed["motion"] is (aspect != "motion")


@pytest.mark.parametrize("early", [0.0, 0.25, 0.5, 0.75])
def test_a_contact_between_two_frames_is_told(early: float) -> None:
    num_frames, height, width = SIZE
    at = track(BOUNCING, (np.arange(num_frames) + early) / FPS, height, width)
    covered = coverage(BOUNCING.shape, at.x, at.y, at.radius, height, width, np)
    pictures = np.rint(paint(covered, *(np.array(each) for each in palette(BOUNCING)))).astype(np.uint8)
    found, right = see(pictures).contacts, contacts(BOUNCING, num_frames) - early / FPS
    assert found * FPS == pytest.approx(right * FPS, abs=0.2)


def test_sound_that_is_two_frames_late_or_early_is_told(tmp_path: Path) -> None:
    pictures, waveform = frames(BOUNCING, *SIZE), sound(BOUNCING, *SIZE)
    by = round(2 * SAMPLE_RATE / FPS)
    for shift in (by, -by):
        clip = write_clip(tmp_path / "clip.mp4", pictures, np.roll(waveform, shift, axis=1))
        agreed = judge(clip).agrees(BOUNCING)
        assert not agreed["clicks"]
        assert agreed["motion"]
    assert judge(write_clip(tmp_path / "clip.mp4", pictures, waveform)).agrees(BOUNCING)["clicks"]


def test_mirrored_pictures_are_told_by_motion_and_pan() -> None:
    assert wrong(MOVING, frames(MOVING, *SIZE)[:, :, ::-1], sound(MOVING, *SIZE)) >= {"motion", "pan"}


def test_swapped_channels_are_told_by_pan_alone() -> None:
    assert wrong(MOVING, frames(MOVING, *SIZE), sound(MOVING, *SIZE)[::-1]) == {"pan"}


def test_silence_and_missing_or_needless_clicks_are_told() -> None:
    pictures, waveform = frames(BOUNCING, *SIZE), sound(BOUNCING, *SIZE)
    still = sound(replace(BOUNCING, motion=Motion.STILL, speed=Speed.SLOW), *SIZE)
    assert wrong(BOUNCING, pictures, np.zeros_like(waveform)) == {"pitch", "clicks", "pan"}
    assert wrong(BOUNCING, pictures, still) == {"clicks"}
    assert wrong(MOVING, frames(MOVING, *SIZE), sound(MOVING, *SIZE) + waveform - still) == {"clicks"}


def test_a_clip_of_noise_or_of_one_colour_is_of_no_scene() -> None:
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    hiss = random.normal(0, 0.1, (2, 142667)).astype(np.float32)
    assert wrong(MOVING, noise, hiss) >= {"shape", "motion", "pitch", "pan"}
    assert wrong(MOVING, np.full((*SIZE, 3), 12, np.uint8), hiss) >= {"colour", "shape", "motion", "pitch", "pan"}


def test_a_speed_is_told_from_the_same_clip_played_faster() -> None:
    fast = frames(MOVING, SIZE[0] * 3, *SIZE[1:])[::3]
    assert "speed" in wrong(MOVING, fast, sound(MOVING, *SIZE))


def test_a_detuned_tone_is_no_tone_of_the_world() -> None:
    times = np.arange(142667) / SAMPLE_RATE
    for hertz in (360, 700, 1300):
        wave = np.float32(0.2) * np.sin(2 * np.pi * hertz * times).astype(np.float32)
        assert hertz not in HERTZ.values()
        assert judge_decoded(frames(MOVING, *SIZE), np.stack([wave, wave])).heard.pitch is None
