"""A real S3 server for tests, in a process of its own; no network."""

import contextlib
import itertools
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from video_client.pair import free_ports

START_S = 60.0
ACCOUNT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""What a client of it finds in its environment."""

Bucket = tuple[str, dict[str, object]]
"""URL of a folder in a bucket, and the options that reach it."""


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a running server without buckets."""
    port = free_ports(1)[0]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, **ACCOUNT}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                break
            except OSError:
                if time.monotonic() > until or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def new_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket on that server; the test's environment has its credentials from now on."""
    # The client takes a second to import, and few tests need it.
    import s3fs

    for name, value in ACCOUNT.items():
        monkeypatch.setenv(name, value)
    options: dict[str, object] = {"endpoint_url": endpoint}
    files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False, **options)
    name = next(f"bucket-{n}" for n in itertools.count() if not files.exists(f"bucket-{n}"))
    files.mkdir(name)
    return f"s3://{name}/h3", options
