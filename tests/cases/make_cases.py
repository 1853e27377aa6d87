"""Writes every fixture file of the tests into a folder: `python -m tests.cases.make_cases FOLDER`."""

import sys
from pathlib import Path

from tests.cases import adapters, images, sounds, videos


def make_cases(folder: Path) -> None:
    """Write pictures, sounds, videos and LoRA files; NumPy, Pillow and PyAV alone, no network."""
    folder.mkdir(parents=True, exist_ok=True)
    images.write(folder)
    sounds.write(folder)
    videos.write(folder)
    adapters.write(folder)


if __name__ == "__main__":
    make_cases(Path(sys.argv[1]))
