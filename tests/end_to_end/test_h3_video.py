"""`h3-video` and the example for the OpenAI SDK against a live pair: clips, a service that restarts, and Ctrl-C."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.pair import Pair
from tests.end_to_end.plain_media import read_clip
from tests.end_to_end.processes import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SHORT = ("--steps", "2", "--seconds", "4", "--size", "64x64")


def command(pair: Pair, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "video_client.make", "a red ball", "--url", pair.diffusion.url, *arguments]


def run(pair: Pair, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(pair, *arguments), capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("media", "task"),
    [
        ((), "t2va"),
        (("--image", "img_quad.png", "--last", "img_exif6.jpg"), "fl2va"),
        (("--ref", "img_odd.png", "--ref", "vid_24fps.mp4"), "ref2va"),
    ],
)
def test_each_task_makes_a_clip(pair: Pair, cases: Path, tmp_path: Path, media: tuple[str, ...], task: str) -> None:
    files = [each if each.startswith("--") else str(cases / each) for each in media]
    done = run(pair, *SHORT, *files, "-o", str(tmp_path / "out.mp4"))
    assert done.returncode == 0, done.stderr
    assert read_clip((tmp_path / "out.mp4").read_bytes()).frames.shape == (107, 64, 64, 3)
    video = pair.client.get("/v1/videos?limit=1").json()["data"][0]
    assert (video["task"], video["prompt"]) == (task, "a red ball")
    sent = [hashlib.sha256(Path(each).read_bytes()).hexdigest() for each in files if not each.startswith("--")]
    assert [each["sha256"] for each in video["references"]] == sent
    assert "denoising" in done.stderr


def test_a_service_that_restarts_meanwhile_is_waited_for(pair: Pair, tmp_path: Path) -> None:
    arguments = command(pair, "--steps", "100", "-o", str(tmp_path / "out.mp4"))
    before = newest(pair)
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as running:
        pair.wait_phase(added(pair, before), "denoising")
        pair.diffusion.kill()
        pair.diffusion.start()
        _, said = running.communicate(timeout=240)
    assert running.returncode == 0, said
    assert (tmp_path / "out.mp4").stat().st_size > 1000


def test_an_interrupt_cancels_the_job(pair: Pair) -> None:
    before = newest(pair)
    with subprocess.Popen(command(pair, "--steps", "200"), stderr=subprocess.PIPE, text=True) as running:
        job = added(pair, before)
        pair.wait_phase(job, "denoising")
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert f"{job} is cancelled" in said
    assert pair.video(job)["status"] == "cancelled"


def newest(pair: Pair) -> str | None:
    """The job that was added last."""
    data = pair.client.get("/v1/videos?limit=1").json()["data"]
    return str(data[0]["id"]) if data else None


def added(pair: Pair, before: str | None) -> str:
    """The job that comes after `before`."""
    return wait_until(lambda: now if (now := newest(pair)) != before else None, 60, "a new job") or ""


def test_the_example_for_the_openai_sdk_makes_a_clip(pair: Pair, tmp_path: Path) -> None:
    example = ROOT / "docs" / "examples" / "openai_sdk.py"
    assert len([line for line in example.read_text().splitlines() if line]) <= 10
    environment = {**os.environ, "OPENAI_BASE_URL": f"{pair.diffusion.url}/v1", "OPENAI_API_KEY": "-"}
    done = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (clip,) = tmp_path.glob("video_*.mp4")
    assert len(read_clip(clip.read_bytes()).frames) == 107
