"""What the tests of every package share: the folder of fixture files."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.cases.make_cases import shared_cases
from tests.postgres import PostgresServer, postgres_server
from tests.ranks import Ranks, rank_groups

# How long an example takes says something of the machine and nothing of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Whoever ends the tests by TERM ends them as Ctrl-C does: fixtures stop the services that they have started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def cases() -> Path:
    """The fixture files. Read only."""
    return shared_cases()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL server; see `tests.postgres`."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """The URL of an empty PostgreSQL database."""
    return postgres.new_database()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real rank groups that call functions of test modules; see `tests.ranks`."""
    with rank_groups() as groups:
        yield groups
