"""The state folder: what moves, what goes, and who may use it."""

from pathlib import Path

import pytest

from diffusion_service.jobs.artifacts import Artifacts
from shared_schema.errors import DeployError


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - {"lock"}


def test_an_upload_becomes_inputs_and_a_part_becomes_a_clip(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path)
    upload = artifacts.open_upload()
    upload.file("000").write_bytes(b"picture")
    artifacts.claim(upload, "video_1")
    assert artifacts.input("video_1", "000").read_bytes() == b"picture"
    artifacts.part("video_1").write_bytes(b"clip")
    assert not artifacts.clip("video_1").exists()
    artifacts.publish("video_1")
    assert artifacts.clip("video_1").read_bytes() == b"clip"
    artifacts.remove("video_1")
    artifacts.remove("video_1")
    assert files(tmp_path) == set()
    artifacts.close()


def test_a_discarded_upload_leaves_nothing(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path)
    upload = artifacts.open_upload()
    upload.file("000").write_bytes(b"picture")
    upload.discard()
    upload.discard()
    assert list((tmp_path / "uploads").iterdir()) == []
    artifacts.close()


def test_the_sweep_removes_what_no_job_owns(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path)
    for job in ("video_1", "video_2", "video_3"):
        upload = artifacts.open_upload()
        upload.file("000").write_bytes(b"x")
        artifacts.claim(upload, job)
        artifacts.part(job).write_bytes(b"x")
        artifacts.publish(job)
        artifacts.part(job).write_bytes(b"x")
    artifacts.open_upload().file("000").write_bytes(b"x")
    assert artifacts.sweep({"video_1", "video_3"}, {"video_1"}) == 7
    assert files(tmp_path) == {"inputs/video_1/000", "clips/video_1.mp4", "clips/video_3.mp4"}
    artifacts.close()


def test_one_folder_serves_one_process(tmp_path: Path) -> None:  # case 22
    first = Artifacts(tmp_path)
    with pytest.raises(DeployError, match="another diffusion service"):
        Artifacts(tmp_path)
    first.close()
    Artifacts(tmp_path).close()


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DeployError, match="cannot be written"):
        Artifacts(tmp_path / "file" / "state")


def test_the_check_leaves_nothing(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path)
    artifacts.check()
    assert files(tmp_path) == set()
    (tmp_path / "uploads").rmdir()
    with pytest.raises(OSError, match="uploads"):
        artifacts.check()
    artifacts.close()


def test_every_output_of_a_job_has_its_file_and_goes_with_it(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path)
    for job in ("video_1", "video_12"):
        for index in range(3):
            artifacts.part(job, index).write_bytes(b"clip")
    artifacts.drop_part("video_12")
    artifacts.publish("video_1", 3)
    assert files(tmp_path) == {"clips/video_1.mp4", "clips/video_1_1.mp4", "clips/video_1_2.mp4"}
    assert artifacts.sweep({"video_1"}, ()) == 0
    artifacts.drop_clips("video_12")
    assert len(files(tmp_path)) == 3
    assert artifacts.sweep({"video_12"}, ()) == 1
    artifacts.close()
