"""Working request by request changes no bit of what diffusers' own forward makes."""

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerBlock
from torch._dynamo.testing import CompileCounter

from diffusion_service.model.adaln import GivenTable, Modulation
from diffusion_service.model.attention import attend_with, join_qkv, norm_and_rotate, use_attention
from diffusion_service.model.compile import compile_blocks
from diffusion_service.model.dit import Dit, Moment, Rows
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_transformer, weight_bytes
from tests.diffusion_service.parallel.dit_forward import inputs, step


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def transformer() -> Any:
    return load_transformer(tiny_checkpoint(), "transformer", "cpu")


def fitted(transformer: Any) -> Dit:
    use_attention(transformer, attend_with("TORCH_SDPA"))
    return Dit(transformer, Modulation(transformer, on_host=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text_rows", [4, 7])
def test_a_step_equals_diffusers_forward_bit_for_bit(transformer: Any, dtype: torch.dtype, text_rows: int) -> None:
    transformer = transformer.to(dtype)
    given = inputs(text_rows, transformer.config, dtype)
    with torch.no_grad():
        reference = transformer(**given, return_dict=False)
    for made, wanted in zip(step(fitted(transformer), given), reference, strict=True):
        assert torch.equal(made, wanted)


def test_every_step_of_a_schedule_equals_its_own_forward(transformer: Any) -> None:
    given = inputs(5, transformer.config, torch.float32)
    times = [torch.tensor([0.2, 0.9]), torch.tensor([0.1, 0.6]), torch.tensor([0.0, 0.3])]
    with torch.no_grad():
        wanted = [transformer(**{**given, "timestep": time}, return_dict=False)[0] for time in times]
    assert not torch.equal(wanted[0], wanted[1])
    schedule = [Moment(time, given["timestep_indices"]) for time in times]
    dit = fitted(transformer)
    for _ in range(2):  # the second request has the same schedule, and gets the tables of the first
        denoising = dit.begin(given["encoder_hidden_states"], Rows.from_layout(given), schedule)
        for number, velocity in enumerate(wanted):
            made, _ = denoising.step(number, given["hidden_states"], given["audio_hidden_states"])
            assert torch.equal(made, velocity)


def test_tables_are_kept_for_the_schedule_and_made_anew_for_another(transformer: Any) -> None:
    modulation = fitted(transformer).modulation
    width = transformer.time_embedder.linear_2.out_features
    embedded = [torch.randn(2, width), torch.randn(3, width)]
    times = [torch.tensor([0.5, 0.25]), torch.tensor([0.5, 0.25, 1.0])]
    tables = modulation.tables(times, embedded)
    assert [len(each) for each in tables] == [len(transformer.transformer_blocks)] * 2
    assert [each[0].shape[0] for each in tables] == [2 * 3, 3 * 3]
    assert modulation.tables([each.clone() for each in times], embedded) is tables
    assert modulation.tables(times[::-1], embedded[::-1]) is not tables


def test_the_blocks_hold_no_modulation_weights_any_more(transformer: Any) -> None:
    before = weight_bytes(transformer)
    modulation = fitted(transformer).modulation
    assert modulation.weight_bytes > 0.2 * before
    assert weight_bytes(transformer) == before - modulation.weight_bytes
    assert all(isinstance(block.adaln_proj, GivenTable) for block in transformer.transformer_blocks)


def test_one_product_for_query_key_and_value_makes_the_same(transformer: Any) -> None:
    given = inputs(6, transformer.config, torch.float32)
    with torch.no_grad():
        wanted = transformer(**given, return_dict=False)[0]
    dit = fitted(transformer)
    before = weight_bytes(transformer)
    join_qkv(transformer, attend_with("TORCH_SDPA"), norm_and_rotate)
    assert weight_bytes(transformer) == before
    assert torch.allclose(step(dit, given)[0], wanted, atol=1e-5)


def test_other_lengths_and_other_numbers_of_timesteps_compile_no_more(transformer: Any) -> None:
    torch._dynamo.reset()
    dit = fitted(transformer)
    compiled = CompileCounter()
    compile_blocks(transformer.transformer_blocks, backend=compiled)
    assert isinstance(transformer.transformer_blocks[0], MiniMaxH3TransformerBlock)
    for rows in (4, 5, 9, 16, 30, 64):
        given = inputs(rows, transformer.config, torch.float32)
        step(dit, given)
        step(dit, {**given, "timestep": torch.tensor([0.1, 0.4, 1.0])})
    assert compiled.frame_count <= 2


def test_after_the_warm_up_no_request_compiles(transformer: Any) -> None:
    torch._dynamo.reset()
    dit = fitted(transformer.bfloat16())
    compiled = CompileCounter()
    compile_blocks(transformer.transformer_blocks, backend=compiled)
    dit.warm_up(300)
    warm = compiled.frame_count
    assert warm == 1
    for rows in (4, 17):
        step(dit, inputs(rows, transformer.config, torch.bfloat16))
    assert compiled.frame_count == warm
