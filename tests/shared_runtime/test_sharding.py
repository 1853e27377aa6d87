"""Ranks hold together what the checkpoint has, and alone no more than their share of what is cut."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch

from diffusion_service.parallel.tensor import DIT_PLAN, use_local_heads
from encoder_service.parallel import TEXT_PLAN
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.sharding import Sharding
from shared_runtime.stored import Component, stored_tensors
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_text_encoder, load_transformer
from shared_schema.errors import DeployError
from tests.ranks import Ranks
from tests.shared_runtime.holding import Held

JOBS = "tests.shared_runtime.holding"
ITEM_BYTES = {"BF16": 2, "F32": 4}
PARTITIONS: list[Component] = ["transformer", "transformer_ref"]
Shares = list[Mapping[str, Held]]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return tiny_checkpoint()


def stored_bytes(path: Path, component: Component) -> dict[str, int]:
    """Of every tensor that the component needs, by name."""
    return {name: ITEM_BYTES[each.dtype] * prod(each.shape) for name, each in stored_tensors(path, component).items()}


def unique_bytes(shares: Shares) -> int:
    """Of everything that some rank holds, what several hold counted once."""
    return sum(held.nbytes for _, held in {(name, held) for share in shares for name, held in share.items()})


def cut(shares: Shares) -> set[str]:
    """Tensors of which ranks hold different parts."""
    return {name for name in shares[0] if len({share[name] for share in shares}) > 1}


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2)], ids=str)
def test_text_encoder_ranks_hold_together_what_the_checkpoint_needs(ranks: Ranks, checkpoint: Path, mesh: Mesh) -> None:
    shares = ranks.run(mesh, f"{JOBS}:text_encoder", checkpoint)
    stored = stored_bytes(checkpoint, "text_encoder")
    assert shares[0].keys() == stored.keys()
    assert unique_bytes(shares) == sum(stored.values())


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(tp=4), Mesh(ulysses=4), Mesh(tp=2, ulysses=2)], ids=str)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_dit_ranks_hold_together_what_the_checkpoint_needs(
    ranks: Ranks, checkpoint: Path, mesh: Mesh, partition: Component
) -> None:
    shares = ranks.run(mesh, f"{JOBS}:transformer", checkpoint, partition)
    assert unique_bytes(shares) == sum(stored_bytes(checkpoint, partition).values())
    assert bool(cut(shares)) == (mesh.tp > 1)


def test_an_encoder_rank_of_two_holds_half_of_what_is_cut(ranks: Ranks, checkpoint: Path) -> None:
    # case 37
    shares = ranks.run(Mesh(tp=2), f"{JOBS}:text_encoder", checkpoint)
    stored, names = stored_bytes(checkpoint, "text_encoder"), cut(shares)
    whole = sum(stored[name] for name in names)
    for share in shares:
        assert sum(share[name].nbytes for name in names) == pytest.approx(whole / 2, rel=0.05)
        assert {name: share[name].nbytes for name in share.keys() - names} == {
            name: stored[name] for name in stored.keys() - names
        }
    language = sum(nbytes for name, nbytes in stored.items() if ".language_model.layers." in name)
    assert whole > 0.95 * language


def alone(mesh: Mesh) -> RankComm:
    """One rank of a mesh whose others are not there."""
    return RankComm(RankSpec("test", 0, mesh, "cpu"), torch.device("cpu"))


def test_heads_that_do_not_divide_stop_the_start(checkpoint: Path) -> None:
    # case 38: the tiny model has two key-value heads and four of the DiT
    with pytest.raises(DeployError, match="keys and values has 2 heads, which do not divide by tensor_parallel_size 4"):
        load_text_encoder(checkpoint, "cpu", Sharding(TEXT_PLAN, alone(Mesh(tp=4))))
    mesh = Mesh(tp=4, ulysses=2)
    transformer = load_transformer(checkpoint, "transformer", "cpu", Sharding(DIT_PLAN, alone(mesh)))
    with pytest.raises(DeployError, match="4 heads, which do not divide by tensor_parallel_size 4 x ulysses_degree 2"):
        use_local_heads(transformer, alone(mesh))
