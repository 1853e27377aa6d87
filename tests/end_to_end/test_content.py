"""Reading a finished clip: whole, in ranges, its head alone, its first frame."""

import io
from pathlib import Path

import pytest
from PIL import Image

from tests.end_to_end.clips import EQUAL_CLIPS, TEXT
from tests.end_to_end.pair import Pair


@pytest.fixture(scope="module")
def job(pair: Pair) -> str:
    """A completed job."""
    job = pair.submit({**TEXT.fields(), "num_inference_steps": "2"})
    pair.completed(job)
    return job


@pytest.fixture(scope="module")
def data(pair: Pair, job: str) -> bytes:
    """Its MP4."""
    return pair.client.get(f"/v1/videos/{job}/content").content


def test_the_whole_file(pair: Pair, job: str, data: bytes) -> None:
    answer = pair.client.get(f"/v1/videos/{job}/content")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "video/mp4"
    assert int(answer.headers["content-length"]) == len(data) == pair.video(job)["outputs"][0]["bytes"]  # type: ignore[index]
    assert answer.headers["accept-ranges"] == "bytes"
    assert data[4:8] == b"ftyp"
    assert data.index(b"moov") < data.index(b"mdat"), "the index lies in front, so that a player can start"


@pytest.mark.parametrize(
    ("asked", "begin", "end"),
    [("bytes=0-99", 0, 100), ("bytes=100-", 100, None), ("bytes=-100", -100, None), ("bytes=0-0", 0, 1)],
)
def test_a_range(pair: Pair, job: str, data: bytes, asked: str, begin: int, end: int | None) -> None:
    answer = pair.client.get(f"/v1/videos/{job}/content", headers={"Range": asked})
    assert answer.status_code == 206
    assert answer.content == data[begin:end]
    first = begin % len(data)
    assert answer.headers["content-range"] == f"bytes {first}-{first + len(answer.content) - 1}/{len(data)}"


def test_a_range_behind_the_end_is_416(pair: Pair, job: str, data: bytes) -> None:
    answer = pair.client.get(f"/v1/videos/{job}/content", headers={"Range": f"bytes={len(data)}-"})
    assert answer.status_code == 416


def test_head_answers_without_a_body(pair: Pair, job: str, data: bytes) -> None:
    answer = pair.client.head(f"/v1/videos/{job}/content")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) == len(data)


def test_the_thumbnail_is_a_jpeg_of_the_clips_size(pair: Pair, job: str) -> None:
    answer = pair.client.get(f"/v1/videos/{job}/content", params={"variant": "thumbnail"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
    with Image.open(io.BytesIO(answer.content)) as image:
        assert (image.format, image.size) == ("JPEG", (64, 64))


def test_a_spritesheet_is_refused_by_name(pair: Pair, job: str) -> None:
    answer = pair.client.get(f"/v1/videos/{job}/content", params={"variant": "spritesheet"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "variant")


def test_content_before_completion_and_of_nobody_is_404(pair: Pair) -> None:
    job = pair.submit({**TEXT.fields(), "num_inference_steps": "50"})
    assert pair.client.get(f"/v1/videos/{job}/content").status_code == 404
    assert pair.client.get(f"/v1/videos/video_{'0' * 32}/content").status_code == 404
    assert pair.client.delete(f"/v1/videos/{job}").status_code == 200


def test_progress_never_falls_and_visits_the_phases(pair: Pair) -> None:
    # case 20
    fields = {**TEXT.fields(), "num_inference_steps": "60", "size": "128x64", "num_frames": "209"}
    job = pair.submit(fields)
    seen = [pair.video(job)]
    while seen[-1]["status"] in ("queued", "in_progress"):
        seen.append(pair.video(job))
    progress = [int(video["progress"]) for video in seen]  # type: ignore[call-overload]
    assert progress == sorted(progress)
    assert (progress[0], progress[-1], seen[-1]["status"]) == (0, 100, "completed")
    assert all(video["status"] == "completed" for video in seen if video["progress"] == 100)
    assert {"denoising", "decoding"} <= {video["phase"] for video in seen}
    assert len(set(progress)) > 10, "progress moves with the steps"
    assert pair.client.get(f"/v1/videos/{job}/content").status_code == 200


def test_progress_moves_while_a_video_is_encoded(pair: Pair, cases: Path) -> None:
    # case 20
    clip = next(each for each in EQUAL_CLIPS if each.name == "ref2va_video")
    job = pair.submit({**clip.fields(), "prompt": "nobody encoded this before"}, clip.parts(cases))
    seen = [pair.video(job)]
    while seen[-1]["phase"] in ("queued", "encoding"):
        seen.append(pair.video(job))
    assert len({video["progress"] for video in seen if video["phase"] == "encoding"}) > 2
    pair.completed(job)
