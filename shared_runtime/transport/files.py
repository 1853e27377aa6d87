"""Slab files in their folder: made and swept by their owner, opened by the other processes. No torch.

The owner (the diffusion service's API process) holds a `flock` for life. The kernel drops it at death, so a slab
whose lock can be had is nobody's, and whoever starts on the folder next removes it.
"""

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shared_schema.errors import DeployError, TransportError

_PREFIX, _SUFFIX = "h3slab-", ".slab"
_NAME = re.compile(r"h3slab-[A-Za-z0-9_.-]{1,128}\.slab")
_OWNER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MIB = 2**20


@dataclass(frozen=True)
class SlabFile:
    """A slab file that this process owns: allocated, and locked through `fd`."""

    path: Path
    fd: int
    swept: int = 0
    """Slabs of dead owners that were removed on the way."""


def create_slab_file(folder: Path, size: int, owner: str) -> SlabFile:
    """Make, lock and allocate a new slab file of `size` bytes in `folder`, after sweeping slabs nobody holds.

    Raises:
        DeployError: the folder cannot be used or has no room; the message says what to change.
    """
    if not _OWNER.fullmatch(owner):
        raise DeployError(f"slab owner {owner!r} is not 1 to 64 letters, digits, '-' or '_'")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        swept = len(sweep(folder))
        _check_room(folder, size)
        slab = replace(_create_locked(folder, owner), swept=swept)
    except OSError as error:
        raise DeployError(_folder_message(folder, error)) from error
    try:
        os.posix_fallocate(slab.fd, 0, size)
    except OSError as error:
        slab.path.unlink(missing_ok=True)
        os.close(slab.fd)
        raise DeployError(_room_message(folder, size, error)) from error
    return slab


def sweep(folder: Path) -> list[Path]:
    """Remove the slab files in `folder` that no living process owns; returns them.

    Raises:
        DeployError: a slab of another user lies there and cannot be examined.
    """
    swept = []
    for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            fd = os.open(path, _OPEN_FLAGS)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DeployError(_foreign_message(path, error)) from error
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode) and _lock(fd):
                path.unlink(missing_ok=True)
                swept.append(path)
        finally:
            os.close(fd)
    return swept


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _create_locked(folder: Path, owner: str) -> SlabFile:
    while True:
        path = folder / f"{_PREFIX}{owner}-{os.getpid()}-{secrets.token_hex(8)}{_SUFFIX}"
        fd = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        # Another starter may sweep the file between these two lines: then it is locked or unlinked, and we try again.
        if _lock(fd) and os.fstat(fd).st_nlink:
            return SlabFile(path, fd)
        os.close(fd)


def _check_room(folder: Path, size: int) -> None:
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize < size:
        raise OSError(errno.ENOSPC, _room_message(folder, size, None))


def _room_message(folder: Path, size: int, error: OSError | None) -> str:
    room = os.statvfs(folder)
    found = room.f_bavail * room.f_frsize
    cause = "" if error is None or error.errno == errno.ENOSPC else f" ({error.strerror})"
    return (
        f"slab folder {folder} has no room{cause}: needed {size / _MIB:.0f} MiB, found {found / _MIB:.0f} MiB free; "
        "enlarge the file system (in a container shm_size or the tmpfs volume's size) or set a smaller "
        "service.slab_bytes"
    )


def _folder_message(folder: Path, error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC:
            return error.strerror or str(error)
        case errno.EACCES | errno.EPERM:
            return (
                f"slab folder {folder} is not writable for user {os.geteuid()}: change its owner or mode, or set "
                "service.slab_folder to another folder"
            )
        case errno.EROFS:
            return (
                f"slab folder {folder} lies on a read-only file system: mount it writable, or set "
                "service.slab_folder to another folder"
            )
        case _:
            return f"slab folder {folder} cannot be used ({error.strerror}): set service.slab_folder to another folder"


def _foreign_message(path: Path, error: OSError) -> str:
    return (
        f"slab {path} cannot be opened by user {os.geteuid()} ({error.strerror}): it belongs to another user or is no "
        "plain file; remove it, or set service.slab_folder to a folder of this user's own"
    )


OnMap = Callable[[memoryview], Callable[[], None]]
"""Told of every new mapping; what it returns is called before the mapping goes. For page-locking."""


class MappedSlab:
    """Another process' slab file, mapped into this one. Writable, whole, its page tables filled at once."""

    def __init__(self, path: Path, on_map: OnMap | None = None) -> None:
        self.fd = os.open(path, _OPEN_FLAGS)
        try:
            self._check_plain(path)
            self.size = os.fstat(self.fd).st_size
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(self.fd, self.size, flags=flags)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)
        self._before_unmap = on_map(self.view) if on_map is not None else None

    def _check_plain(self, path: Path) -> None:
        facts = os.fstat(self.fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1 or facts.st_size == 0:
            raise TransportError(f"{path} is not a slab: not one plain file with content")

    @property
    def removed(self) -> bool:
        """Whether the owner has removed the file (or somebody cut it): nothing may be written there any more."""
        facts = os.fstat(self.fd)
        return facts.st_nlink == 0 or facts.st_size < self.size

    def close(self) -> None:
        """Unmap and close. A view that somebody still holds keeps the mapping alive until it goes."""
        os.close(self.fd)
        if self._before_unmap is not None:
            self._before_unmap()
        with suppress(BufferError):
            self.view.release()
            self._map.close()


class SlabFolder:
    """The slabs of other processes in one folder, each mapped once. Not thread-safe: its user serialises."""

    def __init__(self, folder: Path, on_map: OnMap | None = None) -> None:
        self._folder = folder
        self._on_map = on_map
        self._slabs: dict[str, MappedSlab] = {}

    def open(self, path: str) -> MappedSlab:
        """The slab at `path`, mapped now or earlier.

        Raises:
            TransportError: outside the folder, no slab, gone, or not ours to open; the message says what to change.
        """
        self.forget_removed()
        known = self._slabs.get(path)
        if known is None:
            known = self._slabs[path] = self._map(Path(path))
        return known

    def _map(self, path: Path) -> MappedSlab:
        if path.parent != self._folder or not _NAME.fullmatch(path.name):
            raise TransportError(f"landing {path} is not a slab in {self._folder}: both services need one slab folder")
        try:
            return MappedSlab(path, self._on_map)
        except FileNotFoundError as error:
            raise TransportError(
                f"slab {path} is not on this host: shared memory needs both services on one host with one slab folder "
                "(in containers a shared volume); between hosts use NixlConnector"
            ) from error
        except OSError as error:
            raise TransportError(
                f"slab {path} cannot be opened ({error.strerror}): run both services as one user"
            ) from error

    def forget_removed(self) -> None:
        """Unmap slabs whose owner has removed them, so that a dead owner's memory goes back to the system."""
        for path in [path for path, slab in self._slabs.items() if slab.removed]:
            self._slabs.pop(path).close()

    def close(self) -> None:
        """Unmap everything."""
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()
