"""A shelf in an object store, S3 or whatever else fsspec speaks to. Blocks; its calls go over a network."""

import contextlib
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from diffusion_service.jobs.shelves.shelf import Shelved, job_of
from shared_schema.errors import DeployError, StorageUnavailable

READ_BYTES = 4 * 2**20
"""Of one request to the store, and so in memory for one reader of a clip."""
CLIENT_ERRORS = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "azure", "adlfs")
"""Packages whose own errors mean that the store does not answer."""


class ObjectClip:
    """A `StoredClip` in an object store."""

    def __init__(self, files: Any, path: str, size: int) -> None:
        self._files = files
        self._path = path
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def read(self, start: int, end: int) -> Iterator[bytes]:
        for first in range(start, end, READ_BYTES):
            with _mapped():
                yield self._files.cat_file(self._path, start=first, end=min(first + READ_BYTES, end))

    def whole(self) -> bytes:
        return b"".join(self.read(0, self._size))

    def url(self, lasts_s: float) -> str:
        with _mapped():
            return str(self._files.sign(self._path, expiration=int(lasts_s)))


class ObjectShelf:
    """A `Shelf` under a URL of fsspec; `copies` is a folder of this service's own for what was brought.

    Raises (when built):
        DeployError: the URL's file system is not known or not installed, or what it names cannot be used.
    """

    def __init__(self, url: str, options: Mapping[str, object], copies: Path) -> None:
        try:
            # What another service has put there a moment ago has to be seen.
            self._files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
            self._root = root.rstrip("/")
            self._copies = copies
            self.check()
        except (ImportError, ValueError) as error:
            raise DeployError(f"service.storage.url: {error}; S3 needs s3fs: pip install s3fs") from error
        except TypeError as error:
            raise DeployError(f"service.storage.options: {error}") from error
        except (StorageUnavailable, FileNotFoundError) as error:
            raise DeployError(f"service.storage.url: {url} cannot be used: {error}") from error

    @property
    def shared(self) -> bool:
        return True

    def keep_inputs(self, job_id: str, folder: Path) -> None:
        for file in sorted(folder.iterdir()):
            with _mapped():
                self._files.put_file(str(file), f"{self._root}/inputs/{job_id}/{file.name}")
        # Another service may be the one that works on it; whoever does brings them.
        shutil.rmtree(folder)

    def bring_inputs(self, job_id: str) -> None:
        folder = self._copies / job_id
        folder.mkdir(parents=True, exist_ok=True)
        for path in self._under(f"inputs/{job_id}"):
            with _mapped():
                self._files.get_file(path, str(folder / path.rpartition("/")[2]))

    def input(self, job_id: str, file: str) -> Path:
        return self._copies / job_id / file

    def forget_inputs(self, job_id: str) -> None:
        shutil.rmtree(self._copies / job_id, ignore_errors=True)

    def drop_inputs(self, job_id: str) -> None:
        self.forget_inputs(job_id)
        self._remove(list(self._under(f"inputs/{job_id}")))

    def keep_clip(self, name: str, part: Path) -> None:
        with _mapped():
            self._files.put_file(str(part), f"{self._root}/clips/{name}")
        part.unlink()

    def clip(self, name: str) -> ObjectClip:
        path = f"{self._root}/clips/{name}"
        with _mapped():
            return ObjectClip(self._files, path, int(self._files.info(path)["size"]))

    def drop_clips(self, job_id: str) -> None:
        found = self._under("clips", job_id)
        self._remove([path for path in found if job_of(path.rpartition("/")[2]) == job_id])

    def inputs(self) -> list[Shelved]:
        found = self._under("inputs")
        return [Shelved(path.split("/")[-2], _modified(facts)) for path, facts in found.items()]

    def clips(self) -> list[Shelved]:
        found = self._under("clips")
        return [Shelved(job_of(path.rpartition("/")[2]), _modified(facts)) for path, facts in found.items()]

    def check(self) -> None:
        with _mapped():
            probe = f"{self._root}/checks/{secrets.token_hex(8)}"
            self._files.pipe_file(probe, b"\0")
            self._files.rm_file(probe)
        self._under("checks")  # listing may be a right of its own

    def _under(self, folder: str, prefix: str = "") -> dict[str, Any]:
        """Files below a folder whose names begin so, each with what the store says of it."""
        with _mapped():
            try:
                found: dict[str, Any] = self._files.find(f"{self._root}/{folder}", detail=True, prefix=prefix)
            except FileNotFoundError:
                return {}
        return {path: facts for path, facts in found.items() if path.rpartition("/")[2].startswith(prefix)}

    def _remove(self, paths: list[str]) -> None:
        with _mapped(), contextlib.suppress(FileNotFoundError):
            if paths:
                self._files.rm(paths)


def _modified(facts: Mapping[str, Any]) -> float:
    """Unix seconds; every store has its own name for it. Where none is known it counts as new, and is left alone."""
    for name in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = facts.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return time.time()


@contextlib.contextmanager
def _mapped() -> Iterator[None]:
    """What the store's client raises becomes ours; a file that is not there stays that.

    Raises:
        StorageUnavailable: it does not answer, or refuses.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in CLIENT_ERRORS:
            raise StorageUnavailable(f"the store of inputs and clips does not work: {error}") from error
        raise
