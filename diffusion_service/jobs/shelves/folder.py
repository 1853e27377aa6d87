"""A shelf that is a folder: the state folder of one service, or one that several services mount. Blocks."""

import contextlib
import errno
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from diffusion_service.jobs.shelves.shelf import Shelved, clip_name, job_of
from shared_schema.errors import StorageUnavailable
from shared_schema.videos import MAX_OUTPUTS

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What is said of a disk that is full is the caller's to decide."""


class FolderShelf:
    """A `Shelf` in `root`. Things come by rename, so they are whole where they are found.

    Raises (when built):
        OSError: the folder cannot be written.
    """

    def __init__(self, root: Path, *, shared: bool) -> None:
        self._inputs = root / "inputs"
        self._clips = root / "clips"
        self._shared = shared
        for folder in (self._inputs, self._clips):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def shared(self) -> bool:
        return self._shared

    def keep_inputs(self, job_id: str, folder: Path) -> None:
        _move(folder, self._inputs / job_id)

    def bring_inputs(self, job_id: str) -> None:
        """See `Shelf.bring_inputs`: they are read where they lie."""

    def input(self, job_id: str, file: str) -> Path:
        return self._inputs / job_id / file

    def forget_inputs(self, job_id: str) -> None:
        """See `Shelf.forget_inputs`: there is no copy."""

    def drop_inputs(self, job_id: str) -> None:
        shutil.rmtree(self._inputs / job_id, ignore_errors=True)

    def keep_clip(self, name: str, part: Path) -> None:
        _move(part, self._clips / name)

    def clip(self, name: str) -> Path:
        return self._clips / name

    def drop_clips(self, job_id: str) -> None:
        with mapped():
            for index in range(MAX_OUTPUTS):
                (self._clips / clip_name(job_id, index)).unlink(missing_ok=True)

    def inputs(self) -> list[Shelved]:
        return _listed(self._inputs)

    def clips(self) -> list[Shelved]:
        return _listed(self._clips)

    def check(self) -> None:
        """See `Shelf.check`; a folder of this service alone lies beside its uploads, which are checked."""
        if not self._shared:
            return
        probe = self._clips / f".check-{secrets.token_hex(8)}"
        probe.write_bytes(b"\0")
        probe.unlink()


@contextlib.contextmanager
def mapped() -> Iterator[None]:
    """A folder that cannot be used, because its mount is gone for example, is a store that does not answer.

    Raises:
        StorageUnavailable: in place of any `OSError` but that of a full disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise
        raise StorageUnavailable(f"the folder of inputs and clips: {error.strerror}") from error


def _listed(folder: Path) -> list[Shelved]:
    found = []
    with mapped():
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(Shelved(job_of(path.name), path.stat().st_mtime))
    return found


def _move(source: Path, target: Path) -> None:
    """Rename; between two file systems copy beside the target first."""
    source.stat()  # what is not there is no fault of the folder
    with mapped():
        _moved(source, target)


def _moved(source: Path, target: Path) -> None:
    try:
        source.rename(target)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    copy = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    if source.is_dir():
        shutil.copytree(source, copy)
        copy.rename(target)
        shutil.rmtree(source)
    else:
        shutil.copyfile(source, copy)
        copy.rename(target)
        source.unlink()
