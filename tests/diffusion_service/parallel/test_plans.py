"""Every parallel plan of the DiT equals the single rank, for lengths that do not divide, rows of sound apart."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from shared_runtime.ranks.mesh import Mesh
from shared_runtime.tiny import tiny_checkpoint
from tests.diffusion_service.parallel.dit_forward import Forward
from tests.ranks import Ranks

FORWARD = "tests.diffusion_service.parallel.dit_forward:forward"
MESHES = [
    Mesh(tp=2),
    Mesh(ulysses=2),
    Mesh(tp=2, ulysses=2),
    pytest.param(Mesh(tp=4), marks=pytest.mark.slow),
    pytest.param(Mesh(ulysses=4), marks=pytest.mark.slow),
]
ROWS = [4, 5, 6, 7]
"""Packed lengths 44 to 47: 0 to 3 mod 4."""


Alone = Callable[[int, torch.dtype], Forward]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return tiny_checkpoint()


def run(ranks: Ranks, mesh: Mesh, path: Path, rows: int, dtype: torch.dtype, partition: str = "transformer") -> Forward:
    made = ranks.run(mesh, FORWARD, path, partition, rows, dtype)
    assert isinstance(made, Forward)
    return made


@pytest.fixture(scope="module")
def alone(ranks: Ranks, checkpoint: Path) -> Alone:
    """What one rank makes, once for every length and precision."""

    @cache
    def forward(rows: int, dtype: torch.dtype) -> Forward:
        return run(ranks, Mesh(), checkpoint, rows, dtype)

    return forward


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_fp32_equals_one_rank_for_every_length(ranks: Ranks, checkpoint: Path, alone: Alone, mesh: Mesh) -> None:
    # case 72: sound as exact as the picture
    for rows in ROWS:
        whole = alone(rows, torch.float32)
        spread = run(ranks, mesh, checkpoint, rows, torch.float32)
        assert difference(whole.video, spread.video) <= 1e-5
        assert difference(whole.audio, spread.audio) <= 1e-5
        assert spread.agree


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_bf16_is_nearer_to_one_rank_than_bf16_is_to_fp32(
    ranks: Ranks, checkpoint: Path, alone: Alone, mesh: Mesh
) -> None:
    for rows in ROWS:
        exact, whole = alone(rows, torch.float32), alone(rows, torch.bfloat16)
        spread = run(ranks, mesh, checkpoint, rows, torch.bfloat16)
        error = {"video": difference(whole.video, exact.video), "audio": difference(whole.audio, exact.audio)}
        assert min(error.values()) > 0.01
        assert difference(spread.video, whole.video) <= 0.5 * error["video"]
        assert difference(spread.audio, whole.audio) <= 0.5 * error["audio"]


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(each, marks=pytest.mark.slow) for each in (Mesh(ulysses=2), Mesh(tp=2), Mesh(tp=2, ulysses=2))],
    ids=str,
)
def test_blocks_as_gpus_run_them_are_one_graph_for_every_length(
    ranks: Ranks, checkpoint: Path, alone: Alone, mesh: Mesh
) -> None:
    spread, graphs = ranks.run(mesh, "tests.diffusion_service.parallel.dit_forward:every_length", checkpoint, ROWS)
    assert graphs == 1
    for rows, made in zip(ROWS, spread, strict=True):
        whole = alone(rows, torch.float32)
        assert difference(whole.video, made.video) <= 1e-5
        assert difference(whole.audio, made.audio) <= 1e-5
        assert made.agree


def test_the_reference_partition_is_spread_the_same_way(ranks: Ranks, checkpoint: Path, alone: Alone) -> None:
    whole = run(ranks, Mesh(), checkpoint, 5, torch.float32, "transformer_ref")
    spread = run(ranks, Mesh(tp=2, ulysses=2), checkpoint, 5, torch.float32, "transformer_ref")
    assert difference(whole.video, spread.video) <= 1e-5
    assert difference(whole.video, alone(5, torch.float32).video) > 1e-3


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_holds_its_share_of_what_is_cut_and_all_of_the_rest(
    ranks: Ranks, checkpoint: Path, alone: Alone, tp: int
) -> None:
    whole = alone(4, torch.float32).rank_bytes[0]
    parts = run(ranks, Mesh(tp=tp), checkpoint, 4, torch.float32).rank_bytes
    assert len(set(parts)) == 1
    cut = (whole - parts[0]) * tp // (tp - 1)
    assert cut > 0.6 * whole
    assert sum(parts) == cut + tp * (whole - cut)
