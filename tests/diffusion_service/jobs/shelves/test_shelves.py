"""Every shelf keeps the same promises, to whichever service asks."""

import os
import shutil
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from diffusion_service.jobs.artifacts import SHARED_STRAY_S, Artifacts
from diffusion_service.jobs.shelves.folder import FolderShelf
from diffusion_service.jobs.shelves.objects import READ_BYTES, ObjectShelf, _modified
from diffusion_service.jobs.shelves.shelf import StoredClip
from shared_schema.errors import DeployError, StorageUnavailable
from tests.diffusion_service.jobs.shelves.conftest import OpenShelf
from tests.objects import Bucket, new_bucket, s3_server


def upload(artifacts: Artifacts, job_id: str, *files: str) -> None:
    """A job's inputs, accepted by that service."""
    folder = artifacts.open_upload()
    for file in files:
        folder.file(file).write_bytes(file.encode())
    artifacts.claim(folder, job_id)


def publish(artifacts: Artifacts, job_id: str, *clips: bytes) -> None:
    """A job's clips, made by that service."""
    for index, clip in enumerate(clips):
        artifacts.part(job_id, index).parent.mkdir(parents=True, exist_ok=True)
        artifacts.part(job_id, index).write_bytes(clip)
    artifacts.publish(job_id, len(clips))


def content(artifacts: Artifacts, job_id: str, index: int = 0) -> bytes:
    clip = artifacts.clip(job_id, index)
    return clip.read_bytes() if isinstance(clip, Path) else clip.whole()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def test_any_service_reads_what_another_one_kept(open_shelf: OpenShelf, tmp_path: Path) -> None:  # case 22
    one, two = Artifacts(tmp_path / "one", open_shelf("one")), Artifacts(tmp_path / "two", open_shelf("two"))
    upload(one, "video_1", "000", "001")
    assert names(tmp_path / "one") == []
    two.bring_inputs("video_1")
    assert [two.input("video_1", file).read_bytes() for file in ("000", "001")] == [b"000", b"001"]
    publish(two, "video_1", b"first", b"second")
    assert (content(one, "video_1"), content(one, "video_1", 1)) == (b"first", b"second")
    two.drop_inputs("video_1")
    two.drop_part("video_1")
    assert names(tmp_path / "two") == []
    one.remove("video_1")
    one.remove("video_1")
    for artifacts in (one, two):
        with pytest.raises(FileNotFoundError):
            content(artifacts, "video_1", 1)
        artifacts.check()
        artifacts.close()


def test_one_job_is_removed_and_no_other(open_shelf: OpenShelf, tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path / "one", open_shelf("one"))
    for job in ("video_1", "video_12"):
        upload(artifacts, job, "000")
        publish(artifacts, job, b"clip")
    artifacts.remove("video_1")
    artifacts.bring_inputs("video_12")
    assert artifacts.input("video_12", "000").read_bytes() == b"000"
    assert content(artifacts, "video_12") == b"clip"
    artifacts.close()


def test_a_service_that_gives_a_job_up_leaves_its_inputs_to_the_next(open_shelf: OpenShelf, tmp_path: Path) -> None:
    one, two = Artifacts(tmp_path / "one", open_shelf("one")), Artifacts(tmp_path / "two", open_shelf("two"))
    upload(one, "video_1", "000")
    one.bring_inputs("video_1")
    one.part("video_1").write_bytes(b"half")
    one.drop_part("video_1")
    assert names(tmp_path / "one") == []
    two.bring_inputs("video_1")
    assert two.input("video_1", "000").read_bytes() == b"000"
    one.close()
    two.close()


def test_a_sweep_leaves_alone_what_another_service_is_just_making(open_shelf: OpenShelf, tmp_path: Path) -> None:
    one, two = Artifacts(tmp_path / "one", open_shelf("one")), Artifacts(tmp_path / "two", open_shelf("two"))
    upload(one, "video_1", "000")
    publish(one, "video_2", b"clip")
    two.open_upload().file("0").write_bytes(b"lost")
    assert two.sweep(completed=(), unfinished=()) == 1
    one.bring_inputs("video_1")
    assert content(one, "video_2") == b"clip"
    one.close()
    two.close()


def test_old_strays_go_from_a_shared_folder(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path / "one", FolderShelf(tmp_path / "shared", shared=True))
    for job in ("video_1", "video_2", "video_3"):
        upload(artifacts, job, "000")
        publish(artifacts, job, b"clip")
    for path in [*(tmp_path / "shared" / "inputs").iterdir(), *(tmp_path / "shared" / "clips").iterdir()]:
        old = path.stat().st_mtime - SHARED_STRAY_S - 1
        os.utime(path, (old, old))
    assert artifacts.sweep(completed={"video_1"}, unfinished={"video_2"}) == 4
    assert names(tmp_path / "shared") == ["000", "video_1.mp4"]
    artifacts.close()


def test_a_clip_in_a_store_is_read_in_pieces_and_has_a_url(bucket: Bucket, tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, ObjectShelf(*bucket, tmp_path / "parts"))
    clip = bytes(range(256)) * (READ_BYTES // 256 + 3)
    publish(artifacts, "video_1", clip)
    stored: StoredClip | Path = artifacts.clip("video_1")
    assert not isinstance(stored, Path)
    assert stored.size == len(clip)
    pieces = list(stored.read(5, len(clip)))
    assert [len(piece) for piece in pieces] == [READ_BYTES, len(clip) - READ_BYTES - 5]
    assert b"".join(pieces) == clip[5:]
    with urllib.request.urlopen(stored.url(60), timeout=30) as answer:
        assert answer.read() == clip
    artifacts.close()


def test_a_store_that_does_not_answer_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as endpoint:
        url, options = new_bucket(endpoint, monkeypatch)
        shelf = ObjectShelf(url, {**options, "config_kwargs": {"retries": {"max_attempts": 0}}}, tmp_path)
    for call in (shelf.check, lambda: shelf.clip("video_1.mp4"), lambda: shelf.drop_inputs("video_1")):
        with pytest.raises(StorageUnavailable):
            call()


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("nosuch://bucket", {}, r"storage\.url"),
        ("s3://no-such-bucket/h3", {}, r"storage\.url: s3://no-such-bucket/h3 cannot be used"),
        ("s3://bucket-0/h3", {"nosuch": 1}, r"storage\.options"),
    ],
)
def test_a_wrong_url_or_option_is_a_wrong_setting(
    url: str, options: dict[str, object], why: str, tmp_path: Path, bucket: Bucket
) -> None:
    reached = bucket[1] if url.startswith("s3:") else {}
    with pytest.raises(DeployError, match=why):
        ObjectShelf(url, {**reached, **options}, tmp_path)


def test_a_folder_whose_mount_is_gone_is_a_store_that_is_away(tmp_path: Path) -> None:
    shelf = FolderShelf(tmp_path / "mount", shared=True)
    part = tmp_path / "part"
    part.write_bytes(b"clip")
    shutil.rmtree(tmp_path / "mount")
    for call in (shelf.inputs, shelf.clips, partial(shelf.keep_clip, "a.mp4", part)):
        with pytest.raises(StorageUnavailable):
            call()
    (tmp_path / "mount").write_bytes(b"no folder")
    with pytest.raises(StorageUnavailable):
        shelf.drop_clips("video_1")


def test_what_a_store_gives_no_time_of_counts_as_new() -> None:
    assert abs(_modified({"modificationTime": 5}) - time.time()) < 60
    assert _modified({"mtime": 5.0}) == 5.0
