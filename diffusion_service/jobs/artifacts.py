"""Where uploads, inputs and clips lie. Runs in the diffusion API process, in its worker threads.

    uploads/<random>/        a request's files while it is being read and checked
    inputs/<job id>/         the same files once its job exists, until the job ends
    parts/<job id>.mp4       a clip that is being written
    clips/<job id>.mp4       a clip that can be read

Uploads and parts are this service's own, in its state folder. Inputs and clips lie on a shelf (`jobs/shelves/`): in the
same folder, or where several services reach them.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from diffusion_service.jobs.shelves.folder import FolderShelf
from diffusion_service.jobs.shelves.shelf import Shelf, StoredClip, clip_name
from shared_schema.errors import DeployError
from shared_schema.videos import MAX_OUTPUTS

SHARED_STRAY_S = 3600.0
"""On a shelf that others use, what no job owns may be on its way to one until it is this old."""


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
    """The state folder of one diffusion service, and the shelf. All calls block; ids are the store's.

    What touches the shelf may raise `StorageUnavailable`.

    Raises (when built):
        DeployError: the folder cannot be written, or another process uses it.
    """

    def __init__(self, root: Path, shelf: Shelf | None = None) -> None:
        self._root = root
        self._uploads, self._parts = root / "uploads", root / "parts"
        try:
            for folder in (self._uploads, self._parts):
                folder.mkdir(parents=True, exist_ok=True)
            self._shelf = shelf or FolderShelf(root, shared=False)
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
        self._shelf.keep_inputs(job_id, upload.path)

    def bring_inputs(self, job_id: str) -> None:
        """Have a job's inputs on this machine before they are read, whoever accepted them."""
        self._shelf.bring_inputs(job_id)

    def input(self, job_id: str, file: str) -> Path:
        """One file of a job's inputs, once they were brought."""
        return self._shelf.input(job_id, file)

    def drop_inputs(self, job_id: str) -> None:
        """Remove a job's inputs, if it has some."""
        self._shelf.drop_inputs(job_id)

    def part(self, job_id: str, index: int = 0) -> Path:
        """Where a job's clip is written."""
        return self._parts / clip_name(job_id, index)

    def clip(self, job_id: str, index: int = 0) -> Path | StoredClip:
        """A job's clip, in a folder or elsewhere.

        Raises:
            FileNotFoundError: it is gone; for a path, reading it may say so.
        """
        return self._shelf.clip(clip_name(job_id, index))

    def publish(self, job_id: str, count: int = 1) -> None:
        """All `count` parts are whole: they become the clips."""
        for index in range(count):
            self._shelf.keep_clip(clip_name(job_id, index), self.part(job_id, index))

    def drop_part(self, job_id: str) -> None:
        """This service does not work on the job any more: half-written clips go, and copies of its inputs."""
        self._shelf.forget_inputs(job_id)
        for index in range(MAX_OUTPUTS):
            self.part(job_id, index).unlink(missing_ok=True)

    def drop_clips(self, job_id: str) -> None:
        """Remove clips that were published, if there are some."""
        self._shelf.drop_clips(job_id)

    def remove(self, job_id: str) -> None:
        """Remove everything that belongs to a job."""
        self.drop_inputs(job_id)
        self.drop_part(job_id)
        self.drop_clips(job_id)

    def sweep(self, completed: Collection[str], unfinished: Collection[str]) -> int:
        """At start: remove uploads, parts, inputs of jobs that are not `unfinished`, clips of jobs not `completed`.

        Returns how many uploads and parts, and inputs and clips of jobs, were removed.
        """
        own = [*self._uploads.iterdir(), *self._parts.iterdir()]
        for path in own:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return len(own) + self.sweep_shelf(completed, unfinished)

    def sweep_shelf(self, completed: Collection[str], unfinished: Collection[str]) -> int:
        """Remove inputs and clips that no job owns; from a shelf that others use only what is an hour old.

        Whoever was killed between putting them there and writing that down has left them. Returns of how many jobs.
        """
        until = time.time() - (SHARED_STRAY_S if self._shelf.shared else 0.0)
        inputs = {each.job_id for each in self._shelf.inputs() if each.modified <= until} - {*unfinished}
        clips = {each.job_id for each in self._shelf.clips() if each.modified <= until} - {*completed}
        for job_id in inputs:
            self._shelf.drop_inputs(job_id)
        for job_id in clips:
            self._shelf.drop_clips(job_id)
        return len(inputs) + len(clips)

    def check(self) -> None:
        """Prove that folder and shelf can be used.

        Raises:
            OSError: they cannot.
        """
        probe = self._uploads / f".check-{secrets.token_hex(8)}"
        probe.write_bytes(b"\0")
        probe.unlink()
        self._shelf.check()
