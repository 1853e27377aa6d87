"""A payload reaches every rank of every mesh as the leader made it, and every line of a mesh can speak."""

import time
from collections.abc import Iterator

import pytest

from shared_runtime.ranks.mesh import Mesh
from shared_schema.deploy.load import load_deployment
from shared_schema.errors import DeployError
from tests.ranks import Ranks, rank_groups
from tests.shared_runtime.ranks.handing_over import digest, payload

JOBS = "tests.shared_runtime.ranks.handing_over"
LARGE, SMALL = 300 * 10**6, 10**6
LIMIT_S = 60.0
MESHES = [
    Mesh(tp=2, ulysses=2),
    pytest.param(Mesh(tp=4), marks=pytest.mark.slow),
    pytest.param(Mesh(ulysses=4), marks=pytest.mark.slow),
]
LINES = [(0, 1), (2, 3), (0, 2), (1, 3), (1, 2, 3), (2,)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_large_payload_is_the_same_on_every_rank(ranks: Ranks, mesh: Mesh) -> None:
    # case 33
    ranks.run(mesh, f"{JOBS}:sums")
    begun = time.monotonic()
    held = ranks.run(mesh, f"{JOBS}:hand_over", (0, 1, 2, 3), LARGE)
    assert time.monotonic() - begun < LIMIT_S
    assert held == [digest(payload(LARGE))] * 4


@pytest.mark.parametrize("members", LINES, ids=str)
def test_the_first_of_some_ranks_hands_over_to_them_alone(ranks: Ranks, members: tuple[int, ...]) -> None:
    # case 33: its number among them is not its number among all
    held = ranks.run(Mesh(tp=4), f"{JOBS}:hand_over", members, SMALL)
    assert held == [digest(payload(SMALL)) if rank in members else "" for rank in range(4)]


def test_a_large_payload_reaches_ranks_one_and_three(ranks: Ranks) -> None:
    # case 33
    begun = time.monotonic()
    held = ranks.run(Mesh(tp=2, ulysses=2), f"{JOBS}:hand_over", (1, 3), LARGE)
    assert time.monotonic() - begun < LIMIT_S
    made = digest(payload(LARGE))
    assert held == ["", made, "", made]


@pytest.fixture(scope="module")
def eight() -> Iterator[Ranks]:
    with rank_groups(8) as groups:
        yield groups


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_group_works_or_its_deploy_file_is_refused_in_one_line(eight: Ranks, world: int, tp: int) -> None:
    # case 38
    ulysses = max(1, world // tp)
    devices = ",".join(["cpu"] * world)
    keys = f'"devices":"{devices}","tensor_parallel_size":{tp},"ulysses_degree":{ulysses}'
    overrides = f'{{"1":{{{keys}}}}}'
    if world == 3 or world % tp:
        with pytest.raises(DeployError, match=r"\A.+\Z"):
            load_deployment("tiny", overrides)
        return
    load_deployment("tiny", overrides)
    mesh = Mesh(tp, ulysses)
    begun = time.monotonic()
    told = eight.run(mesh, f"{JOBS}:sums")
    assert time.monotonic() - begun < LIMIT_S
    for rank, (across, along) in enumerate(told):
        assert across == sum(line for line in range(world) if line // tp == rank // tp)
        assert along == sum(line for line in range(world) if line % tp == rank % tp)
