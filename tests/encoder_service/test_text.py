"""The compiled text tower is the one that transformers runs, in few graphs."""

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds
from torch._dynamo.utils import counters

from encoder_service.text import WARM_UP_TOKENS, compile_layers, warm_up
from shared_runtime.stored import TEXT_LAYERS
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_processor, load_text_encoder


@pytest.mark.slow
@torch.no_grad()
def test_what_is_compiled_at_start_serves_every_layer_and_every_length() -> None:
    path = tiny_checkpoint()
    encoder, processor = load_text_encoder(path, "cpu"), load_processor(path)
    lengths = (2, 40, 41, 77, 1)

    def made() -> list[torch.Tensor]:
        # As requests do it, with the hooks by which transformers reads hidden states.
        return [
            get_qwen3vl_prompt_embeds(encoder, processor, list(range(length)), {}, TEXT_LAYERS, "cpu", encoder.dtype)
            for length in lengths
        ]

    wanted = made()
    torch._dynamo.reset()
    counters.clear()
    compile_layers(encoder, backend="eager")
    warm_up(encoder, processor)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 6, "MLP and norms of layers, of queries and of keys, some also for a single token"
    for one, other in zip(made(), wanted, strict=True):
        assert torch.equal(one, other)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


def test_what_warms_up_is_a_whole_forward_of_the_tower() -> None:
    path = tiny_checkpoint()
    encoder = load_text_encoder(path, "cpu")
    layers = encoder.model.language_model.layers
    seen: list[torch.Size] = []
    layers[len(layers) - 1].register_forward_hook(lambda _, given, made: seen.append(made.shape))
    warm_up(encoder, load_processor(path))
    assert [shape[:2] for shape in seen] == [(1, length) for length in WARM_UP_TOKENS]
