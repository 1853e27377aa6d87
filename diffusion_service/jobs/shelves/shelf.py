"""What is kept of jobs for every service that may work on them or answer for them, as a protocol. Blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class StoredClip(Protocol):
    """A clip that lies somewhere else and is read over a network."""

    @property
    def size(self) -> int:
        """In bytes."""

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes from `start` up to, without, `end`.

        Raises:
            StorageUnavailable: the store does not answer.
        """

    def whole(self) -> bytes:
        """All of it."""

    def url(self, lasts_s: float) -> str:
        """Whence anybody may read it for that long."""


@dataclass(frozen=True)
class Shelved:
    """Something that lies on a shelf."""

    job_id: str
    modified: float
    """Unix seconds."""


class Shelf(Protocol):
    """Inputs of jobs that have not ended, and clips that can be read. Whatever is here is here whole.

    Every call may raise `StorageUnavailable`.
    """

    @property
    def shared(self) -> bool:
        """Whether other services use it too."""

    def keep_inputs(self, job_id: str, folder: Path) -> None:
        """The files of `folder`, which goes, become the job's inputs."""

    def bring_inputs(self, job_id: str) -> None:
        """Have the job's inputs where `input` says, if it has some."""

    def input(self, job_id: str, file: str) -> Path:
        """Where one input of a job lies once it was brought."""

    def forget_inputs(self, job_id: str) -> None:
        """This service does not work on the job any more: what was brought goes, what is kept stays."""

    def drop_inputs(self, job_id: str) -> None:
        """Remove a job's inputs, if it has some."""

    def keep_clip(self, name: str, part: Path) -> None:
        """The file, which goes, becomes a clip."""

    def clip(self, name: str) -> Path | StoredClip:
        """A clip.

        Raises:
            FileNotFoundError: there is none of that name; for a path, reading it may say so.
        """

    def drop_clips(self, job_id: str) -> None:
        """Remove all clips of a job, if it has some."""

    def inputs(self) -> list[Shelved]:
        """All inputs that are kept, one entry a job or a file."""

    def clips(self) -> list[Shelved]:
        """All clips that are kept."""

    def check(self) -> None:
        """Prove that it can be used.

        Raises:
            OSError: it cannot.
        """


def clip_name(job_id: str, index: int) -> str:
    """`video_<32 hex>.mp4`, and `video_<32 hex>_3.mp4` for a later output."""
    return f"{job_id}.mp4" if index == 0 else f"{job_id}_{index}.mp4"


def job_of(clip: str) -> str:
    """The job of a clip's name."""
    return "_".join(clip.partition(".")[0].split("_")[:2])
