"""The compiled text tower is the one that transformers runs, in one graph."""

import pytest
import torch
from torch._dynamo.utils import counters

from encoder_service.text import compile_layers, warm_up
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_processor, load_text_encoder


@pytest.mark.slow
@torch.no_grad()
def test_one_graph_serves_every_layer_and_every_length() -> None:
    encoder = load_text_encoder(tiny_checkpoint(), "cpu")
    language = encoder.model.language_model.float()
    language.layers = language.layers[:4]
    random = torch.Generator().manual_seed(2)
    given = [torch.randn(1, length, language.config.hidden_size, generator=random) for length in (40, 41, 77)]

    def made() -> list[torch.Tensor]:
        return [language(inputs_embeds=each, use_cache=False).last_hidden_state for each in given]

    wanted = made()
    torch._dynamo.reset()
    counters.clear()
    compile_layers(encoder, backend="eager")
    for one, other in zip(made(), wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_what_warms_up_is_a_whole_forward_of_the_tower() -> None:
    path = tiny_checkpoint()
    encoder = load_text_encoder(path, "cpu")
    layers = encoder.model.language_model.layers
    seen: list[torch.Size] = []
    layers[len(layers) - 1].register_forward_hook(lambda _, given, made: seen.append(made.shape))
    warm_up(encoder, load_processor(path))
    assert [shape[:2] for shape in seen] == [(1, 96)] * 2
