"""Rank groups that the tests of this folder share, and a Ray cluster for those that run there."""

from collections.abc import Iterator

import pytest

from tests.ray_cluster import RayCluster, ray_cluster
from tests.shared_runtime.ranks.living import LivingGroup, living_group


@pytest.fixture(scope="package")
def cluster() -> Iterator[RayCluster]:
    """Two nodes, and the environment that leads there."""
    with ray_cluster() as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster


@pytest.fixture(scope="module", params=["mp", pytest.param("ray", marks=pytest.mark.slow)])
def two(request: pytest.FixtureRequest) -> Iterator[LivingGroup]:
    """A group of two puppets, on each backend."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
    with living_group(request.param, ranks=2) as group:
        yield group


@pytest.fixture(scope="module")
def one() -> Iterator[LivingGroup]:
    """A puppet alone."""
    with living_group("mp", ranks=1) as group:
        yield group
