"""The disk watermark: a request is turned away before the disk is full. Runs in the API process."""

import shutil
from pathlib import Path

from shared_schema.errors import NotReady


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
