"""What the tests of the diffusion service share."""

from collections.abc import Iterator

import pytest

from tests.objects import Bucket, new_bucket, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of a real S3 server."""
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket."""
    return new_bucket(s3, monkeypatch)
