"""`h3-video` against a laid out service: one command, one clip, and an exit code for every end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.video_client.conftest import FAILED, Answer, Service, error, video
from video_client import make
from video_client.client import VideoClient
from video_client.make import main

ID = video("queued").id
CONTENT = f"GET /v1/videos/{ID}/content"
CUT = {"content-length": "6"}


def ready(service: Service, *content: Answer) -> None:
    """A service that makes the job at once."""
    service.will("POST /v1/videos", video("queued"))
    service.will(f"GET /v1/videos/{ID}", video("completed", 100))
    service.will(CONTENT, *(content or (Answer(b"mp4"),)))


def sent(service: Service) -> list[bytes]:
    """The lines of the form, in order."""
    return service.asked[0][1].split(b"\r\n")


def test_the_clip_is_in_its_file(service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready(service)
    clip = tmp_path / "out.mp4"
    assert (
        main(
            ["a red ball", "--url", service.url, "--seconds", "8", "--steps", "9", "--quality", "high", "-o", str(clip)]
        )
        == 0
    )
    assert clip.read_bytes() == b"mp4"
    assert f"{clip}  3 bytes" in capsys.readouterr().out
    assert b"seconds=8&num_inference_steps=9&quality=high" in sent(service)[0]


def test_frames_and_references_become_their_tasks(service: Service, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.png", "b.png")]
    for file in files:
        file.write_bytes(file.name.encode())
    ready(service)
    first, last = map(str, files)
    wanted: list[tuple[list[str], dict[str, object], list[bytes]]] = [
        (["--last", last, "--image", first], {"task": "fl2va", "frame_indices": [0, -1]}, [b"a.png", b"b.png"]),
        (["--last", last], {"task": "fl2va", "frame_indices": [-1]}, [b"b.png"]),
        (["--ref", last, "--ref", first], {"task": "ref2va"}, [b"b.png", b"a.png"]),
    ]
    for arguments, extra, parts in wanted:
        service.asked.clear()
        assert main(["hi", "--url", service.url, "-o", str(tmp_path / "out.mp4"), *arguments]) == 0
        lines = sent(service)
        assert json.dumps(extra).encode() in lines
        assert [line for line in lines if line in (b"a.png", b"b.png")] == parts


def test_a_lost_answer_is_asked_for_again_with_the_same_key(service: Service, tmp_path: Path) -> None:
    ready(service)
    service.will("POST /v1/videos", Answer(b"half", headers=CUT), video("queued"))
    assert main(["hi", "--url", service.url, "-o", str(tmp_path / "out.mp4")]) == 0
    first, second = service.idempotency_keys
    assert first == second
    assert first


def test_a_download_goes_on_where_it_broke(service: Service, tmp_path: Path) -> None:
    ready(service, Answer(b"abc", headers=CUT), Answer(b"def", 206))
    assert main(["hi", "--url", service.url, "-o", str(tmp_path / "out.mp4")]) == 0
    assert (tmp_path / "out.mp4").read_bytes() == b"abcdef"
    assert service.ranges == [None, "bytes=3-"]


def test_a_download_that_cannot_go_on_begins_again(service: Service, tmp_path: Path) -> None:
    ready(service, Answer(b"abc", headers=CUT), Answer(b"ABCDEF", 200))
    assert main(["hi", "--url", service.url, "-o", str(tmp_path / "out.mp4")]) == 0
    assert (tmp_path / "out.mp4").read_bytes() == b"ABCDEF"


def test_every_other_end_has_its_code(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "PATIENCE_S", 0.0)
    service.will("POST /v1/videos", error(400, "no", "seconds"))
    assert main(["hi", "--url", service.url]) == make.FAILED
    assert capsys.readouterr().err == "h3-video: 400 invalid_request (seconds): no\n"
    service.will("POST /v1/videos", video("queued"))
    service.will(f"GET /v1/videos/{ID}", FAILED)
    assert main(["hi", "--url", service.url]) == make.FAILED
    assert "worker_died: a rank left" in capsys.readouterr().err
    service.will(f"GET /v1/videos/{ID}", video("in_progress", 3))
    assert main(["hi", "--url", service.url, "--timeout", "0.1"]) == make.UNFINISHED
    assert main(["hi", "--url", "http://127.0.0.1:9"]) == make.AWAY
    with pytest.raises(SystemExit) as end:
        main(["hi", "--image", "a.png", "--ref", "b.png"])
    assert end.value.code == make.USAGE


def test_an_interrupt_cancels_the_job(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.will("POST /v1/videos", video("queued"))
    service.will(f"POST /v1/videos/{ID}/cancel", video("cancelled"))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VideoClient, "wait", interrupted)
    assert main(["hi", "--url", service.url]) == make.INTERRUPTED
    assert service.asked[-1][0] == f"POST /v1/videos/{ID}/cancel"


def test_the_command_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'diffusers', 'transformers', 'av', 'PIL', 'fastapi'}"
    program = f"import sys, video_client.make\nprint(sorted({heavy} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def test_help_names_every_exit_code() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "video_client.make", "--help"], capture_output=True, text=True, timeout=60
    )
    for code in (make.DONE, make.FAILED, make.USAGE, make.AWAY, make.UNFINISHED, make.INTERRUPTED):
        assert f"\n  {code:<4} " in run.stdout
