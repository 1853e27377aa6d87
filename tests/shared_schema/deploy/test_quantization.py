"""Names of layers that FP8 leaves alone: known before a weight is read."""

import pytest

from shared_schema.deploy.quantization import BLOCKS, CONDITION, LINEARS, MOST_KINDS, check_ignored, takes
from shared_schema.errors import DeployError


@pytest.mark.parametrize("pattern", ["to_qkvs", "token_refiner", "embedder", "transformer_blocks.50", "blocks.6*"])
def test_a_name_that_is_no_layer_is_refused(pattern: str) -> None:
    with pytest.raises(DeployError) as caught:
        check_ignored(["to_out", pattern], 50)
    message = str(caught.value)
    assert f"ignored_layers: {pattern!r} is no layer that fp8 takes: they are context_embedder, and attn" in message
    assert message.endswith("of transformer_blocks.0 to 49")


@pytest.mark.parametrize("pattern", ["to_out", "attn.to_k", "ff.net.*.proj", "transformer_blocks.49", "attn", "*.4?"])
def test_names_of_layers_are_accepted(pattern: str) -> None:
    check_ignored([pattern], 50)
    left = [name for name in every(50) if not takes(name, [pattern])]
    assert 0 < len(left) < len(every(50))


def every(blocks: int) -> list[str]:
    return [f"{BLOCKS}{number}.{linear}" for number in range(blocks) for linear in LINEARS]


@pytest.mark.parametrize("pattern", [CONDITION, "context_*"])
def test_the_condition_projection_is_accepted_and_no_block_goes_with_it(pattern: str) -> None:
    check_ignored([pattern], 50)
    assert takes(CONDITION, [])
    assert not takes(CONDITION, [pattern])
    assert takes(CONDITION, ["transformer_blocks.*", "adaln_proj"])
    assert all(takes(name, [pattern]) for name in every(50))


def test_query_key_and_value_go_together_within_their_block() -> None:
    left = [name for name in every(3) if not takes(name, ["transformer_blocks.1.attn.to_k"])]
    assert left == [f"transformer_blocks.1.attn.to_{each}" for each in "qkv"]


def test_nothing_else_of_a_transformer_is_taken() -> None:
    others = ("proj_in", "token_refiner.refiner_blocks.0.attn.to_q", "transformer_blocks.0.adaln_proj.linear")
    assert not any(takes(name, ()) for name in others)
    assert all(takes(name, ()) for name in every(2))


def test_blocks_of_too_many_kinds_are_refused() -> None:
    one = [f"transformer_blocks.{number}.{linear}" for number, linear in enumerate(LINEARS[2:])]
    check_ignored(one[: MOST_KINDS - 1], 50)
    with pytest.raises(DeployError, match="blocks of 5 kinds, and 4 are served"):
        check_ignored(one, 50)
    check_ignored([f"transformer_blocks.{number}" for number in range(20)], 50)  # two kinds
