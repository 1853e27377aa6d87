"""The text tower's norms and MLPs, compiled once for every length. Runs in encoder ranks; torch.

Not whole layers: transformers hangs a hook on every layer and every attention to read hidden states, each with a key of
its own, so that each layer would be a graph of its own. Between the products that is all there is to join anyway.
"""

from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

from shared_runtime.stored import TEXT_LAYERS

WARM_UP_TOKENS = (96, 1)
"""Any length is one graph, but for a single token, which the compiler takes for a constant."""


def compile_layers(text_encoder: Any, backend: str = "inductor") -> None:
    """Compile what is called between the products of every layer; all layers share the graphs."""
    for layer in text_encoder.model.language_model.layers:
        attention = layer.self_attn
        norms = layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm
        for part in (*norms, layer.mlp):
            part.forward = torch.compile(part.forward, fullgraph=True, dynamic=True, backend=backend)


@torch.no_grad()
def warm_up(text_encoder: Any, processor: Any) -> None:
    """Encode something as requests do, before anybody waits for the compiler. A collective."""
    device, dtype = text_encoder.device, text_encoder.dtype
    for length in WARM_UP_TOKENS:
        get_qwen3vl_prompt_embeds(text_encoder, processor, list(range(length)), {}, TEXT_LAYERS, device, dtype)
