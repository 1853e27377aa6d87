"""What becomes of a request whose fields are right one by one: canvas, length, task, keyframes, defaults."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from diffusion_service.api.dataurls import DataUrls
from diffusion_service.api.fields import Fields, Source
from diffusion_service.api.plan import Reference, check_prompt, choose_task, plan_payload, plan_video
from diffusion_service.api.uploads import FileSink, UploadedFile
from diffusion_service.jobs.job import VideoPlan
from shared_runtime.media import Probe
from shared_schema.encode import ReferenceKind
from shared_schema.errors import RequestError
from shared_schema.layout import Block, BlockKind, Layout
from shared_schema.tasks import CanvasLimits, Task
from shared_schema.videos import CreateVideo
from tests.diffusion_service.api.served import LIMITS

RELEASED = dataclasses.replace(LIMITS, canvas=CanvasLimits())
FILE = UploadedFile(Path("000"), 1, "ab")


def image(width: int = 300, height: int = 200, param: str = "input_reference") -> Reference:
    return Reference(Source(param, FILE), FILE, "image", Probe("image", width, height))


def fields(values: dict[str, object], references: Sequence[Reference] = ()) -> Fields:
    urls = DataUrls(lambda: FileSink(Path("/dev/null"), 0, None))
    create = CreateVideo.model_validate({"prompt": "x", **values})
    return Fields(create, tuple(reference.source for reference in references), None, urls)


def plan(*references: Reference, **values: object) -> VideoPlan:
    asked = fields(values, references)
    task = choose_task(asked.create, [(r.source.param, r.kind) for r in references], RELEASED)
    return plan_video(asked, task, references, RELEASED, drawn=77)


def refused(*references: Reference, **values: object) -> str | None:
    with pytest.raises(RequestError) as caught:
        plan(*references, **values)
    assert caught.value.status == 400
    return caught.value.param


def test_a_prompt_alone_gets_the_defaults() -> None:  # case 26
    made = plan()
    assert (made.model, made.task, made.height, made.width, made.num_frames) == ("tiny", Task.T2VA, 768, 1344, 124)
    assert (made.num_inference_steps, made.flow_shift, made.audio_flow_shift, made.seed) == (4, 12.0, 3.0, 42)
    assert (made.keyframes, made.references, made.prompt) == ((), (), "x")
    assert (made.quality, made.num_outputs, made.return_stage_metrics) == ("lossless", 1, False)


def test_what_a_request_says_goes_before_the_defaults() -> None:
    made = plan(quality="high", num_inference_steps=9, flow_shift=5, num_outputs_per_prompt=3, user="me")
    assert (made.quality, made.num_inference_steps, made.flow_shift) == ("high", 9, 5.0)
    assert (made.num_outputs, made.user, made.forwards) == (3, "me", 8)
    made = plan(extra_params={"flow_shift": 5, "audio_flow_shift": 2}, return_stage_metrics=True)
    assert (made.flow_shift, made.audio_flow_shift, made.return_stage_metrics) == (5.0, 2.0, True)


@pytest.mark.parametrize(("prompt", "optional"), [(None, False), ("", False), (" \n", False), ("", True), (" ", True)])
def test_a_prompt_has_a_word_and_is_only_absent_where_it_may_be(prompt: str | None, optional: bool) -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt(fields({"prompt": prompt}).create, optional=optional)
    assert caught.value.param == "prompt"
    check_prompt(fields({"prompt": None}).create, optional=True)
    check_prompt(fields({}).create, optional=False)


@pytest.mark.parametrize(
    ("values", "frames"),
    [
        ({"seconds": "4"}, 107),
        ({"seconds": 8.7}, 209),
        ({"seconds": "12"}, 294),
        ({"seconds": "15"}, 362),
        ({"seconds": "15.083"}, 362),
        ({"num_frames": 96}, 107),
        ({"num_frames": "362"}, 362),
        ({"extra_params": {"duration": 8.0}}, 192),
        ({"extra_params": {"duration_seconds": 10}}, 243),
        ({"extra_params": {"target": {"duration_seconds": "5"}}}, 124),
        ({"seconds": 8.7, "num_frames": 209, "extra_params": {"duration": 8.5}}, 209),
    ],
)
def test_lengths_in_every_spelling(values: dict[str, object], frames: int) -> None:  # case 17
    assert plan(**values).num_frames == frames


@pytest.mark.parametrize("seconds", ["3.9", "15.5", "0", "-4"])
def test_lengths_that_the_model_has_not(seconds: str) -> None:
    assert refused(seconds=seconds) == "seconds"
    assert refused(extra_params={"duration": seconds}) == "extra_params.duration"


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({"size": "1344x768"}, "1344x768"),
        ({"width": 1344, "height": "768", "aspect_ratio": "16:9"}, "1344x768"),
        ({"size": "1280x720"}, "1344x768"),
        ({"size": "720x1280"}, "768x1344"),
        ({"size": "1024x1792", "aspect_ratio": "9:16"}, "768x1344"),
        ({"size": "1536x672"}, "1536x672"),
        ({"aspect_ratio": "21:9"}, "1536x672"),
        ({"aspect_ratio": "1:1", "short_edge": 768}, "768x768"),
        ({"extra_params": {"aspect_ratio": "4:3"}}, "1024x768"),
        ({"extra_params": {"target": {"aspect_ratio": "3:4", "short_edge": 768}}}, "768x1024"),
        ({"aspect_ratio": "adaptive", "short_edge": "768"}, "1344x768"),
        ({"aspect_ratio": "auto", "size": "768x1344"}, "768x1344"),
        ({"aspect_ratio": "adaptive", "extra_params": {"aspect_ratio": "1:1"}}, "768x768"),
        ({"aspect_ratio": 1.0}, "768x768"),
        ({"aspect_ratio": "16:9", "extra_params": {"aspect_ratio": "1.75"}}, "1344x768"),
    ],
)
def test_sizes_in_every_spelling(values: dict[str, object], size: str) -> None:  # case 19
    assert str(plan(**values).canvas) == size


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"size": "1408x768"}, "size"),
        ({"size": "1000x560"}, "size"),
        ({"size": "1344x0"}, "size"),
        ({"size": "2048x256"}, "size"),
        ({"width": 1344}, "width"),
        ({"height": 768}, "height"),
        ({"width": 0, "height": 768}, "width"),
        ({"width": -1344, "height": -768}, "width"),
        ({"size": "768x768", "width": 1344, "height": 768}, "width"),
        ({"size": "768x768", "aspect_ratio": "16:9"}, "aspect_ratio"),
        ({"aspect_ratio": "5:1"}, "aspect_ratio"),
        ({"aspect_ratio": "0:0"}, "aspect_ratio"),
        ({"aspect_ratio": "nan"}, "aspect_ratio"),
        ({"extra_params": {"target": {"aspect_ratio": "wide"}}}, "extra_params.target.aspect_ratio"),
        ({"short_edge": 480}, "short_edge"),
        ({"flow_shift": 12, "extra_params": {"flow_shift": 6}}, "extra_params.flow_shift"),
        ({"seconds": 5, "num_frames": 362}, "num_frames"),
        ({"model": "/etc"}, "model"),
        ({"extra_params": {"frame_indices": [0]}}, "extra_params.frame_indices"),
    ],
)
def test_fields_that_do_not_go_together(values: dict[str, object], param: str) -> None:  # case 19
    assert refused(**values) == param


@pytest.mark.parametrize(
    ("kinds", "task"),
    [
        ([], Task.T2VA),
        (["image"], Task.FL2VA),
        (["image", "image"], Task.FL2VA),
        (["image"] * 3, Task.REF2VA),
        (["image", "audio"], Task.REF2VA),
        (["video"], Task.REF2VA),
    ],
)
def test_media_imply_the_task(kinds: list[ReferenceKind], task: Task) -> None:
    assert choose_task(fields({}).create, [("r", kind) for kind in kinds], RELEASED) is task


@pytest.mark.parametrize(
    ("task", "kinds", "param"),
    [
        ("t2va", ["image"], "r0"),
        ("fl2va", [], "input_reference"),
        ("fl2va", ["image", "video"], "r1"),
        ("fl2va", ["image"] * 3, "r2"),
        ("ref2va", [], "input_references"),
        ("ref2va", ["audio"], "r0"),
        ("ref2va", ["image"] * 10, "r9"),
        ("ref2va", ["video"] * 4, "r3"),
        ("ref2va", ["image", *["audio"] * 4], "r4"),
        ("ref2va", [*["image"] * 9, *["video"] * 3, "audio"], "r12"),
    ],
)
def test_media_that_do_not_fit_the_task(task: str, kinds: list[ReferenceKind], param: str) -> None:  # case 43
    create = fields({"extra_params": {"task": task}}).create
    with pytest.raises(RequestError) as caught:
        choose_task(create, [(f"r{number}", kind) for number, kind in enumerate(kinds)], RELEASED)
    assert caught.value.param == param


def test_a_task_without_its_weights_is_refused() -> None:
    limits = dataclasses.replace(RELEASED, tasks=frozenset({Task.T2VA, Task.FL2VA}))
    with pytest.raises(RequestError, match="makes fl2va, t2va, not ref2va"):
        choose_task(fields({}).create, [("r", "video")], limits)


def test_the_first_picture_decides_the_canvas() -> None:
    assert str(plan(image(200, 300), image(300, 200)).canvas) == "768x1152"
    assert str(plan(image(200, 300), aspect_ratio="16:9").canvas) == "768x1152"
    assert str(plan(image(200, 300), size="1344x768").canvas) == "1344x768"
    assert refused(image(200, 300), aspect_ratio="wide") == "aspect_ratio"
    assert refused(image(200, 300), size="1344x768", aspect_ratio="9:16") == "aspect_ratio"


def test_keyframes_follow_count_or_request() -> None:
    assert plan(image()).keyframes == (0,)
    assert plan(image(), image()).keyframes == (0, -1)
    assert plan(image(), extra_params={"frame_index": -1}).keyframes == (-1,)
    assert plan(image(), extra_params={"frame_indices": "[-1]", "target": {"frame_indices": -1}}).keyframes == (-1,)
    assert refused(image(), extra_params={"frame_indices": [0, -1]}) == "extra_params.frame_indices"
    assert refused(image(), extra_params={"frame_indices": 0, "frame_index": -1}) == "extra_params.frame_index"


def test_seeds() -> None:
    assert plan(seed="-1").seed == 77
    assert plan(seed=0).seed == 0
    assert plan(seed=-5).seed == -5


def test_references_say_what_will_be_used_of_them() -> None:
    clip = Probe("video", 384, 640, frames=120, fps=24.0, seconds=5.0, has_audio=True, audio_seconds=5.0)
    video = Reference(Source("v", FILE, use_audio=False), FILE, "video", clip)
    sound = Reference(Source("a", FILE, start_seconds=0.0), FILE, "audio", Probe("audio", seconds=5.0, has_audio=True))
    made = plan(image(), video, sound, start_time_seconds="1.5").references
    assert [(r.kind, r.use_audio, r.start_seconds) for r in made] == [
        ("image", True, 0.0),
        ("video", False, 1.5),
        ("audio", True, 0.0),
    ]
    assert (made[1].width, made[1].height, made[1].frames, made[1].sha256) == (384, 640, 120, "ab")


LAYOUT = Layout(Task.FL2VA, 768, 1344, 209, (Block(BlockKind.IMAGE, 0, 0, 48, 84),) * 2, (0, -1))


def own(kinds: Sequence[ReferenceKind] = (), **values: object) -> VideoPlan:
    asked = dataclasses.replace(fields(values), sources=tuple(Source(f"r{n}", FILE) for n in range(len(kinds))))
    return plan_payload(asked, FILE, LAYOUT, kinds, RELEASED, drawn=77)


def test_a_payload_of_the_callers_own_decides_what_it_was_made_for() -> None:
    made = own(["image", "image"], seed=-1, size="1344x768", seconds=8.7, extra_params={"frame_indices": [0, -1]})
    assert own(aspect_ratio="1:1").canvas == made.canvas, "a lone ratio is unused where images decide"
    assert (made.task, str(made.canvas), made.num_frames) == (Task.FL2VA, "1344x768", 209)
    assert (made.keyframes, made.encoder_output, made.references, made.seed) == ((0, -1), "000", (), 77)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"seconds": 5}, "seconds"),
        ({"num_frames": 124}, "num_frames"),
        ({"extra_params": {"duration": 5}}, "extra_params.duration"),
        ({"size": "768x768"}, "size"),
        ({"size": "768x768", "aspect_ratio": "1:1"}, "size"),
        ({"extra_params": {"task": "t2va"}}, "extra_params.task"),
        ({"extra_params": {"frame_indices": [0]}}, "extra_params.frame_indices"),
        ({"kinds": ["image"]}, "r0"),
        ({"kinds": ["image", "video"]}, "r0"),
    ],
)
def test_whatever_disagrees_with_the_payload_is_refused(values: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        own(**values)  # type: ignore[arg-type]
    assert caught.value.param == param
