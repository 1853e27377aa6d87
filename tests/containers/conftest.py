"""One running stack for all tests of this folder; `.ci/run containers` starts the engine and builds the images."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.containers.stack import READY_S, Stack
from tests.end_to_end.pair import Pair, Service, free_port


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Containers start slowly."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(3 * READY_S))
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The stack as compose.yaml has it; when the tests are done it goes with everything that it had."""
    stack = Stack(f"h3-{uuid.uuid4().hex[:8]}", free_port())
    try:
        stack.up()
        yield stack
    finally:
        stack.down()
    assert stack.left() == []


@pytest.fixture(scope="session", params=["as started", "encoder restarted", "diffusion restarted"])
def pair(stack: Stack, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The stack as the tests of two processes know it, by its public port alone."""
    if request.param != "as started":
        other = {"encoder": "diffusion", "diffusion": "encoder"}[service := request.param.split()[0]]
        before = stack.state(other)["StartedAt"]
        stack.done("restart", service)
        stack.wait_ready()
        assert stack.state(other)["StartedAt"] == before
    root = tmp_path_factory.mktemp("stack")
    encoder, diffusion = (
        Service(f"{name}_service", [], port, root / f"{name}.log", dict(os.environ))
        for name, port in (("encoder", 0), ("diffusion", stack.port))
    )
    with httpx.Client(base_url=stack.url, timeout=120) as client:
        yield Pair(root, root, stack.name, encoder, diffusion, client)


@pytest.fixture
def outside(stack: Stack, tmp_path: Path) -> Iterator[Pair]:
    """As `pair`, however the stack is now; for tests that break it."""
    stack.wait_ready()
    service = Service("diffusion_service", [], stack.port, tmp_path / "none.log", {})
    with httpx.Client(base_url=stack.url, timeout=120) as client:
        yield Pair(tmp_path, tmp_path, stack.name, service, service, client)
