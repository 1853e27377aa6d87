"""What the tests of every package share: the folder of fixture files."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.make_cases import make_cases
from tests.ranks import Ranks, rank_groups


@pytest.fixture(scope="session")
def cases() -> Path:
    """The fixture files, made once for every state of the code that makes them. Read only."""
    digest = hashlib.sha256()
    for source in sorted((Path(__file__).parent / "cases").glob("*.py")):
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


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real rank groups that call functions of test modules; see `tests.ranks`."""
    with rank_groups() as groups:
        yield groups
