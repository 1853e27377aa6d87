"""The harness, with a maker that knows the world by heart: what is right passes, what is broken does not."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shared_runtime.demo.prompts import trained_on
from shared_runtime.demo.scene import BACKGROUNDS, Motion, Scene
from shared_runtime.demo.world import frames
from tests.meaning.cases import Case, all_cases
from tests.meaning.judge import decode
from tests.meaning.results import NEEDED, Result, Results
from tests.meaning.run import ServedMaker, chosen, judged, late, main, psnr, run
from video_client.client import ClientError, VideoClient
from video_client.scenes import FRAMES, HEIGHT, WIDTH, write_scene

CASES = all_cases(4, 20)
MADE_BY = {"weights": "these"}


class Knowing:
    """Makes the very scene, or another one."""

    def __init__(self, scenes: dict[str, Scene] | None = None, fail_at: str | None = None) -> None:
        self.made: list[str] = []
        self._scenes, self._fail_at = scenes or {}, fail_at

    def make(self, case: Case, clip: Path) -> None:
        if case.name == self._fail_at:
            raise ClientError("away")
        self.made.append(case.name)
        write_scene(clip, self._scenes.get(case.name, case.scene))


def test_two_hundred_prompts_are_unseen_and_half_of_them_of_unseen_combinations() -> None:
    cases = all_cases(200, 20)
    texts = [case for case in cases if case.task == "t2va"]
    assert len(texts) == 200
    assert not [case for case in texts if trained_on(case.prompt)]
    assert Counter(case.scene.unseen for case in texts) == {True: 100, False: 100}
    assert len({case.name for case in cases}) == len(cases)
    assert {case.task for case in cases} == set(NEEDED)
    assert cases == all_cases(200, 20)


@pytest.mark.slow
def test_right_clips_hold_everything_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    stopped = Knowing(fail_at=CASES[5].name)
    with pytest.raises(ClientError):
        run(CASES, [stopped], Results(file, MADE_BY), tmp_path / "clips")
    going_on, also = Knowing(), Knowing()
    run(CASES, [going_on, also], Results(file, MADE_BY), tmp_path / "clips")
    assert stopped.made == [case.name for case in CASES[:5]]
    assert sorted(going_on.made + also.made) == sorted(case.name for case in CASES[5:])
    assert going_on.made
    assert also.made
    results = Results(file, MADE_BY)
    assert not results.missed(NEEDED), results.table()
    assert "| t2va | all | colour | 4 | 4 | 100.0 | 95 |" in results.table()


def test_a_torn_last_line_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    for name in ("one", "two"):
        Results(file, MADE_BY).add(Result(name, "g", "t2va", {"colour": True}, 1.0))
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    assert Results(file, MADE_BY).names() == {"one"}
    Results(file, MADE_BY).add(Result("two", "g", "t2va", {"colour": True}, 1.0))
    assert file.read_bytes() == whole


def test_when_one_of_two_makers_fails_the_other_begins_nothing_more(tmp_path: Path) -> None:
    cases = CASES[:8]
    failing, other = (Knowing(fail_at=cases[1].name) for _ in range(2))
    with pytest.raises(ClientError, match="away"):
        run(cases, [failing, other], Results(tmp_path / "results.jsonl", MADE_BY), tmp_path / "clips")
    assert len(failing.made + other.made) < 4


def test_a_part_of_a_run_is_its_first_cases_and_those_of_an_adapter_its_tasks() -> None:
    cases = all_cases(200, 20)
    part = chosen(cases, ["t2va", "ref2va"], None, 3)
    assert set(Counter(case.group for case in part).values()) == {3}
    assert {case.task for case in part} == {"t2va", "ref2va"}
    assert [case.name for case in part[:3]] == ["text_000", "text_001", "text_002"]
    assert chosen(cases, list(NEEDED), None, None) == cases
    for name, tasks in (("minimax_h3_fl2v_turbo", {"t2va", "fl2va"}), ("minimax_h3_ref2v_turbo", {"ref2va"})):
        assert {case.task for case in chosen(cases, list(NEEDED), f"turbo/{name}", None)} == tasks


def test_a_turbo_runs_table_has_what_the_run_without_it_had(tmp_path: Path) -> None:
    without, turbo = (Results(tmp_path / name, MADE_BY) for name in ("without", "turbo"))
    for name, right in (("one", True), ("two", False)):
        without.add(Result(name, "g", "t2va", {"colour": True}, 1.0))
        turbo.add(Result(name, "g", "t2va", {"colour": right, "pan": right}, 1.0))
    head, _, colour, pan, *_ = turbo.table(without).splitlines()
    assert head.endswith("| needed | % without |")
    assert colour == "| t2va | all | colour | 1 | 2 | 50.0 | 95 | 100.0 |"
    assert pan == "| t2va | all | pan | 1 | 2 | 50.0 |  |  |"


def test_results_below_what_is_needed_are_named(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl", MADE_BY)
    right = {"colour": True, "shape": True, "motion": True, "pitch": True, "clicks": True}
    results.all = [Result(f"{i}", "g", "t2va", {**right, "colour": i > 0}, 1.0) for i in range(10)]
    assert results.missed({"t2va"}) == ["t2va: colour 90.0 %, needed 95 %"]
    turbo = Results(tmp_path / "turbo.jsonl", MADE_BY)
    turbo.all = [Result(f"{i}", "g", "t2va", {**right, "colour": i > 0, "shape": i > 1}, 1.0) for i in range(10)]
    assert results.lost_to(turbo) == ["t2va: shape 80.0 % with Turbo, 100.0 % without"]


def test_what_was_not_seen_does_not_hold(tmp_path: Path) -> None:
    results, none = Results(tmp_path / "results.jsonl", MADE_BY), Results(tmp_path / "none.jsonl", MADE_BY)
    assert "fl2va: first was not seen" in results.missed({"fl2va"})
    results.add(Result("one", "g", "fl2va", {"first": True}, 1.0))
    assert results.missed({"fl2va"}) == ["fl2va: last was not seen", "fl2va: continuous was not seen"]
    with pytest.raises(ValueError, match="no task in common"):
        results.lost_to(none)
    with pytest.raises(OSError, match="nothing"):
        Results.kept(tmp_path / "nothing.jsonl")


def test_verdicts_on_other_weights_are_not_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    Results(file, MADE_BY).add(Result("one", "g", "t2va", {}, 1.0))
    assert Results.kept(file).names() == {"one"}
    with pytest.raises(ValueError, match="choose another --out"):
        Results(file, {**MADE_BY, "weights": "others"})


def clip_of(scene: Scene, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return decode(write_scene(folder / "clip.mp4", scene))


def test_what_a_wrong_order_or_a_fall_back_to_text_would_make_is_judged_wrong(tmp_path: Path) -> None:
    mine, swapped = (
        next(case for case in CASES if case.group == group) for group in ("two images", "two images, swapped")
    )
    assert mine.prompt == swapped.prompt
    assert mine.media == swapped.media[::-1]
    for made, case, right in ((mine, mine, True), (swapped, mine, False), (mine, swapped, False)):
        result = judged(case, *clip_of(made.scene, tmp_path), 1.0)
        assert all(result.right.values()) is right
    # A prompt that names no colour leaves a model free: any other thing than the picture's is wrong.
    image = next(case for case in CASES if case.group == "image")
    assert not all(judged(image, *clip_of(swapped.scene, tmp_path), 1.0).right.values())


def test_late_sound_is_judged_wrong(tmp_path: Path) -> None:
    case = next(case for case in all_cases(40, 20) if case.scene.motion is Motion.BOUNCE and case.task == "t2va")
    pictures, waveform = clip_of(case.scene, tmp_path)
    assert judged(case, pictures, waveform, 1.0).right["clicks"]
    assert not judged(case, pictures, late(waveform), 1.0).right["clicks"]


def test_a_keyframe_that_is_not_kept_and_a_jump_are_judged_wrong(tmp_path: Path) -> None:
    case = next(case for case in all_cases(60, 20) if case.group == "first and last frame")
    pictures, waveform = clip_of(case.scene, tmp_path)
    right = judged(case, pictures, waveform, 1.0).right
    assert right["first"]
    assert right["last"]
    assert right["continuous"]
    other = pictures.copy()
    other[0] = 255 - other[0]
    assert judged(case, other, waveform, 1.0).right["first"] is False
    jumping = np.concatenate([pictures[:50], pictures[50:, :, ::-1]])
    assert judged(case, jumping, waveform, 1.0).right["last"] is False
    assert psnr(pictures[0], pictures[0]) > 90


def test_requests_are_of_the_task_and_broken_ones_are_as_told(tmp_path: Path) -> None:
    with VideoClient("http://127.0.0.1:9") as client:

        def sent(case: Case, breakage: str | None = None) -> tuple[dict[str, object], list[str]]:
            request = ServedMaker(client, tmp_path, 9, breakage).request(case)  # type: ignore[arg-type]
            return dict(request.extra_params), [path.suffix for path in request.references]

        both = next(case for case in CASES if case.group == "first and last frame")
        assert sent(both) == ({"task": "fl2va", "frame_indices": [0, -1]}, [".png", ".png"])
        mixed = next(case for case in CASES if case.group == "video then image")
        assert sent(mixed) == ({"task": "ref2va"}, [".mp4", ".png"])
        assert sent(mixed, "order")[1] == [".png", ".mp4"]
        assert sent(mixed, "drop")[1] == [".png"]
        assert sent(mixed, "text") == ({"task": "t2va"}, [])
        sounding = next(case for case in CASES if case.group == "audio then image")
        assert sent(sounding)[1] == [".wav", ".png"]


def test_a_run_that_is_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tests.meaning.run.run", stopped)
    monkeypatch.setattr("tests.meaning.run.end_on_term", lambda: None)
    monkeypatch.setattr("sys.argv", ["run", "--url", "http://127.0.0.1:9", "--out", str(tmp_path)])
    assert main() == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_two_still_halves_are_not_continuous_nor_is_an_empty_frame_a_keyframe() -> None:
    cases = [case for case in all_cases(40, 20) if case.group == "first and last frame"]
    bounces = [case for case in cases if case.scene.motion is Motion.BOUNCE]
    assert bounces
    for case in bounces:
        right = frames(case.scene, FRAMES, HEIGHT, WIDTH)
        silence = np.zeros((2, 1000), np.float32)
        assert judged(case, right, silence, 0.0).right["continuous"]
        jumping = right[np.arange(FRAMES) // 2 * 17 % FRAMES]
        assert not judged(case, jumping, silence, 0.0).right["continuous"]
    small = [case for case in cases if case.scene.motion is Motion.GROW]
    assert small
    for case in small:
        right = frames(case.scene, FRAMES, HEIGHT, WIDTH)
        empty = right.copy()
        empty[0] = BACKGROUNDS[case.scene.background]
        assert judged(case, right, np.zeros((2, 1000), np.float32), 0.0).right["first"]
        assert not judged(case, empty, np.zeros((2, 1000), np.float32), 0.0).right["first"]
