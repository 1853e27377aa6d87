"""One live pair for all tests of this folder, the fixture files, and the reference's clips."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared_runtime.tiny import tiny_checkpoint
from tests.end_to_end.clips import EQUAL_CLIPS, HARD_MEDIA
from tests.end_to_end.pair import Pair, make_pair
from tests.end_to_end.reporting import allow_for_start, pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test of this folder time for the start of the pair."""
    allow_for_start(Path(__file__).parent, items)


REFERENCE_S = 900.0
"""The reference takes 40 s on a machine that does nothing else."""


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The tiny checkpoint's folder."""
    return tiny_checkpoint()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Pair]:
    """Two live services for the whole session; after it nothing of them may be left."""
    # Tests stop ranks, and a machine may be slow to let them go on.
    pair = make_pair(tmp_path_factory.mktemp("pair"), str(checkpoint), {"dead_s": 60})
    with pair.running():
        yield pair


@dataclass(frozen=True)
class Making:
    """The reference at work."""

    folder: Path
    process: subprocess.Popen[bytes]
    log: Path


@pytest.fixture(scope="session", autouse=True)
def making(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, cases: Path
) -> Iterator[Making | None]:
    """Begun at once where any test wants the reference: it needs one core for as long as other tests mostly wait."""
    if not any("reference" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    out = tmp_path_factory.mktemp("reference")
    wanted = out / "clips.json"
    wanted.write_text(json.dumps([clip.as_json() for clip in (*EQUAL_CLIPS, *HARD_MEDIA)]))
    command = [sys.executable, "-m", "tests.end_to_end.reference", str(checkpoint), str(cases), str(wanted), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = out / "reference.log"
    with log.open("wb") as said, subprocess.Popen(command, stdout=said, stderr=said, env=environment) as process:
        yield Making(out, process, log)
        process.kill()


@pytest.fixture(scope="session")
def reference(making: Making | None) -> Path:
    """A folder with the reference's `digests.json` and a `.npz` with frames and sound for every clip, made anew."""
    assert making is not None
    assert making.process.wait(REFERENCE_S) == 0, making.log.read_text(errors="replace")[-4000:]
    return making.folder


@pytest.fixture(scope="session")
def digests(reference: Path) -> dict[str, dict[str, str]]:
    """The reference's, by clip."""
    return dict(json.loads((reference / "digests.json").read_text()))
