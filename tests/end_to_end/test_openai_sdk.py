"""The `openai` package's `client.videos` against the live pair, as its users write it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.end_to_end.pair import Pair
from tests.end_to_end.plain_media import read_clip

# The package marks `videos` as deprecated because its maker's own service ends.
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")

SHORT: dict[str, object] = {"num_inference_steps": 2, "num_frames": 107}
"""What makes a job last a second here."""


@pytest.fixture(scope="module")
def client(pair: Pair) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{pair.diffusion.url}/v1", api_key="no key is configured", max_retries=0) as client:
        yield client


def test_create_with_a_prompt_alone(pair: Pair, client: OpenAI) -> None:
    # case 26
    video = client.videos.create(prompt="hi")
    assert (video.object, video.status, video.progress) == ("video", "queued", 0)
    done = pair.completed(video.id, timeout_s=180)
    assert (done["task"], done["size"], done["num_frames"]) == ("t2va", "128x64", 124)


def test_create_and_poll_then_download(client: OpenAI, tmp_path: Path) -> None:
    video = client.videos.create_and_poll(prompt="waves", extra_body={**SHORT, "size": "64x64"}, poll_interval_ms=100)
    assert (video.status, video.progress, video.size) == ("completed", 100, "64x64")
    assert video.seconds == "4.458"
    client.videos.download_content(video.id).write_to_file(tmp_path / "clip.mp4")
    assert read_clip((tmp_path / "clip.mp4").read_bytes()).frames.shape == (107, 64, 64, 3)
    thumbnail = client.videos.download_content(video.id, variant="thumbnail").read()
    assert thumbnail.startswith(b"\xff\xd8\xff")


def test_the_server_says_how_often_to_poll(client: OpenAI) -> None:
    answer = client.videos.with_raw_response.create(prompt="waves", extra_body={**SHORT, "size": "32x32"})
    assert int(answer.headers["openai-poll-after-ms"]) > 0
    client.videos.poll(answer.parse().id)


def test_list_pages_through_every_job_once(client: OpenAI) -> None:
    made = [client.videos.create(prompt=str(n), extra_body={**SHORT, "size": "32x32"}).id for n in range(5)]
    newest = client.videos.list(limit=2)
    assert [video.id for video in newest.data] == [made[4], made[3]]
    every = [video.id for video in client.videos.list(limit=2)]
    assert len(set(every)) == len(every)
    assert every[:5] == made[::-1]
    upwards = [video.id for video in client.videos.list(limit=3, order="asc")]
    assert upwards == every[::-1]
    for job in made:
        client.videos.poll(job, poll_interval_ms=100)


def test_retrieve_then_delete(client: OpenAI) -> None:
    video = client.videos.create_and_poll(prompt="gone", extra_body={**SHORT, "size": "32x32"}, poll_interval_ms=100)
    assert client.videos.retrieve(video.id).prompt == "gone"
    deleted = client.videos.delete(video.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (video.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)
    with pytest.raises(openai.NotFoundError):
        client.videos.download_content(video.id)


def test_nested_values_in_extra_body(pair: Pair, client: OpenAI, cases: Path) -> None:
    extra = {
        **SHORT,
        "size": "64x64",
        "seed": 5,
        "extra_params": {"task": "fl2va", "frame_indices": [-1], "audio_flow_shift": 3.0, "target": {"short_edge": 64}},
    }
    video = client.videos.create(prompt="ends here", input_reference=cases / "img_quad.png", extra_body=extra)
    done = pair.completed(video.id)
    assert (done["task"], done["seed"], len(done["references"])) == ("fl2va", 5, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("spelling", ["path", "bytes", "tuple", "typed tuple", "list"])
def test_input_reference_in_every_spelling(pair: Pair, client: OpenAI, cases: Path, spelling: str) -> None:
    path = cases / "img_quad.png"
    data = path.read_bytes()
    values: dict[str, object] = {
        "path": path,
        "bytes": data,
        "tuple": ("a.png", data),
        "typed tuple": ("a.png", data, "image/png"),
        "list": [path, cases / "ref1.png"],
    }
    video = client.videos.create(
        prompt="from a picture",
        input_reference=values[spelling],  # type: ignore[arg-type]
        extra_body={**SHORT, "size": "64x64"},
    )
    done = pair.completed(video.id)
    assert done["task"] == "fl2va"
    assert len(done["references"]) == (2 if spelling == "list" else 1)  # type: ignore[arg-type]


def test_a_failed_job_is_an_answer_and_not_an_exception(client: OpenAI, cases: Path) -> None:
    # case 12
    broken = cases / "vid_broken_middle.mp4"
    extra = {**SHORT, "size": "64x64"}
    video = client.videos.create(prompt="like <Video 1>", input_reference=broken, extra_body=extra)
    failed = client.videos.poll(video.id, poll_interval_ms=100)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "invalid_input"
    assert client.videos.retrieve(video.id).status == "failed"
    with pytest.raises(openai.NotFoundError):
        client.videos.download_content(video.id)


def test_a_bad_request_is_a_typed_exception_that_names_the_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.videos.create(prompt="two seconds", seconds="2")  # type: ignore[arg-type]
    assert caught.value.param == "seconds"


def test_routes_that_are_not_served_say_so(client: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.videos.remix("video_" + "0" * 32, prompt="another")
    assert caught.value.status_code == 501
    assert caught.value.response.headers["x-should-retry"] == "false"
