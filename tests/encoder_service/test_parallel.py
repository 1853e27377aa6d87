"""The text encoder cut over two ranks equals one rank, and each holds half of what is cut."""

from pathlib import Path

import pytest
import torch

from shared_runtime.ranks.mesh import Mesh
from shared_runtime.tiny import tiny_checkpoint
from tests.encoder_service.text_forward import Embedded
from tests.ranks import Ranks

TOKENS = list(range(40, 80))


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return tiny_checkpoint()


def run(ranks: Ranks, mesh: Mesh, path: Path, dtype: torch.dtype, tokens: list[int] = TOKENS) -> Embedded:
    made = ranks.run(mesh, "tests.encoder_service.text_forward:embed", path, tokens, dtype)
    assert isinstance(made, Embedded)
    return made


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_fp32_equals_one_rank(ranks: Ranks, checkpoint: Path) -> None:
    alone = run(ranks, Mesh(), checkpoint, torch.float32)
    spread = run(ranks, Mesh(tp=2), checkpoint, torch.float32)
    assert relative(spread.embeds, alone.embeds) <= 1e-5
    assert spread.agree


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (list(range(60, 120)), [50, 50, *range(30, 110)])),
    ],
    ids=len,
)
def test_bf16_is_nearer_to_one_rank_than_bf16_is_to_fp32(ranks: Ranks, checkpoint: Path, tokens: list[int]) -> None:
    exact = run(ranks, Mesh(), checkpoint, torch.float32, tokens)
    alone = run(ranks, Mesh(), checkpoint, torch.bfloat16, tokens)
    spread = run(ranks, Mesh(tp=2), checkpoint, torch.bfloat16, tokens)
    assert relative(alone.embeds, exact.embeds) > 0.01
    assert relative(spread.embeds, alone.embeds) <= 0.5 * relative(alone.embeds, exact.embeds)


def test_each_rank_holds_half_of_what_is_cut(ranks: Ranks, checkpoint: Path) -> None:
    # case 37: the leader must not hold the whole encoder
    whole = run(ranks, Mesh(), checkpoint, torch.bfloat16).rank_bytes[0]
    halves = run(ranks, Mesh(tp=2), checkpoint, torch.bfloat16).rank_bytes
    assert len(set(halves)) == 1
    cut = 2 * (whole - halves[0])
    assert cut > 0.6 * whole


def test_only_the_last_token_changes_with_the_last_word(ranks: Ranks, checkpoint: Path) -> None:
    """The measure above can fail: another token is far away by it."""
    function = "tests.encoder_service.text_forward:embed"
    one = ranks.run(Mesh(tp=2), function, checkpoint, TOKENS, torch.float32)
    other = ranks.run(Mesh(tp=2), function, checkpoint, [*TOKENS[:-1], 99], torch.float32)
    assert relative(one.embeds, other.embeds) > 1e-3
    assert relative(one.embeds[:, :-1], other.embeds[:, :-1]) == 0
