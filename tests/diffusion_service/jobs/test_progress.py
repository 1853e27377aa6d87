"""Progress as a share of all work: never falling, straight in time, and taught by the jobs before."""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as some

from diffusion_service.jobs.job import PlannedReference, VideoPlan
from diffusion_service.jobs.progress import (
    PER_OUTPUT,
    STAGES,
    Course,
    Pace,
    Stage,
    by_its_own_pace,
    measured,
    phase_of,
    units,
)
from shared_schema.tasks import Task
from tests.diffusion_service.jobs.made import new_job

PLAN = VideoPlan(
    model="tiny",
    task=Task.T2VA,
    prompt="a ball",
    height=64,
    width=64,
    num_frames=107,
    num_inference_steps=9,
    flow_shift=12,
    audio_flow_shift=3,
    seed=1,
)
DURATIONS = {
    "encode": 2.0,
    "encode_text": 1.5,
    "transfer": 0.5,
    "prepare": 0.5,
    "denoise": 7.5,
    "audio_decode": 1.0,
    "video_decode": 3.0,
    "mux": 0.5,
}


@dataclass(frozen=True)
class Part:
    """One finished part, and when."""

    stage: Stage
    done: int
    of: int
    output: int
    at: float


def parts(
    seconds: dict[Stage, float], steps: int, outputs: int = 1, ahead: bool = False, tiles: int = 0
) -> Iterator[Part]:
    """What a job reports that takes `seconds` by stage; one encoded ahead begins with its first step."""
    now = 0.0
    if not ahead:
        yield Part("media", 0, 1, 0, now)
        for stage, of in (("media", 1), ("text", 1), ("vae", tiles)):
            for done in range(1, of + 1):
                now += seconds[stage] / of  # type: ignore[index]
                yield Part(stage, min(done, of - 1) if stage == "vae" else done, of, 0, now)  # type: ignore[arg-type]
        yield Part("transferring", 0, 1, 0, now)
        now += seconds["transferring"]
    for output in range(outputs):
        yield Part("denoising", 0, steps, output, now)
        for stage, of in (("denoising", steps), ("sound", 1), ("decoding", 6)):
            for done in range(1, of + 1):
                now += seconds[stage] / of  # type: ignore[index]
                yield Part(stage, done, of, output, now)  # type: ignore[arg-type]
        yield Part("muxing", 0, 1, output, now)
        now += seconds["muxing"]
    yield Part("muxing", 1, 1, outputs - 1, now)


SECONDS: dict[Stage, float] = {
    "media": 0.5,
    "text": 1.5,
    "vae": 0.0,
    "transferring": 0.5,
    "denoising": 8.0,
    "sound": 1.0,
    "decoding": 3.0,
    "muxing": 0.5,
}


def run(pace: Pace, plan: VideoPlan, work: Iterator[Part]) -> list[tuple[float, int]]:
    """(time, percent) at every part."""
    course, seen = Course.begin(pace, plan, 0.0), []
    for part in work:
        course = course.reached(part.stage, part.done, part.of, part.output, part.at)
        seen.append((part.at, course.percent))
    return seen


def correlation(seen: list[tuple[float, int]]) -> float:
    return statistics.correlation([at for at, _ in seen], [percent for _, percent in seen])


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_progress_is_straight_once_a_job_was_measured(outputs: int, ahead: bool) -> None:
    # case 20
    pace = Pace().learned(PLAN, DURATIONS, 15.0)
    plan = PLAN.model_copy(update={"num_outputs": outputs})
    seen = run(pace, plan, parts(SECONDS, 8, outputs, ahead))
    assert correlation(seen) > 0.995
    assert seen[-1][1] == 99
    whole = seen[-1][0]
    assert all(abs(percent - 100 * at / whole) <= 8 for at, percent in seen)


@pytest.mark.parametrize("denoising", [8.0, 200.0])
@pytest.mark.parametrize("decoding", [1.0, 4.0])
def test_the_very_first_job_is_straight_enough(denoising: float, decoding: float) -> None:
    # case 20
    seconds: dict[Stage, float] = {**SECONDS, "denoising": denoising, "decoding": decoding}
    assert correlation(run(Pace(), PLAN, parts(seconds, 20))) > 0.95


