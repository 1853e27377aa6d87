import subprocess
import sys
from pathlib import Path

import pytest

from shared_schema.videos import VideoList
from tests.video_client.conftest import FAILED, Answer, Service, error, video
from video_client.cli import main

ID = video("queued").id


def test_create_prints_the_id_and_sends_what_was_given(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.will("POST /v1/videos", video("queued"))
    picture = tmp_path / "a.png"
    picture.write_bytes(b"picture")
    arguments = [
        "create",
        "a red ball",
        "--task",
        "fl2va",
        "--reference",
        str(picture),
        "--seconds",
        "4",
        "--seed",
        "7",
    ]
    assert main(["--url", service.url, *arguments, "--field", "user=me=you"]) == 0
    body = service.asked[0][1].split(b"\r\n")
    assert capsys.readouterr().out.strip() == ID
    assert {b"a red ball", b'{"task": "fl2va"}', b"4", b"7", b"me=you", b"picture"} <= set(body)


def test_create_and_wait_fetches_the_clip(service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service.will("POST /v1/videos", video("queued"))
    service.will(f"GET /v1/videos/{ID}", video("completed", 100, warnings=("the sound is silent",)))
    service.will(f"GET /v1/videos/{ID}/content", Answer(b"mp4"))
    clip = tmp_path / "clip.mp4"
    assert main(["--url", service.url, "create", "hi", "--wait", "--output", str(clip)]) == 0
    shown = capsys.readouterr()
    assert clip.read_bytes() == b"mp4"
    assert f"{clip}  3 bytes" in shown.out
    assert "warning: the sound is silent" in shown.err


def test_a_key_is_read_from_a_file_and_goes_with_every_request(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.will(f"GET /v1/videos/{ID}", video("queued"))
    file = tmp_path / "key"
    file.write_text("h3_secret\n")
    assert main(["--url", service.url, "--key-file", str(file), "show", ID]) == 0
    assert service.authorizations == {"Bearer h3_secret"}
    assert main(["--url", service.url, "--key-file", str(tmp_path / "none"), "show", ID]) == 1
    assert "--key-file" in capsys.readouterr().err


def test_a_failed_job_is_exit_code_1_with_its_reason(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    service.will(f"GET /v1/videos/{ID}", FAILED)
    assert main(["--url", service.url, "wait", ID]) == 1
    assert "worker_died: a rank left" in capsys.readouterr().err


def test_a_refusal_is_exit_code_1_with_one_line(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    service.will("POST /v1/videos", error(400, "no", "seconds"))
    assert main(["--url", service.url, "create", "hi"]) == 1
    assert capsys.readouterr().err == "video_client: 400 invalid_request (seconds): no\n"


def test_list_and_show_and_cancel_and_delete(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    listed = VideoList(data=(video("queued"),), first_id=ID, last_id=ID, has_more=False)
    service.will("GET /v1/videos?limit=20", Answer(listed.model_dump_json().encode()))
    service.will(f"GET /v1/videos/{ID}", video("queued"))
    service.will(f"POST /v1/videos/{ID}/cancel", video("cancelled"))
    service.will(f"DELETE /v1/videos/{ID}", Answer(b"{}"))
    for arguments in (["list"], ["show", ID], ["cancel", ID], ["delete", ID]):
        assert main(["--url", service.url, *arguments]) == 0
    shown = capsys.readouterr().out
    assert f"{ID}  queued" in shown
    assert '"num_frames": 107' in shown
    assert "cancelled" in shown


def test_a_reader_that_leaves_early_is_no_error(service: Service) -> None:
    service.will(f"GET /v1/videos/{ID}", video("queued", prompt="x" * 100_000))
    command = f"{sys.executable} -m video_client --url {service.url} show {ID} | head -n 1"
    run = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "{\n", "")


@pytest.mark.parametrize("arguments", [[], ["create"], ["create", "hi", "--field", "novalue"], ["wait"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
