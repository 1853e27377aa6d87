"""pytest hooks for folders whose tests drive a live pair: its logs beside a failure, and time for its start."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.end_to_end.pair import Pair

FIRST_S = 1200.0
"""The first test of a session waits for two services and the reference, on a busy machine too."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the end of both logs beside a failure."""
    report = yield
    pair = getattr(item, "funcargs", {}).get("pair")
    if report.failed and isinstance(pair, Pair):
        report.sections.append(("the services", pair.tails()))
    return report


def allow_for_start(folder: Path, items: list[pytest.Item]) -> None:
    """The first test of a folder also pays for the start of the pair, on a busy machine too."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.timeout(FIRST_S))
