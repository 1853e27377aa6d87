"""A request's files while they arrive: written, counted and hashed as they come. Runs in the API's worker threads."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from shared_schema.errors import TooLarge


@dataclass(frozen=True)
class UploadedFile:
    """One file of a request, whole, in its upload folder."""

    path: Path
    bytes: int
    sha256: str
    """Of the bytes, hex."""


class FileSink:
    """Takes the bytes of one file up to `cap`; `param` names the field in the error."""

    def __init__(self, path: Path, cap: int, param: str | None) -> None:
        self._path = path
        self._cap = cap
        self._param = param
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append.

        Raises:
            TooLarge: past the cap; nothing of `data` was written.
        """
        self.bytes += len(data)
        if self.bytes > self._cap:
            raise TooLarge(f"a file has at most {self._cap} bytes", param=self._param)
        self._hash.update(data)
        self._file.write(data)

    def finish(self) -> UploadedFile:
        """The file is whole."""
        self._file.close()
        return UploadedFile(self._path, self.bytes, self._hash.hexdigest())

    def close(self) -> None:
        """Stop, whole or not."""
        self._file.close()
