"""What a body says, field by field, and the order of its references."""

import json
from pathlib import Path

import pytest

from diffusion_service.api.dataurls import DataUrls
from diffusion_service.api.fields import Fields, Source, read_fields
from diffusion_service.api.forms import Form, Value
from diffusion_service.api.uploads import FileSink, UploadedFile
from shared_schema.errors import InvalidRequest, NotServed, RequestError
from shared_schema.tasks import Task


def fields(*entries: tuple[str, Value]) -> Fields:
    return read_fields(Form(entries, DataUrls(lambda: FileSink(Path("/dev/null"), 0, None))))


def refused(*entries: tuple[str, Value]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        fields(*entries)
    assert caught.value.status == 400
    return caught.value


def upload(name: str) -> UploadedFile:
    return UploadedFile(Path(name), 1, "0")


@pytest.mark.parametrize(
    "entries",
    [
        [("seed", "7"), ("width", "96"), ("flow_shift", "3.5"), ("return_stage_metrics", "true")],
        [("seed", 7), ("width", 96.0), ("flow_shift", 3.5), ("return_stage_metrics", True)],
        [("seed", "7.0"), ("width", "+96"), ("flow_shift", "35e-1"), ("return_stage_metrics", "1")],
    ],
)
def test_numbers_and_booleans_may_be_text(entries: list[tuple[str, Value]]) -> None:
    create = fields(*entries).create
    assert (create.seed, create.width, create.flow_shift, create.return_stage_metrics) == (7, 96, 3.5, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", True),
        ("seed", ""),
        ("seed", "0x10"),
        ("seed", "1_000"),
        ("seed", " 1"),
        ("seed", "٣"),
        ("seed", -(2**63) - 1),
        ("seed", 1e30),
        ("width", []),
        ("flow_shift", "1" * 30),
        ("flow_shift", float("nan")),
        ("flow_shift", True),
        ("return_stage_metrics", "yes"),
        ("return_stage_metrics", 2),
        ("prompt", 7),
        ("prompt", ["x"]),
        ("model", False),
        ("size", "1344X768"),
        ("size", " 64x64"),
        ("size", "٦٤x٦٤"),
        ("quality", "best"),
        ("aspect_ratio", True),
        ("user", "x" * 513),
        ("extra_params", "null and void"),
        ("extra_params", 5),
    ],
)
def test_a_wrong_value_names_its_field(name: str, value: Value) -> None:
    assert refused((name, value)).param == name


@pytest.mark.parametrize("value", ["{}", {}])
def test_an_empty_object_says_nothing(value: Value) -> None:
    # An IndexError, and so a 500, until schemathesis sent it.
    assert fields(("prompt", "x"), ("extra_params", value)).create == fields(("prompt", "x")).create


def test_null_means_absent_at_every_depth() -> None:  # case 13
    create = fields(
        ("prompt", "x"),
        ("seed", None),
        ("extra_params", {"task": "t2va", "duration": None, "target": {"short_edge": None}}),
        ("image_reference", None),
        ("lora", None),
        ("nobody_knows", None),
    ).create
    assert create.seed is None
    assert create.extra_params is not None
    assert create.extra_params.task is Task.T2VA


@pytest.mark.parametrize(
    "entries",
    [
        [("extra_params", '{"task": "fl2va", "frame_indices": [0, -1], "target": {"duration_seconds": 5}}')],
        [("extra_params", {"task": "fl2va", "frame_indices": [0, -1], "target": {"duration_seconds": 5}})],
        [("extra_params", {"task": "fl2va", "frame_indices": "0,-1", "target": '{"duration_seconds": "5"}'})],
        [
            ("extra_params[task]", "fl2va"),
            ("extra_params[frame_indices][]", "0"),
            ("extra_params[frame_indices][]", "-1"),
            ("extra_params[target][duration_seconds]", "5"),
        ],
        [
            ("extra_params", '{"task": "fl2va", "frame_indices": "[0, -1]"}'),
            ("extra_params[target][duration_seconds]", "5"),
        ],
    ],
)
def test_nested_values_come_in_three_spellings(entries: list[tuple[str, Value]]) -> None:
    extra = fields(*entries).create.extra_params
    assert extra is not None
    assert extra.target is not None
    assert (extra.task, extra.frame_indices, extra.target.duration_seconds) == (Task.FL2VA, (0, -1), 5.0)


@pytest.mark.parametrize("ends", ["[]", "[1]", "[-1, 0]", "[0, 0]", "[true]", "x", "[[0]]", "{}"])
def test_frames_other_than_the_ends_are_refused(ends: str) -> None:
    assert refused(("extra_params[frame_indices]", ends)).param == "extra_params.frame_indices"


@pytest.mark.parametrize(
    "name", ["referenses", "frame_rate", "output_path", "task", "seed[a]x", "prompt\ud800", "SEED", "__class__"]
)
def test_an_unknown_field_is_refused_by_name(name: str) -> None:  # cases 15, 24
    error = refused(("prompt", "x"), (name, "1"))
    assert error.param == name
    assert "unknown" in error.message or "surrogate" in error.message


