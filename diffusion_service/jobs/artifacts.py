"""Where uploads, inputs and clips lie on disk. Runs in the diffusion API process, in its worker threads.

    uploads/<random>/        a request's files while it is being read and checked
    inputs/<job id>/         the same folder once its job exists, until the job ends
    parts/<job id>.mp4       a clip that is being written
    clips/<job id>.mp4       a clip that can be read

A job with several outputs has one file for each: the first as above, the others <job id>_<index>.mp4.

Everything moves by rename inside one file system, so a file is whole where it is found.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from shared_schema.errors import DeployError


@dataclass(frozen=True)
class UploadFolder:
    """A folder for the files of one request that has no job yet."""

    path: Path

    def file(self, name: str) -> Path:
        """Where the file of that name lies; names are ours, never the caller's."""
        return self.path / name

    def discard(self) -> None:
        """Remove the folder and its files, if they are still here."""
        shutil.rmtree(self.path, ignore_errors=True)


class Artifacts:
    """The state folder of one diffusion service. All calls block; ids are the store's, never the caller's.

    Raises (when built):
        DeployError: the folder cannot be written, or another process uses it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders = [root / name for name in ("uploads", "inputs", "parts", "clips")]
        self._uploads, self._inputs, self._parts, self._clips = self._folders
        try:
            for folder in self._folders:
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DeployError(f"--state-dir {root} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise DeployError(f"--state-dir {root} is used by another diffusion service; give each its own") from error

    def close(self) -> None:
        """Let another process use the folder."""
        os.close(self._lock)

    def open_upload(self) -> UploadFolder:
        """A new, empty folder for one request."""
        folder = self._uploads / secrets.token_hex(16)
        folder.mkdir()
        return UploadFolder(folder)

    def claim(self, upload: UploadFolder, job_id: str) -> None:
        """Make the upload the inputs of that job."""
        upload.path.rename(self._inputs / job_id)

    def input(self, job_id: str, file: str) -> Path:
        """One file of a job's inputs."""
        return self._inputs / job_id / file

    def drop_inputs(self, job_id: str) -> None:
        """Remove a job's inputs, if it has some."""
        shutil.rmtree(self._inputs / job_id, ignore_errors=True)

    def part(self, job_id: str, index: int = 0) -> Path:
        """Where a job's clip is written."""
        return self._parts / _name(job_id, index)

    def clip(self, job_id: str, index: int = 0) -> Path:
        """Where a job's clip is read."""
        return self._clips / _name(job_id, index)

    def publish(self, job_id: str, count: int = 1) -> None:
        """All `count` parts are whole: they become the clips."""
        for index in range(count):
            self.part(job_id, index).rename(self.clip(job_id, index))

    def drop_part(self, job_id: str) -> None:
        """Remove half-written clips, if there are some."""
        _drop(self._parts, job_id)

    def drop_clips(self, job_id: str) -> None:
        """Remove clips that were published, if there are some."""
        _drop(self._clips, job_id)

    def remove(self, job_id: str) -> None:
        """Remove everything that belongs to a job."""
        self.drop_inputs(job_id)
        self.drop_part(job_id)
        self.drop_clips(job_id)

    def sweep(self, known: Collection[str], unfinished: Collection[str]) -> int:
        """At start: remove uploads, parts, inputs of jobs that are not `unfinished`, and clips of jobs not `known`.

        Returns how many were removed.
        """
        orphans = [*self._uploads.iterdir(), *self._parts.iterdir()]
        orphans += [path for path in self._inputs.iterdir() if path.name not in unfinished]
        orphans += [path for path in self._clips.iterdir() if _job_of(path) not in known]
        for path in orphans:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return len(orphans)

    def check(self) -> None:
        """Prove that the folder takes a file.

        Raises:
            OSError: it does not.
        """
        probe = self._uploads / f".check-{secrets.token_hex(8)}"
        probe.write_bytes(b"\0")
        probe.unlink()


def _name(job_id: str, index: int) -> str:
    return f"{job_id}.mp4" if index == 0 else f"{job_id}_{index}.mp4"


def _job_of(clip: Path) -> str:
    """`video_<32 hex>` of `video_<32 hex>_3.mp4`."""
    return "_".join(clip.stem.split("_")[:2])


def _drop(folder: Path, job_id: str) -> None:
    for path in (folder / _name(job_id, 0), *folder.glob(f"{job_id}_*.mp4")):
        path.unlink(missing_ok=True)
