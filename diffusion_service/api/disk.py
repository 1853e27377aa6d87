"""The disk watermark: a request is turned away before the disk is full. Runs in the API process."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from diffusion_service.jobs.shelves.folder import FULL
from shared_schema.errors import NotReady


@contextlib.contextmanager
def full_disk_is_said() -> Iterator[None]:
    """Of whatever is written while a request is taken, at whatever moment.

    Raises:
        NotReady: the disk, or this user's share of it, is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise NotReady("the server's disk is full; try again later", code="disk_full") from error
        raise


class DiskGuard:
    """Watches the disk of one folder."""

    def __init__(self, folder: Path, min_free_bytes: int) -> None:
        self._folder = folder
        self._min_free_bytes = min_free_bytes

    def check(self, more: int = 0) -> None:
        """`more` bytes are about to be written. Asks the file system, which takes microseconds.

        Raises:
            NotReady: fewer than the watermark would be left.
        """
        if shutil.disk_usage(self._folder).free - more < self._min_free_bytes:
            raise NotReady("the server's disk is nearly full; try again later", code="disk_full")
