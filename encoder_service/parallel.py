"""How the encoder's models are spread over its ranks: text cut, pictures in tiles, sound on the leader. Torch."""

from shared_runtime.sharding import Cut, ShardPlan

TEXT_PLAN: ShardPlan = {
    "model.language_model.layers.*.self_attn.[qkv]_proj": Cut.COLUMN,
    "model.language_model.layers.*.self_attn.o_proj": Cut.ROW,
    "model.language_model.layers.*.mlp.gate_proj": Cut.COLUMN,
    "model.language_model.layers.*.mlp.up_proj": Cut.COLUMN,
    "model.language_model.layers.*.mlp.down_proj": Cut.ROW,
}
"""Attention by heads and the MLP by channels. The vision tower (0.6 of 24.5 billion parameters) and the embeddings are
replicated: cutting them would save 2 % and cost a collective a layer.
"""
