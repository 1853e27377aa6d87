"""A slab folder of its own for every test, in shared memory, and a slab in it."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_runtime.transport.slab import Slab

MIB = 2**20


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder under /dev/shm, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="h3test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def slab(folder: Path) -> Iterator[Slab]:
    """A slab of 4 MiB."""
    made = Slab.create(folder, 4 * MIB, "test")
    yield made
    made.close()
