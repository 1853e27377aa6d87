"""What the tests of the diffusion service share."""

from collections.abc import Iterator

import pytest

from tests.diffusion_service.rank_jobs import Shop
from tests.objects import Bucket, new_bucket, s3_server
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of a real S3 server."""
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket."""
    return new_bucket(s3, monkeypatch)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Iterator[Shop]:
    """Payloads of every task in a slab, and ranks that make clips of them."""
    made = Shop(tmp_path_factory.mktemp("slab"), ranks)
    yield made
    made.slab.close()
