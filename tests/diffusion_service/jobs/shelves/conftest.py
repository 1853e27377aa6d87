"""Every kind of shelf, in a folder or on a real S3 server."""

from collections.abc import Callable
from pathlib import Path

import pytest

from diffusion_service.jobs.shelves.folder import FolderShelf
from diffusion_service.jobs.shelves.objects import ObjectShelf
from diffusion_service.jobs.shelves.shelf import Shelf

OpenShelf = Callable[[str], Shelf]
"""The shelf as a service of that name sees it."""


@pytest.fixture(params=["folder", "s3"])
def open_shelf(request: pytest.FixtureRequest, tmp_path: Path) -> OpenShelf:
    if request.param == "folder":
        return lambda name: FolderShelf(tmp_path / "shared", shared=True)
    url, options = request.getfixturevalue("bucket")
    return lambda name: ObjectShelf(url, options, tmp_path / name / "parts")