@pytest.mark.parametrize("where", ["{}", "extra_params[{}]"])
@pytest.mark.parametrize(
    "name", ["source_video", "video_noise_mask", "control_x", "long_video", "continuation_of", "preencode_a", "file_id"]
)
def test_known_fields_that_are_not_served_say_so(where: str, name: str) -> None:
    with pytest.raises(NotServed) as caught:
        fields((where.format(name), "1"))
    assert name in (caught.value.param or "")


def test_neutral_values_are_accepted() -> None:
    fields(
        ("guidance_scale", "1.0"),
        ("guidance_scale_2", 0),
        ("true_cfg_scale", "1"),
        ("negative_prompt", ""),
        ("generate_sound", "true"),
        ("enable_frame_interpolation", False),
        ("audio_mode", "native"),
        ("num_outputs_per_prompt", "1"),
    )


@pytest.mark.parametrize("quality", ["lossless", "high"])
def test_both_qualities_are_served(quality: str) -> None:
    assert fields(("quality", quality)).create.quality == quality


def test_half_a_surrogate_pair_is_no_text() -> None:  # case 71
    assert refused(("prompt", "\ud800")).param == "prompt"
    assert refused(("extra_params", {"aspect_ratio": "\ud800"})).param == "extra_params"
    assert fields(("prompt", "\U0001f468\u200d\U0001f469 \u202e <|im_end|> \0")).create.prompt is not None


def test_values_that_disagree_are_refused() -> None:
    assert refused(("seed", "1"), ("seed", "2")).param == "seed"
    assert refused(("extra_params", '{"task": "t2va"}'), ("extra_params[task]", "fl2va")).param == "extra_params.task"
    assert fields(("seed", "1"), ("seed", "1")).create.seed == 1


def test_files_and_texts_keep_to_their_fields() -> None:
    assert refused(("prompt", upload("a"))).param == "prompt"
    assert refused(("anything", upload("a"))).message == "unknown field 'anything'"
    assert refused(("encoder_output", "text")).param == "encoder_output"
    assert refused(("encoder_output", upload("a")), ("encoder_output", upload("b"))).param == "encoder_output"
    payload = upload("p")
    assert fields(("encoder_output", payload)).encoder_output is payload


def test_references_keep_request_order_across_fields() -> None:  # case 65
    a, b, c = upload("a"), upload("b"), upload("c")
    sources = fields(
        ("input_references", a),
        ("audio_reference", '{"audio_url": "data:;base64,AA=="}'),
        ("input_references", b),
        ("prompt", "x"),
        ("input_reference[]", c),
        ("image_reference[image_url]", "data:;base64,AQ=="),
    ).sources
    assert sources == (
        Source("input_references[0]", a),
        Source("audio_reference", "data:;base64,AA==", "audio"),
        Source("input_references[1]", b),
        Source("input_reference", c),
        Source("image_reference", "data:;base64,AQ==", "image"),
    )


def test_lists_of_objects_keep_what_each_says() -> None:
    first = {"video_url": "data:;base64,AA==", "use_audio": False, "start_time_seconds": None}
    second = {"video_url": "data:;base64,AQ==", "start_time_seconds": 1.5}
    expected = (
        Source("video_reference[0]", "data:;base64,AA==", "video", False, None),
        Source("video_reference[1]", "data:;base64,AQ==", "video", None, 1.5),
    )
    assert fields(("video_reference", [first, second])).sources == expected
    assert fields(("video_reference", json.dumps([first, second]))).sources == expected
    assert fields(("video_reference", first), ("video_reference", json.dumps(second))).sources == expected
    indexed = [
        ("video_reference[1][video_url]", "data:;base64,AQ=="),
        ("video_reference[0][video_url]", "data:;base64,AA=="),
        ("video_reference[0][use_audio]", "false"),
        ("video_reference[1][start_time_seconds]", "1.5"),
    ]
    assert fields(*indexed).sources == expected


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"image_url": "a", "video_url": "b"},
        {"video_url": "a"},
        {"image_url": "a", "use_audio": "maybe"},
        {"image_url": "a", "start_time_seconds": -1},
        {"image_url": "a", "weight": 1},
        {"image_url": "a", "file_id": "b"},
        {"image_url": 5},
        "{broken",
        5,
        True,
        [[]],
    ],
)
def test_a_reference_that_is_none_is_refused(value: Value) -> None:  # case 15
    assert (refused(("image_reference", value)).param or "").startswith("image_reference")


def test_a_long_data_url_in_the_prompt_is_refused(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "a", 10**6, None)
    urls = DataUrls(lambda: sink)
    prompt = urls.text().feed(b"see data:image/png;base64," + b"A" * 40_000 + b" here")
    with pytest.raises(InvalidRequest, match="data: URL") as caught:
        read_fields(Form((("prompt", prompt.decode()),), urls))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "text"), [("extra_params[frame_indices]", "[" * 100_000), ("lora", '{"a":' * 100_000)]
)
def test_text_that_is_nested_without_end_is_a_refusal(field: str, text: str) -> None:
    assert refused((field, text)).param is not None
