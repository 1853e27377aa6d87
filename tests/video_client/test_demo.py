from pathlib import Path

import numpy as np
import pytest

from diffusion_service.mux import ClipWriter, check_clip
from tests.video_client.conftest import video
from video_client.demo import Clip, faults, main, requests, table
from video_client.samples import Samples, landscape

DIGESTS = {"frames_sha256": "f" * 64, "audio_sha256": "a" * 64}
SAMPLES = Samples(Path("picture.png"), Path("video.mp4"), Path("voice.wav"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip of 107 frames as a service would make it."""
    path = tmp_path_factory.mktemp("demo") / "t2va.mp4"
    with ClipWriter(path, 64, 128, 107) as writer:
        writer.write_frames(np.stack([landscape(128, 64, sun=place) for place in np.linspace(0, 1, 107)]))
        tone = (0.3 * np.sin(np.arange(178 * 800) / 10)).astype(np.float32)
        writer.write_sound(np.stack([tone, tone]))
        writer.finish()
    return path


def test_a_clip_that_keeps_its_jobs_word_has_no_faults(path: Path) -> None:
    assert faults(Clip(path, video("completed", 100, **DIGESTS), check_clip(path))) == []


def test_a_clip_that_does_not_is_told_how(path: Path) -> None:
    job = video("completed", 100, num_frames=124, size="64x128")
    wrong = faults(Clip(path, job, check_clip(path)))
    assert wrong == ["107 frames where the job says 124", "128x64 where the job says 64x128", "no digest"]


def test_the_table_shows_path_size_digest_and_stage_times(path: Path) -> None:
    job = video("completed", 100, stage_durations={"encode_text": 9.0, "encode": 1.25, "denoise": 0.5}, **DIGESTS)
    head, row = table({"t2va": Clip(path, job, check_clip(path))}).splitlines()
    assert head.split()[:3] == ["file", "size", "length"]
    for shown in (str(path), "128x64", "107 frames, 4.46 s", "f" * 16, "encode 1.25 denoise 0.50"):
        assert shown in row
    assert "encode_text" not in row


def test_there_is_one_request_of_each_task_and_ref2va_uses_every_kind() -> None:
    asked = requests(SAMPLES)
    assert {name: request.extra_params["task"] for name, request in asked.items()} == {
        name: name for name in ("t2va", "fl2va", "ref2va")
    }
    assert asked["fl2va"].references == [SAMPLES.picture]
    assert asked["ref2va"].references == [SAMPLES.picture, SAMPLES.video, SAMPLES.voice]


def test_a_demo_that_fails_shows_the_services_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path), "--model", "/no/such/folder"]) == 1
    shown = capsys.readouterr().err
    assert "--- the end of" in shown
    assert "/no/such/folder" in shown
    assert "demo: " in shown
