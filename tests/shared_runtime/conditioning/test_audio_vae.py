"""Sounds are begun before anybody asks for them, on the leader alone, and come in the order in which they were."""

from pathlib import Path

import pytest
import torch

from shared_runtime.ranks.mesh import Mesh
from shared_runtime.tiny import tiny_checkpoint
from tests.ranks import Ranks
from tests.shared_runtime.conditioning.sounding import Heard

HEAR = "tests.shared_runtime.conditioning.sounding:hear"
HEAR_AFTER_A_FAILURE = "tests.shared_runtime.conditioning.sounding:hear_after_a_failure"


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return tiny_checkpoint()


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2)], ids=str)
def test_what_was_begun_is_what_is_asked_for(ranks: Ranks, checkpoint: Path, mesh: Mesh) -> None:
    alone = ranks.run(Mesh(), HEAR, checkpoint, 0, 3)
    begun = ranks.run(mesh, HEAR, checkpoint, 3, 3)
    assert isinstance(begun, Heard)
    assert (alone.before, alone.after) == ([0], [3])
    nothing = [0] * (mesh.world_size - 1)
    assert (begun.before, begun.after) == ([3, *nothing], [3, *nothing])
    assert begun.agree
    assert all(map(torch.equal, begun.latents, alone.latents))
    assert not torch.equal(begun.latents[0], begun.latents[1])


@pytest.mark.parametrize("fails_at", [1, 3], ids=["the second sound", "the pictures"])
def test_a_failure_leaves_nothing_for_the_next_request(ranks: Ranks, checkpoint: Path, fails_at: int) -> None:
    one, other = ranks.run(Mesh(), HEAR_AFTER_A_FAILURE, checkpoint, fails_at)
    assert torch.equal(one, other)
