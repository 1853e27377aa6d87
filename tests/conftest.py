"""What the tests of every package share: the folder of fixture files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.make_cases import shared_cases
from tests.postgres import PostgresServer, postgres_server
from tests.ranks import Ranks, rank_groups


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
