"""The requests of vLLM-Omni's recipe as they stand, sizes made small for the tiny checkpoint."""

import base64
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.end_to_end.clips import FilePart, file_part, form
from tests.end_to_end.pair import Pair
from tests.end_to_end.plain_media import ReadClip, read_clip

COMMON = {"prompt": "a lighthouse at dusk", "fps": "24", "num_inference_steps": "3", "flow_shift": "12", "seed": "1101"}
CANVAS = {**COMMON, "width": "128", "height": "64", "aspect_ratio": "16:9"}
ADAPTIVE = {**COMMON, "aspect_ratio": "adaptive", "short_edge": "64"}


def sync(pair: Pair, fields: dict[str, str], parts: Iterable[FilePart] = ()) -> ReadClip:
    """`curl -X POST $D/v1/videos/sync -F ... -o clip.mp4`, decoded."""
    answer = pair.client.post("/v1/videos/sync", files=form(fields, parts))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "video/mp4"
    for header in ("x-request-id", "x-video-id", "x-model", "x-inference-time-s", "x-stage-durations"):
        assert answer.headers[header]
    return read_clip(answer.content)


def extra(task: str, duration: float, more: str = "") -> dict[str, str]:
    """The field `extra_params`, as the recipe writes it."""
    return {"extra_params": f'{{"task":"{task}","duration":{duration}{more},"audio_flow_shift":3.0}}'}


def test_text_to_video(pair: Pair) -> None:
    clip = sync(pair, {**CANVAS, **extra("t2va", 8.7)})
    assert (clip.size, len(clip.frames)) == ("128x64", 209)


def test_a_first_frame(pair: Pair, cases: Path) -> None:
    parts = [file_part(cases / "img_quad.png", "input_reference")]
    clip = sync(pair, {**CANVAS, **extra("fl2va", 8.7)}, parts)
    assert (clip.size, len(clip.frames)) == ("128x64", 209)


def test_a_first_and_a_last_frame(pair: Pair, cases: Path) -> None:
    parts = [file_part(cases / name) for name in ("img_quad.png", "ref1.png")]
    clip = sync(pair, {**CANVAS, **extra("fl2va", 8.7, ',"frame_indices":[0,-1]')}, parts)
    assert (clip.size, len(clip.frames)) == ("128x64", 209)


def test_a_reference_picture(pair: Pair, cases: Path) -> None:
    clip = sync(pair, {**ADAPTIVE, **extra("ref2va", 8.0)}, [file_part(cases / "ref1.png", "input_reference")])
    assert (clip.size, len(clip.frames)) == ("128x64", 192)


def test_a_reference_picture_and_a_voice_in_a_data_url(pair: Pair, cases: Path) -> None:
    voice = base64.b64encode((cases / "aud_15s.wav").read_bytes()).decode()
    fields = {
        **ADAPTIVE,
        **extra("ref2va", 15.0),
        "audio_reference": f'{{"audio_url":"data:audio/wav;base64,{voice}"}}',
    }
    clip = sync(pair, fields, [file_part(cases / "ref1.png", "input_reference")])
    assert (clip.size, len(clip.frames)) == ("128x64", 362)


def test_two_reference_videos(pair: Pair, cases: Path) -> None:
    parts = [file_part(cases / "vid_24fps.mp4"), file_part(cases / "vid_quicktime.mov")]
    clip = sync(pair, {**ADAPTIVE, **extra("ref2va", 15.0)}, parts)
    assert (clip.size, len(clip.frames)) == ("128x64", 362)


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/sync"])
def test_a_urlencoded_body_is_read_too(pair: Pair, path: str) -> None:
    fields = {**COMMON, "size": "32x32", "num_inference_steps": "2", "extra_params[duration]": "4"}
    answer = pair.client.post(path, data=fields)
    assert answer.status_code == 200, answer.text[:500]
    if path == "/v1/videos":
        assert pair.completed(answer.json()["id"])["num_frames"] == 107


@pytest.mark.parametrize(("seconds", "frames"), [(4, 107), pytest.param(9, 226, marks=pytest.mark.slow), (15, 362)])
def test_what_is_asked_is_made_to_the_frame(pair: Pair, seconds: int, frames: int) -> None:
    # case 17
    job = pair.submit({"prompt": "a red ball", "seconds": str(seconds), "size": "64x64", "num_inference_steps": "2"})
    video = pair.completed(job)
    assert video["num_frames"] == frames
    assert video["duration_s"] == pytest.approx(frames / 24, abs=0.001)
    assert len(read_clip(pair.client.get(f"/v1/videos/{job}/content").content).frames) == frames


@pytest.mark.parametrize(
    "size", ["64x128", "96x64", *(pytest.param(each, marks=pytest.mark.slow) for each in ("128x64", "64x64", "128x32"))]
)
def test_a_size_that_is_accepted_is_made_to_the_pixel(pair: Pair, size: str) -> None:
    # case 19
    width, height = size.split("x")
    short = {"prompt": "a red ball", "num_frames": "107", "num_inference_steps": "2"}
    for spelled in ({"size": size}, {"width": width, "height": height}):
        assert sync(pair, {**short, **spelled}).size == size
