"""One running stack for all tests of this folder; `.ci/run containers` starts the engine and builds the images."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_runtime.tiny import tiny_checkpoint
from tests.containers.stack import READY_S, Stack, from_outside, running
from tests.end_to_end.pair import Pair


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Containers start slowly."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(3 * READY_S))
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The stack as compose.yaml has it; when the tests are done it goes with everything that it had."""
    with running() as stack:
        yield stack


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The tiny checkpoint's folder; the containers make the same one."""
    return tiny_checkpoint()


@pytest.fixture(scope="session", params=["as started", "encoder restarted", "diffusion restarted"])
def pair(stack: Stack, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The stack as the tests of two processes know it, by its public port alone."""
    if request.param != "as started":
        other = {"encoder": "diffusion", "diffusion": "encoder"}[service := request.param.split()[0]]
        before = stack.state(other)["StartedAt"]
        stack.done("restart", service)
        stack.wait_ready()
        assert stack.state(other)["StartedAt"] == before
    with from_outside(stack, tmp_path_factory.mktemp("stack")) as pair:
        yield pair


@pytest.fixture
def outside(stack: Stack, tmp_path: Path) -> Iterator[Pair]:
    """As `pair`, however the stack is now; for tests that break it."""
    stack.wait_ready()
    with from_outside(stack, tmp_path) as pair:
        yield pair
