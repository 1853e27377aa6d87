"""Writes every fixture file of the tests into a folder: `python -m tests.cases.make_cases FOLDER`."""

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from tests.cases import adapters, images, sounds, videos


def make_cases(folder: Path) -> None:
    """Write pictures, sounds, videos and LoRA files; NumPy, Pillow and PyAV alone, no network."""
    folder.mkdir(parents=True, exist_ok=True)
    images.write(folder)
    sounds.write(folder)
    videos.write(folder)
    adapters.write(folder)


def shared_cases() -> Path:
    """A folder with the files, made once for every state of the code that makes them. Read only."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"minimax-h3-cases-{os.getuid()}-{digest.hexdigest()[:12]}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            make_cases(part)
            part.rename(folder)
    return folder


if __name__ == "__main__":
    make_cases(Path(sys.argv[1]))
