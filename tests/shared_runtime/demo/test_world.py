from dataclasses import replace

import numpy as np
import pytest

from shared_runtime.demo.scene import BACKGROUNDS, COLOURS, HERTZ, Motion, Pitch, Scene, Shape, Speed, draw, held_out
from shared_runtime.demo.world import BOUNCE, CLICK_HERTZ, PACE, contacts, frames, sound, track
from shared_schema.tasks import FPS, SAMPLE_RATE

STILL = Scene(Shape.DISC, "red", "black", Motion.STILL, Speed.SLOW, Pitch.LOW, 0.5, 0.5)
HEIGHT, WIDTH, FRAMES = 64, 96, 107


def middles(scene: Scene) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """`(frames, 2)`: x and y of the middle of what is not background."""
    pictures = frames(scene, FRAMES, HEIGHT, WIDTH).astype(float)
    other = np.abs(pictures - np.array(BACKGROUNDS[scene.background])).sum(-1)
    weight = other.sum((1, 2)) + 1e-9
    x = (other * (np.arange(WIDTH) + 0.5)).sum((1, 2)) / weight
    y = (other * (np.arange(HEIGHT)[:, None] + 0.5)).sum((1, 2)) / weight
    return np.stack([x, y], 1)


@pytest.mark.parametrize(("shape", "area"), [(Shape.DISC, 0.77), (Shape.SQUARE, 1.27), (Shape.TRIANGLE, 0.87)])
def test_a_thing_has_its_colour_on_its_background_and_every_shape_its_area(shape: Shape, area: float) -> None:
    pictures = frames(replace(STILL, shape=shape), 5, HEIGHT, WIDTH)
    assert pictures.shape == (5, HEIGHT, WIDTH, 3)
    assert tuple(pictures[0, 0, 0]) == BACKGROUNDS["black"]
    assert tuple(pictures[0, HEIGHT // 2, WIDTH // 2]) == COLOURS["red"]
    covered = (pictures[0, :, :, 0].astype(float) - 12) / (220 - 12)
    assert covered.sum() / (np.pi * (0.19 * 64) ** 2) == pytest.approx(area, abs=0.02)


def test_a_frame_by_itself_is_the_clips_own() -> None:
    scene = replace(STILL, motion=Motion.BOUNCE)
    assert np.array_equal(frames(scene, 2, HEIGHT, WIDTH, first=50), frames(scene, FRAMES, HEIGHT, WIDTH)[50:52])


@pytest.mark.parametrize(
    ("motion", "step"),
    [(Motion.LEFT, (-1, 0)), (Motion.RIGHT, (1, 0)), (Motion.UP, (0, -1)), (Motion.DOWN, (0, 1))],
)
@pytest.mark.parametrize("speed", Speed)
def test_a_thing_moves_as_told_as_fast_as_told(motion: Motion, step: tuple[int, int], speed: Speed) -> None:
    scene = replace(STILL, motion=motion, speed=speed)
    moved = np.diff(middles(scene)[:8], axis=0).mean(0) * FPS / HEIGHT
    assert moved == pytest.approx(np.array(step) * PACE[speed], abs=0.03)


def test_a_thing_that_left_is_silent_and_comes_in_at_the_other_side() -> None:
    seen = track(replace(STILL, motion=Motion.RIGHT, speed=Speed.FAST), np.arange(400) / FPS, HEIGHT, WIDTH)
    back = int(np.argmin(np.diff(seen.x)))
    assert seen.x[back] > WIDTH > 0 > seen.x[back + 1]
    assert seen.shown[back] < 0.2


def test_growing_ends_and_a_still_thing_stays() -> None:
    grown = track(replace(STILL, motion=Motion.GROW, speed=Speed.FAST), np.arange(200) / FPS, HEIGHT, WIDTH)
    assert grown.radius[0] < grown.radius[10] < grown.radius[60] == grown.radius[-1]
    assert np.ptp(middles(STILL), axis=0) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("speed", Speed)
def test_a_bounce_clicks_when_the_thing_is_lowest(speed: Speed) -> None:
    scene = replace(STILL, motion=Motion.BOUNCE, speed=speed, phase=0.4)
    at = contacts(scene, FRAMES)
    assert at[0] == BOUNCE[speed] / 2, "let go at its highest, whatever its phase"
    assert np.diff(at) == pytest.approx(BOUNCE[speed])
    y = middles(scene)[:, 1]
    lowest = [i for i in range(1, FRAMES - 1) if y[i] >= y[i - 1] and y[i] > y[i + 1]]
    assert [i / FPS for i in lowest] == pytest.approx([t for t in at if 0 < t < (FRAMES - 1) / FPS], abs=0.5 / FPS)
    loud = np.abs(np.diff(sound(scene, FRAMES, HEIGHT, WIDTH).sum(0), 2))
    for second in at:
        first = round(second * SAMPLE_RATE)
        assert loud[first : first + 200].max() > 5 * loud[max(first - 400, 0) : max(first - 100, 1)].max(initial=0)


def test_the_tone_is_the_pitch_and_clicks_only_come_with_bounces() -> None:
    for pitch, hertz in HERTZ.items():
        wave = sound(replace(STILL, pitch=pitch), FRAMES, HEIGHT, WIDTH)
        assert wave.shape == (2, round(FRAMES * SAMPLE_RATE / FPS))
        spectrum = np.abs(np.fft.rfft(wave[0][:SAMPLE_RATE]))
        assert np.argmax(spectrum) == hertz
        assert spectrum[CLICK_HERTZ - 50 :].max() < 1
        assert np.abs(wave).max() < 1


def test_sound_comes_from_where_the_thing_is() -> None:
    sides = [np.square(sound(replace(STILL, place=place), 24, HEIGHT, WIDTH)).mean(1) for place in (0.0, 0.5, 1.0)]
    assert sides[0][0] > 4 * sides[0][1]
    assert sides[1][0] == pytest.approx(sides[1][1])
    assert sides[2][1] > 4 * sides[2][0]


def test_drawing_keeps_combinations_out_and_repeats_itself() -> None:
    seen = [draw(np.random.default_rng(seed), unseen=False) for seed in range(300)]
    unseen = [draw(np.random.default_rng(seed), unseen=True) for seed in range(300)]
    assert not {(s.shape, s.colour, s.motion) for s in seen} & {(s.shape, s.colour, s.motion) for s in unseen}
    assert seen == [draw(np.random.default_rng(seed), unseen=False) for seed in range(300)]
    for scenes in (seen, unseen):
        assert {scene.motion for scene in scenes} == set(Motion)
        assert {scene.colour for scene in scenes} == set(COLOURS)
        assert {scene.shape for scene in scenes} == set(Shape)


def test_the_combinations_that_are_held_out_never_change() -> None:
    """A checkpoint was trained without them: another choice would test on what it has seen."""
    assert len(held_out()) == 22
