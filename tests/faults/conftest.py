"""A live pair that may be harmed: whatever a test killed runs again before the next one begins."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_runtime.tiny import tiny_checkpoint
from tests.end_to_end import processes
from tests.end_to_end.clips import TEXT
from tests.end_to_end.pair import Pair, make_pair
from tests.end_to_end.reporting import allow_for_start, pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]

LIMITS = {"stuck_s": 5, "dead_s": 5, "drain_s": 4, "conditioning_cache_bytes": 0}
"""Seconds: small, so that a frozen rank is noticed while a test waits, and not so small that a busy machine harms.
Nothing is kept of earlier jobs, so that every job meets the encoder.
"""
PROCESSES = 6
"""Two API processes, two forkers, two ranks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test of this folder time for the start of the pair."""
    allow_for_start(Path(__file__).parent, items)


@pytest.fixture(scope="session")
def harmed_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The pair of this folder, with short limits."""
    pair = make_pair(tmp_path_factory.mktemp("harmed"), str(tiny_checkpoint()), LIMITS)
    with pair.running():
        yield pair


@pytest.fixture(scope="session")
def digest(harmed_pair: Pair) -> str:
    """Of a clip made before any harm."""
    return str(harmed_pair.completed(harmed_pair.submit(TEXT.fields()))["frames_sha256"])


@pytest.fixture
def pair(harmed_pair: Pair, digest: str) -> Iterator[Pair]:
    """The pair, whole and ready; afterwards it makes the same clip as ever and holds nothing of what was harmed."""
    yield harmed_pair
    for service in (harmed_pair.encoder, harmed_pair.diffusion):
        assert service.process is not None
        if service.process.poll() is not None:
            service.start()
    harmed_pair.wait_ready()
    assert harmed_pair.completed(harmed_pair.submit(TEXT.fields()))["frames_sha256"] == digest
    assert harmed_pair.unfinished_files() == []
    assert len([path for path in harmed_pair.slabs.rglob("*") if path.is_file()]) == 1
    left = processes.marked(harmed_pair.mark)
    assert len(left) == PROCESSES, [processes.command_line(pid) for pid in left]