def test_a_long_encode_is_straight_too() -> None:
    # case 20: most of a ref2va job may be the video VAE's
    reference = PlannedReference(kind="video", file="0", sha256="0" * 64, bytes=1, height=64, width=64, frames=107)
    plan = PLAN.model_copy(update={"task": Task.REF2VA, "references": (reference,)})
    seconds: dict[Stage, float] = {**SECONDS, "vae": 40.0}
    durations = {**DURATIONS, "encode": 42.0, "encode_vae": 40.0}
    seen = run(Pace().learned(plan, durations, 55.0), plan, parts(seconds, 8, tiles=20))
    assert correlation(seen) > 0.995
    assert len({percent for at, percent in seen if at < 42}) > 18
    first = run(Pace(), plan, parts({**SECONDS, "vae": 8.0, "denoising": 80.0}, 8, tiles=20))
    assert correlation(first) > 0.95


@given(
    pace=some.sampled_from([Pace(), Pace().learned(PLAN, DURATIONS, 15.0)]),
    seconds=some.tuples(*[some.floats(0, 1e4) for _ in STAGES]),
    steps=some.integers(1, 30),
    outputs=some.integers(1, 4),
)
def test_progress_never_falls_and_is_never_whole(
    pace: Pace, seconds: tuple[float, ...], steps: int, outputs: int
) -> None:
    plan = PLAN.model_copy(update={"num_outputs": outputs})
    work = parts(dict(zip(STAGES, seconds, strict=True)), steps, outputs, tiles=3)
    seen = [percent for _, percent in run(pace, plan, work)]
    assert seen == sorted(seen)
    assert seen[0] >= 0
    assert seen[-1] <= 99


def test_nothing_is_finished_before_the_first_part_is() -> None:
    course = Course.begin(Pace().learned(PLAN, DURATIONS, 15.0), PLAN, 0.0)
    for at in (1.0, 50.0):
        course = course.reached("media", 0, 1, 0, at)
    assert course.percent == 0


def test_the_phase_moves_on_with_the_last_part() -> None:
    course = Course.begin(Pace(), PLAN, 0.0).reached("denoising", 0, 2, 0, 1.0)
    assert course.reached("denoising", 1, 2, 0, 2.0).stage == "denoising"
    assert course.reached("denoising", 2, 2, 0, 3.0).stage == "sound"
    assert [phase_of(stage) for stage in STAGES] == [
        *3 * ("encoding",),
        "transferring",
        "denoising",
        *2 * ("decoding",),
        "muxing",
    ]


def test_what_is_left_counts_down_between_parts_and_follows_the_job_itself() -> None:
    course = Course.begin(Pace().learned(PLAN, DURATIONS, 15.0), PLAN, 0.0)
    assert course.left(0.0) == pytest.approx(15.0)
    assert course.left(4.0) == pytest.approx(11.0)
    slow = course.reached("denoising", 0, 8, 0, 2.5).reached("denoising", 1, 8, 0, 4.5)
    assert slow.left(4.5) == pytest.approx(7 * 2.0 + 4.5, rel=0.1)
    assert slow.left(1000.0) == 0.0


def test_a_first_part_that_is_quick_says_little_of_a_short_stage() -> None:
    short = {name: seconds / 100 for name, seconds in DURATIONS.items()}
    course = Course.begin(Pace().learned(PLAN, short, 0.15), PLAN, 0.0)
    begun = course.reached("decoding", 0, 6, 0, 0.1)
    before, after = begun.left(0.1), begun.reached("decoding", 1, 6, 0, 0.101).left(0.101)
    assert before is not None
    assert after is not None
    assert 0.7 * before < after < before


def test_a_first_job_says_nothing_before_it_has_finished_a_part() -> None:
    course = Course.begin(Pace(), PLAN, 0.0)
    assert course.left(1.0) is None
    assert Pace().whole(PLAN) is None
    left = course.reached("media", 1, 1, 0, 2.0).left(2.0)
    assert left is not None
    assert left > 2.0


def test_a_stage_that_reports_no_part_took_as_long_as_it_was_until_the_next() -> None:
    course = Course.begin(Pace(), PLAN, 0.0).reached("transferring", 0, 1, 0, 2.0)
    assert course.reached("denoising", 0, 8, 0, 5.0).seen["transferring"] == 3.0


def test_work_on_references_grows_with_their_pixels_and_their_frames() -> None:
    video = PlannedReference(kind="video", file="0", sha256="0" * 64, bytes=1, height=100, width=200, frames=50)
    image = video.model_copy(update={"kind": "image", "frames": None})
    sound = PlannedReference(kind="audio", file="2", sha256="0" * 64, bytes=1, seconds=3.0)
    plan = PLAN.model_copy(update={"references": (video, image, sound)})
    assert units(plan, "vae") == pytest.approx(1.0 + 0.02)
    assert units(plan, "media") == pytest.approx(1.0 + 1.0 + 0.02)
    assert units(PLAN, "vae") == 0.0


