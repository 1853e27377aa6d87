"""Who may touch a landing now: kernel locks on the slab file, one byte a generation. API processes and ranks; no torch.

A sender holds the claim of its landing from before it reads the header until after its last byte. The owner gives
memory back only while it holds the same claim itself. So a lease and a late writer cannot miss each other, however
long the writer was stopped, and the kernel drops the claim of a writer that dies. Open-file-description locks work
between containers that share the file. The byte's number is the landing's generation, which is never used twice:
claims of old and new landings cannot meet.
"""

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")


def try_claim(fd: int, generation: int) -> bool:
    """Take the claim of a generation through this open file; False when another holds it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, generation, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def drop_claim(fd: int, generation: int) -> None:
    """Give the claim back."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, generation, 1, 0))
