"""The text tower's layers, compiled once for every length. Runs in encoder ranks; torch."""

from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

from shared_runtime.stored import TEXT_LAYERS

WARM_UP_TOKENS = 96


def compile_layers(text_encoder: Any, backend: str = "inductor") -> None:
    """Compile every layer when it is first called: one graph serves all of them, with its length as a symbol in it.

    The forward of a layer and not its call: on calls transformers hangs a hook for every layer, and each would be a
    graph of its own.
    """
    for layer in text_encoder.model.language_model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=True, backend=backend)


@torch.no_grad()
def warm_up(text_encoder: Any, processor: Any) -> None:
    """Encode something, before anybody waits for the compiler. A collective.

    Words alone, and words as they stand between pictures: their places have three directions, which is another graph.
    """
    device, dtype = text_encoder.device, text_encoder.dtype
    tokens = list(range(WARM_UP_TOKENS))
    get_qwen3vl_prompt_embeds(text_encoder, processor, tokens, {}, TEXT_LAYERS, device, dtype)
    language = text_encoder.model.language_model
    places = torch.arange(WARM_UP_TOKENS, device=device).expand(3, 1, -1)
    embedded = language.embed_tokens(torch.tensor([tokens], device=device))
    mask = torch.ones(1, WARM_UP_TOKENS, dtype=torch.long, device=device)
    language(inputs_embeds=embedded, attention_mask=mask, position_ids=places, use_cache=False)