def test_a_job_that_another_service_makes_is_judged_by_its_progress_alone() -> None:
    begun = new_job().start(1000.0)
    assert by_its_own_pace(new_job(), 1010.0) is None
    assert by_its_own_pace(begun, 1010.0) is None
    assert by_its_own_pace(begun.advance("encoding", 1), 1010.0) == 990.0
    assert by_its_own_pace(begun.advance("denoising", 25), 1010.0) == 30.0


def test_expectations_follow_the_size_and_number_of_clips() -> None:
    pace = Pace().learned(PLAN, DURATIONS, 15.0)
    assert pace.whole(PLAN) == pytest.approx(15.0)
    large = PLAN.model_copy(update={"width": 128, "num_inference_steps": 17, "num_outputs": 2})
    expected = pace.expects(large)
    assert expected is not None
    assert expected["denoising"] == pytest.approx(4 * 8.0)
    assert expected["sound"] == pytest.approx(1.0)
    assert expected["decoding"] == pytest.approx(2 * 3.0)
    assert pace.whole(large) == pytest.approx(2.5 + 2 * (32.0 + 1.0 + 6.0 + 1.0))


def test_another_task_begins_with_what_the_first_one_taught() -> None:
    pace = Pace().learned(PLAN, DURATIONS, 15.0)
    assert pace.whole(PLAN.model_copy(update={"task": Task.REF2VA})) == pytest.approx(15.0)


def test_skipped_forwards_have_a_pace_of_their_own() -> None:
    high = PLAN.model_copy(update={"quality": "high"})
    pace = Pace().learned(PLAN, DURATIONS, 15.0)
    assert pace.whole(high) == pytest.approx(15.0)  # nothing better is known
    pace = pace.learned(high, {**DURATIONS, "denoise": 3.5}, 11.0)
    assert (pace.whole(PLAN), pace.whole(high)) == (pytest.approx(15.0), pytest.approx(11.0))
    other = PLAN.model_copy(update={"task": Task.REF2VA})
    taught = pace.learned(other, {**DURATIONS, "denoise": 15.5}, 23.0)
    assert taught.whole(other.model_copy(update={"quality": "high"})) == pytest.approx(23.0)


def test_progress_is_straight_where_every_other_forward_is_skipped() -> None:
    # the first four are computed, then each second one takes hardly any time
    plan = PLAN.model_copy(update={"num_inference_steps": 50, "quality": "high"})
    course, now, seen = Course.begin(Pace().learned(plan, DURATIONS, 15.0), plan, 0.0), 1.0, []
    course = course.reached("denoising", 0, 49, 0, now)
    for done in range(1, 50):
        now += 0.02 if done > 4 and done % 2 else 1.0
        course = course.reached("denoising", done, 49, 0, now)
        seen.append((now, course.percent))
    assert correlation(seen) > 0.99
    assert [percent for _, percent in seen] == sorted(percent for _, percent in seen)


def test_the_pace_adapts_to_a_machine_that_became_slower() -> None:
    pace = Pace().learned(PLAN, DURATIONS, 15.0)
    slow = {name: 3 * seconds for name, seconds in DURATIONS.items()}
    wholes = []
    for _ in range(8):
        pace = pace.learned(PLAN, slow, 45.0)
        wholes.append(pace.whole(PLAN) or 0.0)
    assert all(before < after for before, after in itertools.pairwise(wholes))
    assert wholes[-1] == pytest.approx(45.0, rel=0.05)


def test_conditioning_that_was_kept_teaches_nothing_about_encoding() -> None:
    pace = Pace().learned(PLAN, DURATIONS, 15.0)
    again = pace.learned(PLAN, {**DURATIONS, "encode": 0.0, "encode_text": 0.0, "transfer": 0.0}, 12.5)
    assert again.expects(PLAN) == pace.expects(PLAN)


def test_times_of_several_outputs_count_for_each() -> None:
    plan = PLAN.model_copy(update={"num_outputs": 4})
    seconds = measured(plan, DURATIONS)
    assert [seconds[stage] for stage in PER_OUTPUT] == [2.0, 0.25, 0.75, 0.125]
    assert (seconds["media"], seconds["text"]) == (0.5, 1.5)
    assert units(plan, "denoising") == units(PLAN, "denoising")
